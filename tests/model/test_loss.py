"""Chunked cross-entropy against torch's: values, gradients, masked tokens, extreme logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fitune.model.loss import IGNORED, chunk_cross_entropy

V, C = 300, 37


def case(dtype=torch.float32, scale=3.0, ignored=8):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(C, V, generator=generator) * scale).to(dtype)
    targets = torch.randint(0, V, (C,), generator=generator)
    targets[torch.randperm(C, generator=generator)[:ignored]] = IGNORED
    return logits, targets


def reference(logits, targets, grad_scale):
    """fp64, of the same rounded logits."""
    wide = logits.double().requires_grad_()
    loss = F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")
    return loss.detach(), torch.autograd.grad(loss * grad_scale, wide)[0]


@pytest.mark.parametrize("grad_scale", [1.0, 1 / 700, 65536 / 700], ids=str)
def test_fp32_equals_torch(grad_scale):
    logits, targets = case()
    before = logits.clone()
    loss, grad = chunk_cross_entropy(logits, targets, grad_scale)
    expected, expected_grad = reference(logits, targets, grad_scale)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (grad - expected_grad).abs().max() < 1e-6 * grad_scale
    assert torch.equal(logits, before), "logits are not changed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16bit_logits_are_computed_in_fp32(dtype):
    """The loss is exact for the rounded logits; the gradient is rounded once, at the end."""
    logits, targets = case(dtype)
    loss, grad = chunk_cross_entropy(logits, targets, 2.0)
    expected, expected_grad = reference(logits, targets, 2.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert grad.dtype == dtype
    half_a_step = torch.finfo(dtype).eps / 2
    error = (grad.double() - expected_grad).abs()
    assert (error <= expected_grad.abs() * half_a_step * 1.01 + torch.finfo(dtype).smallest_normal + 1e-7).all()


def test_masked_tokens_count_nothing():
    logits, targets = case()
    kept = targets != IGNORED
    loss, grad = chunk_cross_entropy(logits, targets, 1.0)
    alone, alone_grad = chunk_cross_entropy(logits[kept], targets[kept], 1.0)
    assert loss.item() == pytest.approx(alone.item(), rel=1e-6)
    assert torch.equal(grad[kept], alone_grad)
    assert (grad[~kept] == 0).all()


def test_all_masked():
    logits, targets = case()
    loss, grad = chunk_cross_entropy(logits, torch.full_like(targets, IGNORED), 1.0)
    assert loss.item() == 0 and (grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_huge_logits_do_not_overflow(dtype):
    logits, targets = case(dtype, ignored=0)
    huge = 60000.0 if dtype == torch.float16 else 1e30
    logits[0, targets[0]] = huge  # certain and right
    logits[1, (targets[1] + 1) % V] = 3e4  # certain and wrong
    loss, grad = chunk_cross_entropy(logits, targets, 1.0)
    expected, expected_grad = reference(logits, targets, 1.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.isfinite(grad).all()
    assert (grad.double() - expected_grad).abs().max() < 1e-2
    assert (grad[0] == 0).all() and grad[1, targets[1]] == -1


def test_forbidden_tokens():
    """A head that masks part of its vocabulary with -inf gives them no gradient."""
    logits, targets = case()
    targets = targets.clamp_max(V - 11)
    logits[:, V - 10 :] = float("-inf")
    loss, grad = chunk_cross_entropy(logits, targets, 1.0)
    expected, _ = reference(logits[:, : V - 10], targets, 1.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (grad[:, V - 10 :] == 0).all()


def test_not_finite_logits_show_in_the_loss():
    logits, targets = case(ignored=0)
    logits[3, 5] = float("nan")
    assert torch.isnan(chunk_cross_entropy(logits, targets, 1.0)[0])


def test_evaluation_makes_no_gradient_and_the_same_loss():
    logits, targets = case()
    loss, grad = chunk_cross_entropy(logits.requires_grad_(), targets, None)
    assert grad is None and not loss.requires_grad
    assert torch.equal(loss, chunk_cross_entropy(logits, targets, 1.0)[0])


def test_chunks_add_up():
    logits, targets = case()
    whole, whole_grad = chunk_cross_entropy(logits, targets, 0.5)
    parts = [chunk_cross_entropy(logits[i : i + 10], targets[i : i + 10], 0.5) for i in range(0, C, 10)]
    assert sum(p[0].item() for p in parts) == pytest.approx(whole.item(), rel=1e-6)
    assert torch.equal(torch.cat([p[1] for p in parts]), whole_grad)
