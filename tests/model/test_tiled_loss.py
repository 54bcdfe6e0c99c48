"""Cross-entropy over tiles of the vocabulary against the whole, and against double precision."""

from __future__ import annotations

import math

import pytest
import torch

from fitune.model.formats import Scratch
from fitune.model.loss import IGNORED, chunk_cross_entropy
from fitune.model.tiled_loss import TiledCrossEntropy

TOKENS, VOCABULARY = 9, 50


def case(scale=4.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(TOKENS, VOCABULARY, generator=generator) * scale).to(dtype)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    targets[3] = IGNORED
    return logits, targets


def in_tiles(logits, targets, width, grad_scale=1.0, scratch=None, backwards=False):
    """Loss, and the gradient of the head's input for a head that is the unit matrix: that of the logits."""
    tiled = TiledCrossEntropy(targets, VOCABULARY, logits.dtype)
    head = torch.eye(VOCABULARY, dtype=logits.dtype)
    order = range(0, VOCABULARY, width)
    for first in order[::-1] if backwards else order:
        tile = slice(first, first + width)
        weights = tiled.see(logits[:, tile], first, scratch)
        tiled.add(tiled.lifted(weights, logits.dtype), head[tile], first)
    return tiled.loss(), tiled.gradient(grad_scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 50, 64])
def test_tiles_equal_the_whole(width, dtype):
    logits, targets = case(dtype=dtype)
    untouched = logits.clone()
    loss, grad = in_tiles(logits, targets, width, grad_scale=0.25)
    expected, whole = chunk_cross_entropy(logits, targets, 0.25)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert grad.dtype == dtype and torch.equal(logits, untouched)
    assert (grad.float() - whole.float()).abs().max() <= max(5e-7, torch.finfo(dtype).eps) * whole.abs().max()


def test_against_double_precision():
    logits, targets = case()
    wide = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")
    expected.backward()
    loss, grad = in_tiles(logits, targets, 13)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (grad - wide.grad).abs().max() < 1e-6


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_logits_of_any_size(scale, backwards):
    """No overflow, and no loss of the small ones: sorted, each tile has a higher maximum than the one before, or none
    has a higher one than the first."""
    logits, targets = case(scale)
    logits = logits.sort(1).values
    loss, grad = in_tiles(logits, targets, 5, backwards=backwards)
    expected, whole = chunk_cross_entropy(logits, targets, 1.0)
    assert torch.isfinite(grad).all() and loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(grad, whole, atol=1e-6)


def test_tokens_without_a_target():
    logits, targets = case()
    loss, grad = in_tiles(logits, torch.full_like(targets, IGNORED), 7)
    assert loss.item() == 0.0 and not grad.any()
    _, grad = in_tiles(logits, targets, 7)
    assert not grad[3].any() and grad[2].any()


def test_small_probabilities_in_fp16():
    """A probability of 2e-8 is less than fp16 holds; its part of the gradient is there."""
    logits = torch.zeros(1, VOCABULARY, dtype=torch.float16)
    logits[0, 1:] = -17.6
    targets = torch.tensor([0])
    tiled = TiledCrossEntropy(targets, 1, torch.float16)
    head = torch.zeros(VOCABULARY, 1, dtype=torch.float16)
    head[1:] = 1.0
    for first in range(0, VOCABULARY, 10):
        weights = tiled.see(logits[:, first : first + 10], first)
        tiled.add(tiled.lifted(weights, torch.float16), head[first : first + 10], first)
    grad = tiled.gradient(65536.0).item()
    assert grad == pytest.approx(65536 * 49 * math.exp(-17.6), rel=0.02)


def test_a_shared_buffer_changes_nothing():
    logits, targets = case(dtype=torch.bfloat16)
    scratch = Scratch(TOKENS * 7 * 4, "cpu")
    plain, shared = in_tiles(logits, targets, 7), in_tiles(logits, targets, 7, scratch=scratch)
    assert torch.equal(plain[0], shared[0]) and torch.equal(plain[1], shared[1])


def test_a_target_is_in_one_tile():
    """The first and last entries of tiles, and none for a token without a target; asked for twice, worked out once."""
    tiled = TiledCrossEntropy(torch.tensor([0, 6, 7, 13, IGNORED]))
    inside = [tiled.place(7, first)[1].squeeze(1).tolist() for first in (0, 7)]
    assert inside == [[True, True, False, False, False], [False, False, True, True, False]]
    assert tiled.place(7, 7) is tiled.place(7, 7) and tiled.place(7, 0) is not tiled.place(6, 0)
    assert tiled.place(6, 0)[1].squeeze(1).tolist() == [True, False, False, False, False]
