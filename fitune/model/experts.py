"""Fused expert weights ([E, out, in] parameters of transformers 5) kept packed and unpacked while their layer runs.

`nn.Linear` replacement does not reach them: they are plain parameters that an experts function reads by attribute.
So the parameter is taken out of the module and, around each pass of its decoder layer, put back as an ordinary
attribute holding the unpacked weight. A layer whose activations are kept holds its unpacked experts until its
backward is done; a recomputed layer holds them only while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fitune.model.formats import Packed, pack, unpack


class PackedExperts:
    """The packed 3-D parameters of one module."""

    def __init__(self, module: nn.Module, prefix: str):
        self.module, self.prefix = module, prefix
        self.shapes = {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False) if p.dim() == 3}
        self.packed: dict[str, Packed] = {}
        for name in self.shapes:
            delattr(module, name)

    def names(self) -> list[str]:
        return [f"{self.prefix}.{name}" for name in self.shapes]

    def set_weight(self, name: str, weight: torch.Tensor, format: str, double_quant: bool) -> None:
        self.packed[name.removeprefix(f"{self.prefix}.")] = pack(weight, format, double_quant)

    @contextmanager
    def unpacked(self, dtype: torch.dtype) -> Iterator[None]:
        for name, packed in self.packed.items():
            self.module.__dict__[name] = unpack(packed, dtype)
        try:
            yield
        finally:
            for name in self.packed:
                self.module.__dict__.pop(name, None)


def has_fused_experts(module: nn.Module) -> bool:
    """Whether a module holds 3-D parameters that are not a convolution's kernel."""
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
        return False
    return any(p.dim() == 3 for p in module.parameters(recurse=False))
