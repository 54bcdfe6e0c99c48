"""The end of a step: the norm of all gradients, clipping, the optimizer, and what is let go. Plain Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fitune.memory.pieces import Trained

if TYPE_CHECKING:
    from fitune.memory.splice import Splicer

_PIECE_ELEMENTS = 65_536


def make_state(splicer: Splicer, trained: Iterable[tuple[int, Trained]], part: str) -> None:
    tables = splicer.script.shared_state
    for layer, tensor in trained:
        if tensor.coded:
            for table in tables:
                splicer.birth(table.num_bytes, table.owner, table.label, part, -1)
            tables = ()
        for state in tensor.state:
            splicer.birth(state.num_bytes, state.owner, state.label.replace("{layer}", str(layer)), part, layer)


def play_update(splicer: Splicer, first_step: bool, trained: list[tuple[int, Trained]]) -> None:
    """From the sum of losses to the end of `Engine.step`: the norm, clipping, the optimizer, and what is let go."""
    script = splicer.script
    gradients = [(layer, t, splicer.gradients.get((layer, t.name))) for layer, t in trained]
    present = [block for _, _, block in gradients if block is not None]

    def scalar(label: str, num_bytes: int = 4) -> int:
        return splicer.birth(num_bytes, "temporary", label, "optimizer", -1)

    def gone(block: int) -> None:
        splicer.death(block, "optimizer", -1)

    mean = scalar("mean loss")
    gone(splicer.loss_block())
    if script.in_host:  # the norm comes from there, and no master is on the device
        norm = scalar("norm of all gradients")
        gone(scalar("loss and norm", num_bytes=8))
        if script.clips:
            _clip(scalar, gone)
        for block in [*splicer.batch_blocks(), mean, norm]:
            gone(block)
        return
    pieces = None
    if script.on_cuda:
        numels = [tensor.numel for _, tensor, block in gradients if block is not None]
        pieces = scalar("norms of gradients' pieces", num_bytes=4 * norm_pieces(numels))
    norms = [scalar("norm of a gradient") for _ in present]
    if pieces is not None:
        gone(pieces)
    together = scalar("norms of gradients", num_bytes=4 * len(present))
    norm = scalar("norm of all gradients")
    gone(together)
    for block in reversed(norms):
        gone(block)
    gone(scalar("loss and norm", num_bytes=8))
    if script.clips:
        _clip(scalar, gone)
    if first_step:
        make_state(splicer, [(layer, tensor) for layer, tensor, block in gradients if block is not None], "optimizer")
    if script.update_bytes:
        gone(
            splicer.birth(
                script.update_bytes, "temporary", "the optimizer's copy of the largest tensor", "optimizer", -1
            )
        )
    for block in present:
        gone(block)
    for block in [*splicer.batch_blocks(), mean, norm]:
        gone(block)


def norm_pieces(numels: list[int]) -> int:
    """Partial sums of torch's `_foreach_norm` on CUDA: of every tensor as many as the largest one has pieces of 65,536
    elements (torch 2.11, ForeachReduceOp.cu and MultiTensorApply.cuh; held to records of an H200)."""
    return len(numels) * max((-(-numel // _PIECE_ELEMENTS) for numel in numels), default=0)


def _clip(scalar, gone) -> None:  # type: ignore[no-untyped-def]
    """`torch.nn.utils.clip_grads_with_norm_`: the factor is max_norm / (norm + 1e-6), at most one."""
    padded = scalar("norm and epsilon")
    inverse = scalar("its inverse")
    factor = scalar("clipping factor")
    gone(inverse)
    gone(padded)
    clamped = scalar("clipping factor, at most one")
    gone(factor)
    gone(clamped)
