"""Gradients of a trained head and embedding in parts: autograd's own numbers, nothing as large as the weight."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fitune.model import trained_ends
from fitune.model.trained_ends import collect_in_parts


class Ends(nn.Module):
    def __init__(self, dtype, bias=False, padding=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(100, 16, padding_idx=padding, dtype=dtype)
        self.head = nn.Linear(16, 100, bias=bias, dtype=dtype)

    def get_output_embeddings(self):
        return self.head

    def get_input_embeddings(self):
        return self.embedding


class Largest(TorchDispatchMode):
    """The most elements of anything made in fp32 or 16 bit."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point() and out._base is None:
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_equal_to_autograd(monkeypatch, dtype, bias):
    monkeypatch.setattr(trained_ends, "SLICE_BYTES", 24 * 16 * dtype.itemsize)  # 24 rows of 100
    ids = torch.randint(0, 100, (3, 7), generator=torch.Generator().manual_seed(1))
    ids[0, :4] = 5
    plain, ours = Ends(dtype, bias, padding=5), Ends(dtype, bias, padding=5)
    found = {id(p): torch.zeros(p.shape) for p in ours.parameters()}

    def sink(weight, rows, part):
        if isinstance(rows, slice):
            found[id(weight)][rows] += part
        else:
            found[id(weight)].index_add_(0, rows, part.float())

    collect_in_parts(SimpleNamespace(model=ours), sink)
    outputs = []
    for model in (plain, ours):
        hidden = model.embedding(ids)
        hidden.retain_grad()
        logits = model.head(hidden)
        logits.square().sum().backward()
        outputs.append((logits, hidden.grad))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert ours.head.weight.grad is None and ours.embedding.weight.grad is None
    assert torch.equal(found[id(ours.head.weight)], plain.head.weight.grad.float())
    assert torch.equal(found[id(ours.embedding.weight)], plain.embedding.weight.grad.float())
    assert not found[id(ours.embedding.weight)][5].any()
    if bias:
        assert torch.equal(ours.head.bias.grad, plain.head.bias.grad)


def test_nothing_as_large_as_the_weight_is_made(monkeypatch):
    monkeypatch.setattr(trained_ends, "SLICE_BYTES", 10 * 16 * 2)
    sizes = {}
    for in_parts in (False, True):
        model = Ends(torch.bfloat16)
        if in_parts:
            collect_in_parts(SimpleNamespace(model=model), lambda weight, rows, part: None)
        loss = model.head(model.embedding(torch.tensor([[3, 4]]))).float().sum()
        with Largest() as largest:
            loss.backward()
        sizes[in_parts] = largest.numel
    assert sizes[False] >= 1600 and sizes[True] <= 2 * 100


def test_an_embedding_of_another_kind_is_left_alone():
    class Scaled(nn.Embedding):
        pass

    model = Ends(torch.float32)
    model.embedding = Scaled(100, 16)
    collect_in_parts(SimpleNamespace(model=model), lambda *_: None)
    assert "forward" in model.head.__dict__ and "forward" not in model.embedding.__dict__
