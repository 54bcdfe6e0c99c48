"""Gradients of a trained head and embedding without a copy as large as the vocabulary for every chunk or micro-batch.

Autograd makes the gradient of the whole weight each time. Here the head's is made in slices of the vocabulary and the
embedding's for the rows that occur, and each is added up (in fp32) where it is kept. The products are the same ones.
Shapes: x [..., H] what enters the head, weight [V, H], ids [...] of which U different ones occur.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from fitune.model.build import Built

# A slice's 16-bit gradient: enough for products at full speed, small beside a chunk's logits.
SLICE_BYTES = 64 * 2**20

Rows: TypeAlias = slice | torch.Tensor
Sink = Callable[[torch.Tensor, Rows, torch.Tensor], None]
"""Adds a gradient [rows, H] to that of a weight."""
PartSink = Callable[[Rows, torch.Tensor], None]


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: PartSink
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink, ctx.has_bias = sink, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g_NV, x_NH = grads[0].reshape(-1, weight.shape[0]), x.reshape(-1, x.shape[-1])
        dx_NH = g_NV @ weight if ctx.needs_input_grad[0] else None
        step = max(1, SLICE_BYTES // (weight.shape[1] * weight.element_size()))
        for start in range(0, weight.shape[0], step):
            rows = slice(start, min(start + step, weight.shape[0]))
            ctx.sink(rows, g_NV[:, rows].t() @ x_NH)
        d_bias = g_NV.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dx_NH.view(x.shape) if dx_NH is not None else None, None, d_bias, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, padding: int | None, sink: PartSink
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.sink, ctx.num_rows = padding, sink, weight.shape[0]
        return F.embedding(ids, weight, padding)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        rows_U, places = _different(ids, ctx.num_rows)
        part_UH = torch.ops.aten.embedding_dense_backward(grads[0], places, rows_U.shape[0], -1, False)
        if ctx.padding is not None:  # its row is not trained
            part_UH.mul_((rows_U != ctx.padding)[:, None])
        ctx.sink(rows_U, part_UH)
        return None, None, None, None, None


def _different(ids: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the ids that occur [U], where each of `ids` is among them); on meta as many as there can be."""
    if ids.device.type == "meta":
        return ids.new_empty(min(ids.numel(), num_rows)), torch.empty_like(ids)
    return ids.unique(return_inverse=True)


def collect_in_parts(built: Built, sink: Sink) -> None:
    """From now on gradients of the plain head and the plain embedding of a model trained in full go to `sink`."""
    head, embedding = built.model.get_output_embeddings(), built.model.get_input_embeddings()
    if type(head) is nn.Linear and head.weight.requires_grad:
        head.__dict__["forward"] = functools.partial(_through_head, head, sink)
    if type(embedding) is nn.Embedding and embedding.weight.requires_grad and embedding.max_norm is None:
        embedding.__dict__["forward"] = functools.partial(_through_embedding, embedding, sink)


def _through_head(head: nn.Linear, sink: Sink, x: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return F.linear(x, head.weight, head.bias)
    # detached: autograd must not expect (or announce) a gradient of the weight
    return _Head.apply(x, head.weight.detach(), head.bias, functools.partial(sink, head.weight))


def _through_embedding(embedding: nn.Embedding, sink: Sink, input_ids: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return F.embedding(input_ids, embedding.weight, embedding.padding_idx)
    anchor = torch.empty(0, device=embedding.weight.device, requires_grad=True)  # what makes autograd come back here
    add = functools.partial(sink, embedding.weight)
    return _Embedding.apply(anchor, embedding.weight.detach(), input_ids, embedding.padding_idx, add)
