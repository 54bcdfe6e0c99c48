"""An embedding whose table is in host memory: the rows are the module's own, on the way through pinned buffers too."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from fitune.model import ends
from fitune.model.ends import HostEmbedding
from fitune.model.host_threads import FEW, thread_with_few


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * 3


def table(kind: type[nn.Embedding]) -> nn.Embedding:
    torch.manual_seed(0)
    return kind(50, 24).to(torch.bfloat16).requires_grad_(False)


def test_ids_that_are_known_on_the_host_are_not_fetched():
    embedding = HostEmbedding(table(nn.Embedding), torch.device("cpu"))
    ids, other = torch.tensor([[1, 2]]), torch.tensor([[3, 4]])
    with embedding.knowing(ids, other):
        assert torch.equal(embedding(ids), embedding.weight[other])
        assert torch.equal(embedding(ids.clone()), embedding.weight[ids]), "another tensor's are not known"
    assert torch.equal(embedding(ids), embedding.weight[ids])


def test_knowledge_ends_with_an_error():
    embedding = HostEmbedding(table(nn.Embedding), torch.device("cpu"))
    ids = torch.tensor([[1, 2]])
    with pytest.raises(RuntimeError), embedding.knowing(ids, torch.tensor([[3, 4]])):
        raise RuntimeError
    assert torch.equal(embedding(ids), embedding.weight[ids])


def test_a_thread_with_few_leaves_the_others_as_they_were():
    before = torch.get_num_threads()
    begun: list[str] = []
    thread = thread_with_few("few", lambda: begun.append(threading.current_thread().name))
    assert thread.submit(torch.get_num_threads).result() == min(FEW, before)
    assert begun and begun[0].startswith("few") and torch.get_num_threads() == before
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert seen == [before], "a thread that begins later has the process' number"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_rows_pass_through_the_buffers_unchanged(kind, monkeypatch):
    """Nine buffers' worth, the last one not full."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    monkeypatch.setattr(ends, "EMBEDDING_STAGE_BYTES", 8 * 24 * 2)
    embedding = HostEmbedding(table(kind), torch.device("cuda", 0))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids = torch.randint(0, 50, (2, 35), generator=generator)
        expected = embedding.inner(ids)
        assert torch.equal(embedding(ids.cuda()).cpu(), expected)
        there = ids.cuda()
        with embedding.knowing(there, ids):
            assert torch.equal(embedding(there).cpu(), expected)
