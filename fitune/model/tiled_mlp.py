"""A gated MLP over pieces of its tokens: on long sequences its inner activations are several times the rest of a layer.

Only the input is saved. Forward runs piece by piece; backward runs each piece again, with its graph and without its
last product, which nothing reads, and at once goes back through it, so that the inner activations of one piece exist at
a time. Exact but for the shapes of the products.
Shapes: x [B, T, H].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fitune.model.backward import backward
from fitune.model.linear import StepContext

Mlp = Callable[[torch.Tensor], torch.Tensor]
FOLLOWED_PIECES = 4


def tiled(
    mlp: Mlp, module: torch.nn.Module, x: torch.Tensor, context: StepContext, last: object = None
) -> torch.Tensor:
    """`mlp(x)` in `context.mlp_tiles` pieces of tokens. The trained parameters of `module` get their gradients while
    the result's backward runs. `last`: the linear layer whose output `mlp` returns, where no backward pass reads it."""
    # autograd must come back here for what is trained inside, whose gradients are not this function's to return
    is_trained = any(p.requires_grad for p in module.parameters())
    anchor = torch.empty(0, device=x.device, requires_grad=True) if is_trained else None
    watch, context.watch = context.watch, None  # what runs inside is not what is kept
    y = _Tiled.apply(x, mlp, module, context, last, anchor)
    context.watch = watch
    if watch is not None:
        watch.passed(module)
    return y


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mlp: Mlp,
        module: torch.nn.Module,
        context: StepContext,
        last: object,
        anchor: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.mlp, ctx.context, ctx.last = mlp, context, last
        ctx.num_tiles, ctx.keys = context.mlp_tiles, context.token_keys
        ctx.save_for_backward(x)
        if context.unneeded is module:
            return torch.zeros_like(x)
        x_NH = x.reshape(-1, x.shape[-1])
        out_NH = torch.empty_like(x_NH)
        for rows in _pieces(ctx, x_NH):
            out_NH[rows] = mlp(x_NH[rows])
        return out_NH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        needs_input = ctx.needs_input_grad[0]
        x_NH, g_NH = x.detach().reshape(-1, x.shape[-1]), grads[0].reshape(-1, x.shape[-1])
        dx_NH = torch.empty_like(x_NH) if needs_input else None
        for rows in _pieces(ctx, x_NH):
            with torch.enable_grad():
                part_NH = x_NH[rows].detach().requires_grad_(needs_input)
                ctx.context.unneeded = ctx.last
                out_NH = ctx.mlp(part_NH)
                ctx.context.unneeded = None
            if out_NH.requires_grad:
                backward(out_NH, g_NH[rows])
            if dx_NH is not None:
                dx_NH[rows] = part_NH.grad
            del out_NH, part_NH
        dx = dx_NH.view(x.shape) if dx_NH is not None else None
        return dx, None, None, None, None, None


def _pieces(ctx: Any, x_NH: torch.Tensor) -> Iterator[slice]:
    """Token ranges of nearly equal size; inside, dropout's keys are those of the range. On meta, where a step is only
    followed, of many pieces the first two and the last two: those between allocate what the second one does."""
    context: StepContext = ctx.context
    before = context.token_keys, context.mlp_tiles, context.unneeded
    num_tokens = x_NH.shape[0]
    size = -(-num_tokens // ctx.num_tiles)
    starts: Sequence[int] = range(0, num_tokens, size)
    if x_NH.is_meta and len(starts) > FOLLOWED_PIECES:
        starts = [*starts[:2], *starts[-2:]]
    context.mlp_tiles = 1
    try:
        for start in starts:
            rows = slice(start, min(start + size, num_tokens))
            context.token_keys = ctx.keys[rows] if ctx.keys is not None else None
            yield rows
    finally:
        context.token_keys, context.mlp_tiles, context.unneeded = before
