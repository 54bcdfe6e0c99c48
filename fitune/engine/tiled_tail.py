"""The loss tail with a head in host memory: final norm, then the vocabulary in tiles, for many tokens at once.

Tokens of all micro-batches of a group are taken in blocks; a whole block passes a tile before the next tile is used, so
that the head crosses the link once per block and not once per chunk. Within a block each chunk of `loss_chunk` tokens
has one tile's logits at a time. Shapes: C tokens of a chunk, H hidden size, W vocabulary entries of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fitune.engine.batch import Batch
from fitune.engine.driver import Driver
from fitune.engine.ring import Item
from fitune.model.backward import backward
from fitune.model.ends import HostHead
from fitune.model.tiled_loss import TiledCrossEntropy

# Tokens that share one passage of the head. A tile's two products take 2 x tokens flops per byte of a 16-bit tile: with
# 4,096 tokens about as long as its copy takes on an H200 (500 TFLOPS, 55 GB/s; an estimate), longer on a card with
# less compute per link. A block takes 8 bytes x hidden size per token (0.13 GiB at 4,096 wide).
BLOCK_TOKENS = 4096


@dataclass
class _Chunk:
    """Some tokens of one micro-batch on their way through the head."""

    member: int
    rows: slice | torch.Tensor
    loss: TiledCrossEntropy
    input_CH: torch.Tensor | None


@dataclass
class TailResult:
    """`losses` fp32 scalars and gradients [B, T, H] of the last hidden states (None in evaluation), per micro-batch."""

    losses: list[torch.Tensor]
    grads: list[torch.Tensor | None] = field(default_factory=list)


def tail_items(head: HostHead, batches: Sequence[Batch], loss_chunk: int) -> list[Item]:
    """The head's tiles in the order in which `tiled_tail` uses them."""
    blocks = range(len(_blocks(batches, loss_chunk)))
    return [("head", tile) for block in blocks for tile in _order(head, block)]


def _order(head: HostHead, block: int) -> Sequence[int]:
    """To and fro, so that the tiles at the turns are on the device already."""
    tiles = range(head.num_tiles)
    return tiles if block % 2 == 0 else tiles[::-1]


def _blocks(batches: Sequence[Batch], loss_chunk: int) -> list[list[tuple[int, int, int]]]:
    """(micro-batch, first target, last target + 1) of every chunk, in blocks of at most `BLOCK_TOKENS` tokens."""
    blocks: list[list[tuple[int, int, int]]] = []
    room = 0
    for member, batch in enumerate(batches):
        for start in range(0, batch.num_targets, loss_chunk):
            end = min(start + loss_chunk, batch.num_targets)
            if not blocks or room < end - start:
                blocks.append([])
                room = max(BLOCK_TOKENS, loss_chunk)
            blocks[-1].append((member, start, end))
            room -= end - start
    return blocks


def tiled_tail(
    driver: Driver,
    hidden: Sequence[torch.Tensor],
    batches: Sequence[Batch],
    loss_chunk: int,
    grad_scale: float | None,
    chunk_done: Callable[[], None] = lambda: None,
) -> TailResult:
    """Losses of a group of micro-batches from their last hidden states [B, T, H], as `step.tail_loss` gives them."""
    flats = [h.detach().reshape(-1, h.shape[-1]) for h in hidden]
    result = TailResult([torch.zeros((), dtype=torch.float32, device=flat.device) for flat in flats])
    grads: list[torch.Tensor | None] = [None] * len(flats)
    if grad_scale is not None:
        make = [torch.empty_like if batch.counted is None else torch.zeros_like for batch in batches]
        grads = [new(flat) for new, flat in zip(make, flats, strict=True)]
    wants_grad = grad_scale is not None
    for number, block in enumerate(_blocks(batches, loss_chunk)):
        chunks = [_enter(driver, flats[m], batches[m], (m, start, end), wants_grad) for m, start, end in block]
        _through_tiles(driver, chunks, number, wants_grad)
        for chunk in chunks:
            result.losses[chunk.member] += chunk.loss.loss()
            grad_NH = grads[chunk.member]
            if grad_NH is not None and grad_scale is not None:
                _leave(driver, chunk, flats[chunk.member], grad_NH, grad_scale)
                chunk_done()
    shapes = [h.shape for h in hidden]
    result.grads = [g.view(shape) if g is not None else None for g, shape in zip(grads, shapes, strict=True)]
    return result


def _enter(
    driver: Driver, flat_NH: torch.Tensor, batch: Batch, place: tuple[int, int, int], wants_grad: bool
) -> _Chunk:
    member, start, end = place
    rows: slice | torch.Tensor = slice(start, end)
    if batch.counted is not None:
        rows = batch.counted[start:end]
    with torch.no_grad():
        input_CH = driver.head_input(flat_NH[rows])
    width = input_CH.shape[1] if wants_grad else None
    loss = TiledCrossEntropy(batch.targets.reshape(-1)[rows], width, input_CH.dtype)
    return _Chunk(member, rows, loss, input_CH)


def _through_tiles(driver: Driver, chunks: list[_Chunk], block: int, wants_grad: bool) -> None:
    head = driver.built.host_head
    assert head is not None
    for index in _order(head, block):
        with head.tiles.tile(index) as weight, torch.no_grad():
            for chunk in chunks:
                _see_tile(driver, head, chunk, weight, index, wants_grad)
    for chunk in chunks:
        chunk.input_CH = None


def _see_tile(
    driver: Driver, head: HostHead, chunk: _Chunk, weight: torch.Tensor, index: int, wants_grad: bool
) -> None:
    """A tile's part of a chunk's loss and of the gradient of what entered the head."""
    first, scratch = head.rows(index).start, driver.built.context.scratch
    assert chunk.input_CH is not None
    logits_CW = head.logits(chunk.input_CH, weight, index)
    if driver.plain_logits:
        wide_CW = chunk.loss.see(logits_CW, first, scratch)
        if wants_grad:
            chunk.loss.add(chunk.loss.lifted(wide_CW, logits_CW.dtype), weight, first)
        return
    if not wants_grad:
        chunk.loss.see(driver.after_head(logits_CW), first, scratch)
        return
    with torch.enable_grad():
        logits_CW.requires_grad_()
        final_CW = driver.after_head(logits_CW)
    wide_CW = chunk.loss.see(final_CW, first, scratch)
    (weights_CW,) = torch.autograd.grad(final_CW, logits_CW, chunk.loss.lifted(wide_CW, logits_CW.dtype))
    del final_CW
    column_C1, _ = chunk.loss.place(logits_CW.shape[1], first)
    with torch.enable_grad():
        target_C1 = logits_CW.detach().gather(1, column_C1).requires_grad_()
        final_C1 = driver.after_head(target_C1)
    (slope_C1,) = torch.autograd.grad(final_C1, target_C1, torch.ones_like(final_C1))
    chunk.loss.add(weights_CW, weight, first, slope_C1)


def _leave(driver: Driver, chunk: _Chunk, flat_NH: torch.Tensor, grad_NH: torch.Tensor, grad_scale: float) -> None:
    """Back through the final norm; what it trains gets its gradient."""
    with torch.enable_grad():
        chunk_CH = flat_NH[chunk.rows].detach().requires_grad_()
        entering_CH = driver.head_input(chunk_CH)
    backward(entering_CH, chunk.loss.gradient(grad_scale))
    grad_NH[chunk.rows] = chunk_CH.grad
