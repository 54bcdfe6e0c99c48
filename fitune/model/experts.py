"""Fused expert weights ([E, out, in] parameters of transformers 5) kept packed and unpacked while their layer runs.

`nn.Linear` replacement does not reach them: they are plain parameters that an experts function reads by attribute.
So the parameter is taken out of the module and, around each pass of its decoder layer, put back as an ordinary
attribute holding the unpacked weight. A layer whose activations are kept holds its unpacked experts until its
backward is done; a recomputed layer holds them only while it runs.

LoRA on them is peft's (`target_parameters`, peft 0.17 and later): every expert has its own A and B, and computes with
the sum W + s B A, which is made together with the unpacked weight. Shapes: E experts, weight [E, O, I] (or [E, I, O] of
a transposed class, gpt-oss), lora_A [E * R, I], lora_B [O, R * E].
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fitune.model.formats import DENSE, Packed, pack, unpack


class PackedExperts:
    """The packed 3-D parameters of one module."""

    def __init__(self, module: nn.Module, prefix: str):
        self.module, self.prefix = module, prefix
        self.shapes = {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False) if p.dim() == 3}
        self.packed: dict[str, Packed] = {}
        self.adapters: dict[str, ExpertsAdapter] = {}
        for name in self.shapes:
            delattr(module, name)

    def names(self) -> list[str]:
        return [f"{self.prefix}.{name}" for name in self.shapes]

    def set_weight(self, name: str, weight: torch.Tensor, format: str, double_quant: bool) -> None:
        self.packed[name.removeprefix(f"{self.prefix}.")] = pack(weight, format, double_quant)

    def add_lora(self, name: str, r: int, scaling: float, generator: torch.Generator | None, device: Any) -> None:
        """An adapter on one of `names()`. Its parameters belong to a module of the weight's own name, which is not seen
        while the unpacked weight is there."""
        leaf = name.removeprefix(f"{self.prefix}.")
        transposed = bool(getattr(self.module, "is_transposed", False))
        self.adapters[leaf] = ExpertsAdapter(self.shapes[leaf], r, scaling, transposed, generator, device)
        self.module.add_module(leaf, self.adapters[leaf])

    @contextmanager
    def unpacked(self, dtype: torch.dtype) -> Iterator[None]:
        for name, packed in self.packed.items():
            weight = unpack(packed, dtype)
            if name in self.adapters:
                weight = self.adapters[name].added_to(weight, is_own=packed.format not in DENSE)
            self.module.__dict__[name] = weight
        try:
            yield
        finally:
            for name in self.packed:
                self.module.__dict__.pop(name, None)


class ExpertsAdapter(nn.Module):
    """LoRA of every expert of one fused weight, as peft starts it: A uniform (Kaiming, a = sqrt(5)), B zero, fp32."""

    def __init__(
        self, shape: tuple[int, ...], r: int, scaling: float, transposed: bool, generator: Any, device: Any
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_experts, self.scaling, self.transposed = shape[0], scaling, transposed
        inputs, outputs = (shape[1], shape[2]) if transposed else (shape[2], shape[1])
        a = torch.empty(r * shape[0], inputs, device="meta" if str(device) == "meta" else "cpu")
        if str(device) != "meta":
            bound = 1 / math.sqrt(inputs)  # kaiming_uniform with a = sqrt(5)
            a.uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(a.to(device))
        self.lora_B = nn.Parameter(torch.zeros(outputs, r * shape[0], device=device))

    def added_to(self, weight: torch.Tensor, is_own: bool) -> torch.Tensor:
        """The weight plus the adapter's product, in the weight's dtype; in place where it is nobody else's."""
        return _Added.apply(self.lora_A, self.lora_B, weight, self, is_own)

    def factors(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(left, right) whose batched product is every expert's B A as its weight lies: [E, O, R] and [E, R, I], or
        [E, I, R] and [E, R, O]."""
        a_ERI = a.to(dtype).view(self.num_experts, -1, a.shape[1])
        b_EOR = b.to(dtype).view(b.shape[0], -1, self.num_experts).permute(2, 0, 1)
        return (a_ERI.mT, b_EOR.mT) if self.transposed else (b_EOR, a_ERI)


class _Added(torch.autograd.Function):
    """W + s B A of all experts. Saves A and B only; the weight's own gradient is not asked for."""

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, adapter: ExpertsAdapter, is_own: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.adapter = adapter
        left, right = adapter.factors(a, b, weight.dtype)
        if is_own:
            return weight.detach().baddbmm_(left, right, alpha=adapter.scaling)
        return torch.baddbmm(weight, left, right, alpha=adapter.scaling)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        adapter: ExpertsAdapter = ctx.adapter
        left, right = adapter.factors(a, b, grads[0].dtype)
        d_left = torch.bmm(grads[0], right.mT).mul_(adapter.scaling)
        d_right = torch.bmm(left.mT, grads[0]).mul_(adapter.scaling)
        d_b, d_a = (d_right.mT, d_left.mT) if adapter.transposed else (d_left, d_right)
        return d_a.reshape(a.shape).to(a.dtype), d_b.permute(1, 2, 0).reshape(b.shape).to(b.dtype), None, None, None


def has_fused_experts(module: nn.Module) -> bool:
    """Whether a module holds 3-D parameters that are not a convolution's kernel."""
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
        return False
    return any(p.dim() == 3 for p in module.parameters(recurse=False))


def chooses_kernel(model_class: type) -> bool:
    """Whether a transformers class lets the products of its experts be chosen. (Llama 4 does not: it multiplies all
    tokens with all experts.)"""
    return "use_experts_implementation" in inspect.getsource(sys.modules[model_class.__module__])
