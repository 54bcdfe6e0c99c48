"""What full fine-tuning holds in host memory where masters, gradients and optimizer state are there. Plain Python.

Masters, state and working copies stay. Gradients come in parcels, one of each layer, one of what is behind the layers
and one of what is before them. With clipping or loss scaling, or where several groups of micro-batches send theirs, all
of them wait; else a layer's goes once it is updated, and two layers' are there at most (`engine.host_masters`). A test
compares the sums with the buffers of the CPU's engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fitune.memory.states import TABLE_BYTES, Dims, state_of, tables
from fitune.plan import Plan

UNDERWAY = 2  # parcels of layers on their way to the thread that takes them in, at most
_ALIGNMENT_BYTES = 64  # of a tensor in a parcel
_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Ends:
    """Trained tensors on one side of the layers: tables whose gradients are added up in fp32 on the device, others."""

    wide: tuple[Dims, ...] = ()
    others: tuple[Dims, ...] = ()


@dataclass(frozen=True)
class InHost:
    """What is trained.

    Attributes:
        kinds: kind of every decoder layer; `layers`: trained tensors of one of each kind.
        before, after: what is before and behind the layers, by the gradients that leave with it.
        tied: the embedding that is the head too, whose gradient leaves with both sides; None where they are two.
    """

    kinds: tuple[str, ...]
    layers: dict[str, tuple[Dims, ...]]
    before: Ends
    after: Ends
    tied: Dims | None

    @property
    def ends(self) -> list[Dims]:
        """Each tensor once."""
        after = [dims for dims in (*self.after.wide, *self.after.others) if dims != self.tied]
        return [*self.before.wide, *self.before.others, *after]

    @property
    def parts(self) -> list[list[Dims]]:
        """Tensors by what is updated together."""
        return [self.ends, *(list(self.layers[kind]) for kind in self.kinds)]

    @property
    def num_trained(self) -> int:
        return sum(_numel(part) for part in self.parts)

    def state_bytes(self, optimizer: str) -> int:
        """Of the optimizer's state; every part's optimizer has code tables of its own."""
        total = 0
        for part in self.parts:
            total += sum(size for dims in part for _, size in state_of(optimizer, dims)[0])
            total += sum(table.num_bytes for table in tables(optimizer, part))
        return total


def _numel(tensors: Iterable[Dims]) -> int:
    return sum(math.prod(dims) for dims in tensors)


def held_bytes(found: InHost, plan: Plan, num_rows: int, num_targets: int) -> dict[str, int]:
    """Owner to bytes in host memory once a step has been made.

    Args:
        num_rows: most rows of a step.
        num_targets: of one micro-batch.
    """
    element = _WIDTHS[plan.precision]
    streamed = sum(_numel(found.layers[found.kinds[i]]) for i in plan.streamed_layers())
    masters = 4 * (found.num_trained - (streamed if element == 4 else 0))
    owners = {"masters": masters, "optimizer state": found.state_bytes(plan.optimizer),
              "gradients": gradient_bytes(found, plan, num_rows, num_targets)}  # fmt: skip
    if plan.device == "cuda" and plan.optimizer_place == "host":
        there = set(plan.streamed_layers())
        stay = [kind for i, kind in enumerate(found.kinds) if i not in there]
        owners["working copies"] = _parcel(found.ends, element) + sum(_parcel(found.layers[k], element) for k in stay)
    return owners


def gradient_bytes(found: InHost, plan: Plan, num_rows: int, num_targets: int) -> int:
    """Of the buffers for gradients, which stay for the next steps."""
    element = _WIDTHS[plan.precision]
    passes = max(1, -(-num_rows // plan.micro_batch))
    layer_major = plan.accumulation_order == "layer-major"
    together, groups = (passes, 1) if layer_major else (1, passes)
    chunks = max(1, -(-num_targets // plan.loss_chunk))
    width = 4 if together > 1 else element
    layers = [_parcel(found.layers[kind], width) for kind in found.kinds]
    tail = _parcel(found.after.wide, 4) + _parcel(found.after.others, 4 if chunks * together > 1 else element)
    embed = _parcel(found.before.wide, 4) + _parcel(found.before.others, width)
    if groups == 1 and plan.update_waits:
        return sum(layers) + tail + embed
    underway = sum(size * min(UNDERWAY, layers.count(size)) for size in set(layers))
    if groups == 1:
        return underway + tail + embed
    # What the first group sent becomes fp32 with the second's, tensor by tensor; its buffers then serve the others'. A
    # tied table's second half is added to the first: its buffer is free again at once.
    beside = [dims for dims in found.before.others if dims != found.tied]
    stay = bool(beside) or found.tied is None
    wider = 0
    if element < 4:
        wider = _widened(found, all_at_once=plan.update_waits or groups > 2) + _parcel(beside, 4)
        wider += _parcel(found.after.others, 4) if chunks == 1 else 0
    return sum(layers) + underway + wider + 2 * tail + (2 if stay else 1) * embed


def _widened(found: InHost, all_at_once: bool) -> int:
    """fp32 gradients of the layers, each tensor's in a buffer of its own; of one layer after the other where each is
    updated at once: the next one uses the same buffers."""
    if all_at_once:
        return sum(_parcel(found.layers[kind], 4) for kind in found.kinds)
    sizes: Counter[int] = Counter()
    for tensors in found.layers.values():
        sizes |= Counter(_parcel([dims], 4) for dims in tensors)
    return sum(size * count for size, count in sizes.items())


def _parcel(tensors: Iterable[Dims], width: int) -> int:
    return sum(-(-math.prod(dims) * width // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for dims in tensors)


def piece_buffers(found: InHost, plan: Plan, num_rows: int) -> list[tuple[str, int]]:
    """(what, bytes) of the device's buffers for updates there, made by the first of them, and of code tables."""
    from fitune.engine.streamed_update import buffers

    if plan.optimizer_place != "streamed":
        return []
    element = _WIDTHS[plan.precision]
    together = plan.accumulation_order == "layer-major" and plan.micro_batch < num_rows
    groups = not together and plan.micro_batch < num_rows
    narrow = element == 2 and not together and not groups
    has_wide = not narrow or bool(found.before.wide or found.after.wide)
    made = buffers(plan.optimizer, narrow=narrow, wide=has_wide, streams=element == 2 and bool(plan.streamed_layers()))
    coded = sum(any(state_of(plan.optimizer, dims)[1] for dims in part) for part in found.parts)
    return [(name, size) for _ in range(2) for name, size in made] + [("code table", TABLE_BYTES)] * (2 * coded)
