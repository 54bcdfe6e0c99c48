"""The head in host memory called by the model's own code: full logits, tile after tile."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fitune.model.ends import HostHead, wide_product


class FromHost:
    """Tiles as they are, and a note of how many are in use."""

    def __init__(self, head):
        self.head, self.used, self.open = head, [], 0

    @contextmanager
    def tile(self, index):
        self.used.append(index)
        self.open += 1
        assert self.open == 1, "one tile at a time"
        yield self.head.weight[self.head.rows(index)]
        self.open -= 1


def head_and_linear(rows=10, bias=False):
    torch.manual_seed(0)
    linear = nn.Linear(16, 50, bias=bias)
    head = HostHead(linear, torch.float32)
    head.allocate(pin=False)
    head.weight.copy_(linear.weight.detach())
    head.tile_rows = rows
    head.__dict__["tiles"] = FromHost(head)
    return head, linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [10, 16, 50])
def test_full_logits_and_their_gradient(rows, bias):
    head, linear = head_and_linear(rows, bias)
    x, y = (torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in range(2))
    ours, theirs = head(x), linear(y)
    assert torch.allclose(ours, theirs, atol=1e-6) and ours.shape == (2, 3, 50)
    weight = torch.randn(ours.shape)
    ours.backward(weight)
    theirs.backward(weight)
    assert torch.allclose(x.grad, y.grad, atol=1e-6)
    assert head.tiles.used == [*range(head.num_tiles), *reversed(range(head.num_tiles))]


def test_the_weight_is_no_parameter():
    head, _ = head_and_linear()
    assert list(head.parameters()) == [] and head.buffer.num_bytes == 50 * 16 * 4


def test_tap_and_stand_in():
    head, _ = head_and_linear()
    x = torch.randn(1, 3, 16)
    with head.tapped() as seen:
        head(x)
    assert seen[0] is x and head.tiles.used == []
    logits = torch.randn(1, 2, 5)
    with head.standing_in(logits):
        assert head(x) is logits
    assert head(x).shape == (1, 3, 50)


def test_products_are_summed_in_fp32():
    """Sums over tiles of 16-bit products rounded to 16 bit would lose what one product keeps."""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(8, 512, generator=generator).bfloat16(),
        torch.randn(512, 32, generator=generator).bfloat16(),
    )
    exact = left.double() @ right.double()
    tiles = sum(wide_product(left[:, s : s + 32], right[s : s + 32]) for s in range(0, 512, 32))
    assert tiles.dtype == torch.float32
    assert (tiles - exact).abs().max() < 1e-4
    rounded = sum((left[:, s : s + 32] @ right[s : s + 32]) for s in range(0, 512, 32))
    assert (rounded - exact).abs().max() > 1e-2
