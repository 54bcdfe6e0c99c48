"""fp32 adapters in the format that computes, all those of a decoder layer at once.

A layer's adapters are small and many: rounding each of them at each of its uses takes a sixth of all launches of a
step in 16 bit, and where a micro-batch is small the host's launches are what takes time. Here one launch rounds them
all when the layer's first adapter is used; the copies live as long as the layer runs (2 bytes per adapter parameter of
one layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fitune.model.linear import BaseLinear, StepContext


class LayerCasts:
    """The adapters of `linears`, which are one decoder layer's. While this is entered, they find their copies here."""

    def __init__(self, linears: Sequence[BaseLinear], context: StepContext):
        self._linears, self._context = linears, context
        self._made: dict[BaseLinear, tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> None:
        self._context.casts = self

    def __exit__(self, *error: Any) -> None:
        self._context.casts = None
        self._made = {}

    def of(self, linear: BaseLinear, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(A, B) of one of the layers in `dtype`; None for one that is not among them."""
        if not self._made:
            self._make(dtype)
        return self._made.get(linear)

    def _make(self, dtype: torch.dtype) -> None:
        adapted, sources = [], []
        for linear in self._linears:
            if linear.lora_A is not None and linear.lora_B is not None:
                adapted.append(linear)
                sources += [linear.lora_A, linear.lora_B]
        with torch.no_grad():
            copies = [torch.empty_like(source, dtype=dtype) for source in sources]
            torch._foreach_copy_(copies, sources)
        self._made = dict(zip(adapted, zip(copies[::2], copies[1::2], strict=True), strict=True))
