"""RMSNorm and gated MLPs with fewer kernels and fewer saved tensors, put in only where they equal the model's own code.

Plain autograd keeps an fp32 copy of every normalised input and both factors of a gated MLP's product; these functions
keep the 16-bit inputs and work the rest out again. What a class computes is found out by running it (norms) or by
reading its source (MLPs): an unknown class is left as it is.

Shapes: x [..., H] hidden, gate and up [..., I].
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from fitune.model.linear import BaseLinear, StepContext
from fitune.model.tiled_mlp import tiled

_aten = torch.ops.aten
_MLP_SOURCE = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"


def apply(model: nn.Module, context: StepContext) -> dict[str, int]:
    """Replace what can be replaced; returns how many norms and MLPs were."""
    counts = {"norms": 0, "mlps": 0}
    for module in model.modules():
        cls: Any = type(module)
        kind = norm_kind(cls)
        if kind is not None and getattr(module, "weight", None) is not None:  # some of Gemma 4 have no weight
            module.__dict__["forward"] = functools.partial(_norm_forward, module, kind, context)
            counts["norms"] += 1
        elif (activation := activation_of(module)) is not None and _has_mlp_source(cls):
            module.__dict__["forward"] = functools.partial(_mlp_forward, module, activation, context)
            counts["mlps"] += 1
    return counts


@functools.lru_cache(maxsize=256)
def norm_kind(cls: Any) -> str | None:
    """ "plain" for weight * x / rms, "offset" for (1 + weight) * x / rms, None for anything else. Found by trying."""
    if "RMSNorm" not in cls.__name__ or "Gated" in cls.__name__:
        return None
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 16, generator=generator), torch.randn(16, generator=generator)
    with torch.device("cpu"):
        try:
            module = cls(16, eps=1e-3)
        except TypeError:
            return None
    if not isinstance(getattr(module, "weight", None), nn.Parameter) or module.weight.shape != weight.shape:
        return None
    with torch.no_grad():
        module.weight.copy_(weight)
        expected = module.float()(x)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)
    for kind, factor in (("plain", weight), ("offset", 1 + weight)):
        if torch.allclose(expected, normed * factor, atol=1e-5, rtol=1e-5) and _eps(module) == 1e-3:
            return kind
    return None


def _eps(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def activation_of(module: nn.Module) -> str | None:
    """Name of an MLP's activation where this file knows its derivative."""
    name = type(getattr(module, "act_fn", None)).__name__
    return {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh"}.get(name)


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module's forward is down(act(gate(x)) * up(x)), by its source."""
    cls: Any = type(module)
    return activation_of(module) is not None and _has_mlp_source(cls)


@functools.lru_cache(maxsize=256)
def _has_mlp_source(cls: Any) -> bool:
    return _MLP_SOURCE in inspect.getsource(cls.forward)


def _mlp_forward(module: Any, activation: str, context: StepContext, x: torch.Tensor) -> torch.Tensor:
    if context.mlp_tiles == 1:
        return _whole_mlp(module, activation, x)
    down = module.down_proj
    last = down if type(down) is BaseLinear and down.magnitude is None else None
    return tiled(functools.partial(_whole_mlp, module, activation), module, x, context, last)


def _whole_mlp(module: Any, activation: str, x: torch.Tensor) -> torch.Tensor:
    return module.down_proj(_Gated.apply(module.gate_proj(x), module.up_proj(x), activation))


class _Gated(torch.autograd.Function):
    """act(gate) * up, saving gate and up only. Backward writes gate's gradient over `up`, which is last read there (a
    second backward pass through the same graph raises): of all of a layer this is where the most is alive."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _activate(gate, activation).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        d_up = _activate(gate, ctx.activation).mul_(grads[0])
        inner = up.mul_(grads[0])
        if ctx.activation == "silu":
            d_gate = _aten.silu_backward.grad_input(inner, gate, grad_input=inner)
        else:
            d_gate = _aten.gelu_backward.grad_input(inner, gate, approximate="tanh", grad_input=inner)
        return d_gate, d_up, None


def _activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    return _aten.silu(gate) if activation == "silu" else _aten.gelu(gate, approximate="tanh")


def _norm_forward(module: Any, kind: str, context: StepContext, x: torch.Tensor) -> torch.Tensor:
    return _RMSNorm.apply(x, module.weight, _eps(module), kind == "offset", context.on_cuda)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm in fp32 inside, saving the input and one fp32 number per row (https://arxiv.org/abs/1910.07467).

    On CUDA the plain kind is torch's fused kernel; on `meta` its outputs are made as the kernel makes them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool, on_cuda: bool
    ) -> torch.Tensor:
        ctx.eps, ctx.offset = eps, offset
        ctx.fused = on_cuda and not offset and weight.dtype == x.dtype
        if ctx.fused:
            if x.device.type == "meta":
                y, rstd = torch.empty_like(x), torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device="meta")
            else:
                y, rstd = _aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
        else:
            wide = x.float()
            rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
            if offset:
                y = wide.mul(rstd).mul_(weight.float() + 1).to(x.dtype)
            else:  # rounded before the weight, as Llama's code does
                y = wide.mul(rstd).to(x.dtype) * weight
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        need_weight = ctx.needs_input_grad[1]
        if ctx.fused:
            if x.device.type == "meta":
                dx = torch.empty_like(x)
                return dx, (torch.empty_like(weight) if need_weight else None), None, None, None
            mask = [True, need_weight]
            dx, dw = _aten._fused_rms_norm_backward(grads[0].contiguous(), x, [x.shape[-1]], rstd, weight, mask)
            return dx, dw if need_weight else None, None, None, None
        normed = x.to(torch.float32, copy=True).mul_(rstd)  # of fp32 too: others have saved the same input
        grad = grads[0].float()
        dw = None
        if need_weight:
            dw = (grad * normed).sum(dim=tuple(range(grad.dim() - 1))).to(weight.dtype)
        grad = grad * (weight.float() + 1 if ctx.offset else weight.float())
        mean = (grad * normed).mean(-1, keepdim=True)
        dx = grad.sub_(normed.mul_(mean)).mul_(rstd).to(x.dtype)
        return dx, dw, None, None, None
