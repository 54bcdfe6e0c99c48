"""Parts of tensors, and of packed weights with the values of the whole."""

from __future__ import annotations

import pytest
import torch

from fitune.model import dropout
from fitune.model.formats import pack, unpack
from fitune.model.loss import IGNORED, chunk_cross_entropy
from fitune.parallel.tensor_cut import Cut, shares, take_packed
from fitune.parallel.tensor_exchange import Exchanges, VocabularyLoss


def test_shares():
    assert shares(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert shares(320, 2, 64) == [(0, 192), (192, 320)]
    assert shares(3, 4) == [(0, 1), (1, 2), (2, 3), (3, 3)]


def test_parts_make_the_whole():
    whole = torch.arange(48.0).view(4, 12)
    cut = Cut.of(1, shares(6, 4), copies=2)  # two halves, each cut in four
    parts = [cut.take(whole, rank) for rank in range(4)]
    assert parts[0].tolist()[0] == [0, 1, 6, 7] and cut.length == 12
    made = torch.zeros_like(whole)
    for rank, part in enumerate(parts):
        assert part.shape == cut.shape(whole.shape, rank) and cut.whole_shape(part.shape) == whole.shape
        assert part.untyped_storage().nbytes() == part.numel() * 4, "the whole is not kept behind it"
        cut.put(made, part, rank)
    assert torch.equal(made, whole)


@pytest.mark.parametrize("format", ["bf16", "int8", "nf4", "fp4"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("double_quant", [True, False])
def test_parts_of_a_packed_weight_have_its_values(format: str, axis: int, double_quant: bool):
    torch.manual_seed(0)
    shape = (4, 64, 1024)
    packed = pack(torch.randn(shape), format, double_quant)
    whole = unpack(packed, torch.float32)
    cut = Cut.of(axis, shares(shape[axis], 4, 64 if axis == 2 else 1))
    parts = [take_packed(packed, cut, rank) for rank in range(4)]
    for rank, part in enumerate(parts):
        assert torch.equal(unpack(part, torch.float32), cut.take(whole, rank))
    on_meta = take_packed(packed.to("meta"), cut, 1)
    assert {k: (t.shape, t.dtype) for k, t in on_meta.tensors.items()} == {
        k: (t.shape, t.dtype) for k, t in parts[1].tensors.items()
    }
    kept = axis == 0 or not double_quant or format not in ("nf4", "fp4")
    constants = 4 * 257 * 4 if kept else 0  # of double quantisation
    assert sum(part.num_bytes() for part in parts) <= packed.num_bytes() * (1.0 if kept else 1.1) + constants


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_part_is_dropped_as_in_the_whole(device: str):
    x, keys = torch.randn(5, 12), torch.arange(5, dtype=torch.int32) * 7919
    whole = dropout.apply(x, 0.5, keys, 3)
    part = dropout.apply(x[:, 4:9].to(device), 0.5, keys.to(device), 3, first=4, on_cuda=device == "cuda")
    assert torch.equal(part.cpu(), whole[:, 4:9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_from_parts_of_the_vocabulary(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Three ranks in one process: each tells what it has, then all know the sum."""
    torch.manual_seed(0)
    logits = (torch.randn(6, 10) * 20).to(dtype)
    targets = torch.tensor([0, 9, 4, IGNORED, 5, 3])
    expected, whole = chunk_cross_entropy(logits, targets, 0.25)
    ranges, told = shares(10, 3), []

    def run(rank: int, receive: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        exchange = (lambda t: t.copy_(sum(told))) if receive else (lambda t: told.append(t.clone()))
        monkeypatch.setattr("fitune.parallel.tensor_exchange.all_reduce", exchange)
        start, end = ranges[rank]
        return VocabularyLoss(Exchanges(), start, rank, 3)(logits[:, start:end], targets, 0.25)

    for rank in range(3):
        run(rank, receive=False)
    for rank, (start, end) in enumerate(ranges):
        loss, grad = run(rank, receive=True)
        assert grad is not None and whole is not None
        assert loss == pytest.approx(float(expected), rel=1e-6)
        torch.testing.assert_close(grad, whole[:, start:end])


def test_a_pass_is_finished_with_nothing(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(
        "fitune.parallel.tensor_exchange.all_reduce", lambda t: seen.append((t.numel(), float(t.sum())))
    )
    exchanges = Exchanges()
    exchanges.begin([(2, torch.float32), (3, torch.bfloat16), (4, torch.float32)])
    exchanges.sum(torch.ones(2))
    exchanges.finish(torch.device("cpu"))
    exchanges.finish(torch.device("cpu"))
    assert seen == [(2, 2.0), (3, 0.0), (4, 0.0)]
