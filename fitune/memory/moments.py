"""The highest moment of each part of a step, with whose the bytes are. Plain Python.

A part is what the engine's observer calls one (`embed`, `forward` of a layer, `tail`, ...). Moments are what timelines
are drawn from and what a phase's peak is broken down by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fitune.memory.events import Event, rounded
from fitune.memory.pieces import MASTER

PLACES = {
    "start": "the batch on its way in", "load": "loading", "embed": "the embedding", "stash": "room for the input",
    "forward": "the forward pass", "tail": "the loss", "backward": "the backward pass",
    "optimizer": "the optimizer's update",
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """One block of memory that is alive at a moment."""

    label: str
    owner: str
    num_bytes: int


@dataclass(frozen=True)
class Moment:
    """The highest moment of a part.

    Attributes:
        part, layer: as in `Event`; layer is -1 outside the layers.
        owners: owner to live bytes; their sum is `num_bytes`.
        largest: the largest blocks that this part itself made, largest first.
    """

    part: str
    layer: int
    owners: dict[str, int]
    largest: tuple[Block, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(self.owners.values())

    def with_(self, more: dict[str, int]) -> Moment:
        """The same moment with more bytes of some owners."""
        owners = {name: self.owners.get(name, 0) + more.get(name, 0) for name in {**self.owners, **more}}
        return replace(self, owners=owners)

    @property
    def place(self) -> str:
        """Where in the step that is, in words: `the backward pass of layer 3`."""
        if self.part == "backward" and self.layer < 0:
            return "the embedding's backward pass"
        name = PLACES.get(self.part, self.part)
        of_layer = self.layer >= 0 and self.part in ("stash", "forward", "backward")
        return f"{name} of layer {self.layer}" if of_layer else name


def highest(moments: Iterable[Moment]) -> Moment:
    """The first of the moments with the most bytes."""
    return max(moments, key=lambda moment: moment.num_bytes)


def owner_of(event: Event) -> str:
    """The event's owner; masters, which a trace counts as weights, are told apart by their name."""
    return "masters" if event.owner == "weights" and event.label.startswith(MASTER) else event.owner


def moments_of(events: Sequence[Event], granule: int = 1, num_largest: int = 3) -> list[Moment]:
    """The highest moment of each part, in the order of the parts.

    Args:
        events: a step's, from its first block to its last; blocks without a death live on.
        granule: every block is rounded up to a multiple of this (the allocator's smallest size).
        num_largest: how many of a part's own blocks are named.
    """
    starts, before = [], None
    for index, event in enumerate(events):
        here = event.part, event.layer
        if here != before:
            starts.append(index)
            before = here
    sizes = [rounded(event.num_bytes, granule) for event in events]
    live: defaultdict[str, int] = defaultdict(int)
    total, found = 0, []
    for start, end in zip(starts, [*starts[1:], len(events)], strict=True):
        top, best = start - 1, total  # the moment before its first event: a part may only free
        for index in range(start, end):
            total += sizes[index]
            if total > best or (total == best and top < start):
                top, best = index, total
        own: dict[int, int] = {}  # block to the index of its birth
        for index in range(start, top + 1):
            event = events[index]
            live[owner_of(event)] += sizes[index]
            if event.num_bytes > 0:
                own[event.block] = index
            else:
                own.pop(event.block, None)
        owners = {owner: size for owner, size in live.items() if size}
        for index in range(top + 1, end):
            live[owner_of(events[index])] += sizes[index]
        births = sorted(own.values(), key=lambda index: -sizes[index])[:num_largest]
        largest = [Block(events[index].label, owner_of(events[index]), sizes[index]) for index in births]
        found.append(Moment(events[start].part, events[start].layer, owners, tuple(largest)))
    return found
