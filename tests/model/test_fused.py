"""Fused norms and gated MLPs against the classes they stand in for."""

from __future__ import annotations

import copy

import pytest
import torch

from fitune.model import fused
from fitune.model.linear import StepContext
from tests import tiny

EXPECTED = {
    "llama": "plain",
    "qwen3": "plain",
    "gemma2": "offset",
    "gemma3": "offset",
    "olmo2": "plain",
    "gpt_oss": "plain",
}


def parts(name):
    """(a norm, an MLP or None) of a tiny model of this architecture."""
    layer = tiny.reference(name).get_decoder().layers[0]
    norm = next(m for n, m in layer.named_modules() if "RMSNorm" in type(m).__name__ and m.weight.shape == (64,))
    return norm, next((m for m in layer.modules() if fused.is_gated_mlp(m)), None)


def compare(module, dtype, limit, on_cuda=False):
    """Forward and gradients of a module and its replacement; both against fp64, in units of the plain way's error."""
    device = "cuda" if on_cuda else "cpu"
    module = copy.deepcopy(module).to(device, dtype).requires_grad_(True)
    other = copy.deepcopy(module)
    assert sum(fused.apply(other, StepContext(on_cuda=on_cuda)).values()) >= 1
    exact = copy.deepcopy(module).double()
    torch.manual_seed(0)
    x = torch.randn(2, 9, 64, device=device).to(dtype)
    results = []
    for m in (module, other, exact):
        own = x.detach().clone().to(next(m.parameters()).dtype).requires_grad_()
        y = m(own)
        torch.manual_seed(1)
        y.backward(torch.randn(y.shape, device=device).to(dtype).to(y.dtype))
        results.append([y, own.grad, *[p.grad for p in m.parameters()]])
    for plain, ours, true in zip(*results, strict=True):
        noise = (plain.double() - true).abs().max() + limit * true.abs().max()
        assert (ours.double() - true).abs().max() <= 2 * noise


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-7), (torch.bfloat16, 1e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", EXPECTED)
def test_equal_to_the_models_own_code(name, dtype, limit):
    norm, mlp = parts(name)
    assert fused.norm_kind(type(norm)) == EXPECTED[name]
    compare(norm, dtype, limit)
    if mlp is not None:
        compare(mlp, dtype, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_equal_on_cuda(name):
    norm, mlp = parts(name)
    compare(norm, torch.bfloat16, 1e-3, on_cuda=True)
    compare(mlp, torch.bfloat16, 1e-3, on_cuda=True)


@pytest.mark.parametrize("offset", [False, True])
def test_backward_leaves_the_input_as_it_was(offset):
    """Two norms of one tensor, which is also somebody else's saved result."""
    x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(16)
    saved_by_another = x.exp()
    before = saved_by_another.detach().clone()
    norms = [fused._RMSNorm.apply(saved_by_another, weight, 1e-6, offset, False) for _ in range(2)]
    sum(norm.square().sum() for norm in norms).backward()
    assert torch.equal(saved_by_another, before)


def test_unknown_classes_are_left_alone():
    class CubedRMSNorm(torch.nn.Module):
        def __init__(self, size, eps=1e-6):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps

        def forward(self, x):
            return x**3 * self.weight

    assert fused.norm_kind(CubedRMSNorm) is None
    assert fused.norm_kind(torch.nn.LayerNorm) is None


def test_norms_without_a_weight_are_left_alone():
    """Gemma 4 norms its values so; its other norms of the same class have one."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    both = torch.nn.ModuleList([Gemma4RMSNorm(64), Gemma4RMSNorm(64, with_scale=False)])
    x = torch.randn(3, 64)
    expected = [norm(x) for norm in both]
    assert fused.apply(both, StepContext())["norms"] == 1
    for norm, y in zip(both, expected, strict=True):
        torch.testing.assert_close(norm(x), y)
