"""The loss tail with a head in host memory: final norm, then the vocabulary in tiles, twice, for many tokens at once.

Tokens of all micro-batches of a group are taken in blocks; a block passes every tile before the next tile is used, so
that the head crosses the link twice per block and not twice per chunk. Within a block each chunk of `loss_chunk` tokens
has one tile's logits at a time. Shapes: C tokens of a chunk, H hidden size, W vocabulary entries of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fitune.engine.batch import Batch
from fitune.engine.driver import Driver
from fitune.engine.ring import Item
from fitune.model.ends import HostHead, wide_product
from fitune.model.tiled_loss import TiledCrossEntropy

# Tokens that share one passage of the head. At 8,192 the products of a tile take several times as long as its copy even
# over a slow link; the block's inputs and their fp32 gradients take 6 bytes x hidden size x tokens (0.2 GiB at 4,096).
BLOCK_TOKENS = 8192


@dataclass
class _Chunk:
    """Some tokens of one micro-batch on their way through the head."""

    member: int
    rows: slice | torch.Tensor
    loss: TiledCrossEntropy
    input_CH: torch.Tensor
    grad_CH: torch.Tensor | None  # fp32


@dataclass
class TailResult:
    """`losses` fp32 scalars and gradients [B, T, H] of the last hidden states (None in evaluation), per micro-batch."""

    losses: list[torch.Tensor]
    grads: list[torch.Tensor | None] = field(default_factory=list)


def tail_items(head: HostHead, batches: Sequence[Batch], loss_chunk: int, *, backward: bool) -> list[Item]:
    """The head's tiles in the order in which `tiled_tail` uses them."""
    there = [("head", tile) for tile in range(head.num_tiles)]
    return (there + there[::-1] if backward else there) * len(_blocks(batches, loss_chunk))


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
    for block in _blocks(batches, loss_chunk):
        chunks = [_enter(driver, flats[m], batches[m], (m, start, end), grad_scale) for m, start, end in block]
        _through_tiles(driver, chunks, grad_scale)
        for chunk in chunks:
            result.losses[chunk.member] += chunk.loss.loss()
            grad_NH = grads[chunk.member]
            if grad_NH is not None:
                _leave(driver, chunk, flats[chunk.member], grad_NH)
                chunk_done()
    shapes = [h.shape for h in hidden]
    result.grads = [g.view(shape) if g is not None else None for g, shape in zip(grads, shapes, strict=True)]
    return result


def _enter(
    driver: Driver, flat_NH: torch.Tensor, batch: Batch, place: tuple[int, int, int], grad_scale: float | None
) -> _Chunk:
    member, start, end = place
    rows: slice | torch.Tensor = slice(start, end)
    if batch.counted is not None:
        rows = batch.counted[start:end]
    with torch.no_grad():
        input_CH = driver.head_input(flat_NH[rows])
    grad_CH = None
    if grad_scale is not None:
        grad_CH = torch.zeros(input_CH.shape, dtype=torch.float32, device=input_CH.device)
    return _Chunk(member, rows, TiledCrossEntropy(batch.targets.reshape(-1)[rows]), input_CH, grad_CH)


def _through_tiles(driver: Driver, chunks: list[_Chunk], grad_scale: float | None) -> None:
    head = driver.built.host_head
    assert head is not None
    scratch = driver.built.context.scratch
    for index in range(head.num_tiles):
        with head.tiles.tile(index) as weight, torch.no_grad():
            for chunk in chunks:
                logits_CW = head.logits(chunk.input_CH, weight, index)
                if not driver.plain_logits:
                    logits_CW = driver.after_head(logits_CW)
                chunk.loss.see(logits_CW, head.rows(index).start, scratch)
                del logits_CW
    if grad_scale is None:
        return
    for index in reversed(range(head.num_tiles)):
        with head.tiles.tile(index) as weight:
            for chunk in chunks:
                _tile_gradient(driver, head, chunk, weight, index, grad_scale)


def _tile_gradient(
    driver: Driver, head: HostHead, chunk: _Chunk, weight: torch.Tensor, index: int, grad_scale: float
) -> None:
    """Add a tile's part to the gradient of what entered the head."""
    first, scratch = head.rows(index).start, driver.built.context.scratch
    with torch.no_grad():
        logits_CW = head.logits(chunk.input_CH, weight, index)
    if driver.plain_logits:
        grad_CW = chunk.loss.gradient(logits_CW, first, grad_scale, scratch)
    else:
        with torch.enable_grad():
            logits_CW.requires_grad_()
            final_CW = driver.after_head(logits_CW)
        grad_CW = chunk.loss.gradient(final_CW, first, grad_scale, scratch)
        (grad_CW,) = torch.autograd.grad(final_CW, logits_CW, grad_CW)
        del final_CW
    del logits_CW
    assert chunk.grad_CH is not None
    with torch.no_grad():
        chunk.grad_CH += wide_product(grad_CW, weight)


def _leave(driver: Driver, chunk: _Chunk, flat_NH: torch.Tensor, grad_NH: torch.Tensor) -> None:
    """Back through the final norm; what it trains gets its gradient."""
    assert chunk.grad_CH is not None
    with torch.enable_grad():
        chunk_CH = flat_NH[chunk.rows].detach().requires_grad_()
        entering_CH = driver.head_input(chunk_CH)
    entering_CH.backward(chunk.grad_CH.to(entering_CH.dtype))
    grad_NH[chunk.rows] = chunk_CH.grad
    chunk.grad_CH = None
