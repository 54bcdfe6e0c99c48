"""Weights pass through a few device buffers, fetched ahead of the layers that use them.

A step knows which weights it will use and in which order: layers forward, tiles of a head in host memory, layers
backward. `Ring.begin` is told that order. Whenever a buffer is free, the next item that is not on the device is fetched
into it, unless the buffer holds something that is needed sooner. (Belady's rule. So the last layers stay over the turn
from forward to backward, and the first ones from one pass to the next, without a word about either.) Nothing is ever
copied back: weights that are trained change in host memory (see `host_masters`), where a fetch waits for the update.

On CUDA fetches run on one stream of their own for the life of the run. Items in pinned memory are copied directly;
others (pageable memory, disk) go through two small pinned buffers that a thread fills. On the CPU the same code copies
into buffers in RAM; on `meta` only the buffers exist.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fitune.engine.feeder import Feeder, ReadInto, Ticket
from fitune.engine.link import LinkMeter
from fitune.model.build import Built
from fitune.model.host import HostBuffer

Item = tuple[str, int]
"""("layer", index) or ("head", tile)."""

# A head's tile is at most this large: enough for full speed of copies and products, small beside the tile's logits.
HEAD_TILE_BYTES = 64 * 2**20
_TILE_ROWS_MULTIPLE = 64  # products of whole tensor-core blocks


class WeightSource(Protocol):
    """Where the layers' frozen weights come from. The resident source has nothing to do."""

    def begin(self, schedule: Sequence[Item]) -> None:
        """The order in which items will be used from now on; those that are not streamed are passed over."""

    def layer(self, index: int) -> AbstractContextManager[None]:
        """Inside, the decoder layer's modules hold their weights on the device."""

    def keeping(self, index: int) -> AbstractContextManager[None]:
        """Inside, autograd may save the layer's weights for a backward pass that runs after they were overwritten."""


class Resident:
    """All weights are on the device."""

    def begin(self, schedule: Sequence[Item]) -> None:
        pass

    def layer(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def keeping(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass
class _Slot:
    buffer: torch.Tensor
    item: Item | None = None
    in_use: bool = False
    waited: bool = True  # the computing stream has waited for the newest fetch already
    ready: Any = None  # CUDA event: the fetch is done
    free: Any = None  # CUDA event: the last use is done
    ticket: Any = None  # what the feeder's thread still has to do for the newest fetch
    views: dict[Item, list[torch.Tensor]] = field(default_factory=dict)
    copies: dict[Item, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # (here, in host memory)


@dataclass(frozen=True)
class _Saved:
    """A tensor that autograd saved, by its place in its layer's bytes."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Origin:
    """Where an item's bytes are: in host memory from `start` on, or to be had from `read_into`."""

    host: HostBuffer | None
    start: int
    num_bytes: int
    read_into: ReadInto


class Ring:
    """A weight source with `num_buffers` device buffers of the largest item's size.

    What is moved and waited for is in `meter`. A single stream of computation is assumed.
    """

    def __init__(self, built: Built):
        self.device = built.device
        self.streamed, self.head = built.streamed, built.host_head
        largest = self.streamed.largest_bytes if self.streamed is not None else 0
        if self.head is not None:
            largest = max(largest, self._choose_tiles(largest))
            self.head.__dict__["tiles"] = self
        owner = self.streamed or self.head
        assert owner is not None, "nothing is streamed"
        num_buffers = owner.ring_buffers
        assert num_buffers >= 2, "one buffer computes while another is filled"
        self.buffer_bytes = -(-largest // 512) * 512
        self.slots = [
            _Slot(torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self.device)) for _ in range(num_buffers)
        ]
        self.meter = LinkMeter(self.device)
        self._uses: dict[Item, list[int]] = {}
        self._schedule: list[Item] = []
        self._at = 0
        self._is_settled = False  # nothing has changed since what can be fetched ahead was
        self._stream: Any = None
        self._compute: Any = None
        if self.device.type == "cuda":
            self._compute = torch.cuda.current_stream(self.device)
            self._stream = torch.cuda.Stream(self.device)
            for slot in self.slots:
                slot.ready, slot.free = torch.cuda.Event(), torch.cuda.Event()
                # the buffer's memory may have been another tensor's until now
                slot.free.record(self._compute)
        self._feeder = Feeder(self.device, self._stream)
        self.not_yet: Callable[[int], Callable[[], None] | None] = lambda index: None
        """For a layer whose bytes in host memory are being changed: what waits until they have been."""
        for index in self.streamed.layouts if self.streamed is not None else ():
            assert self.streamed is not None
            self.streamed.attach(index, self._views(self.slots[0], ("layer", index)))

    def _choose_tiles(self, ring_bytes: int) -> int:
        """Rows of a tile so that it fits the layers' buffers; returns the bytes of a tile."""
        head = self.head
        assert head is not None
        row_bytes = head.in_features * head.dtype.itemsize
        room = min(ring_bytes, HEAD_TILE_BYTES) if ring_bytes >= row_bytes * _TILE_ROWS_MULTIPLE else HEAD_TILE_BYTES
        rows = max(_TILE_ROWS_MULTIPLE, room // row_bytes // _TILE_ROWS_MULTIPLE * _TILE_ROWS_MULTIPLE)
        count = -(-head.out_features // rows)  # tiles of equal size: the last one must not be a sliver
        head.tile_rows = min(rows, -(-head.out_features // count // _TILE_ROWS_MULTIPLE) * _TILE_ROWS_MULTIPLE)
        return head.tile_rows * row_bytes

    # -- what the step calls ------------------------------------------------------------------------------------------

    def begin(self, schedule: Sequence[Item]) -> None:
        self._schedule = [item for item in schedule if self._is_streamed(item)]
        self._uses = {}
        for position, item in enumerate(self._schedule):
            self._uses.setdefault(item, []).append(position)
        self._at = 0
        self._is_settled = False
        if self._stream is not None:
            self._compute = torch.cuda.current_stream(self.device)
        for slot in self.slots:
            slot.in_use = False  # a step that failed may have left one
        self._fetch_ahead()

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        item = ("layer", index)
        if not self._is_streamed(item):
            yield
            return
        slot = self._enter(item)
        assert self.streamed is not None
        self.streamed.bind(index, self._views(slot, item))
        try:
            yield
        finally:
            self._leave(slot)

    @contextmanager
    def tile(self, index: int) -> Iterator[torch.Tensor]:
        """A tile [W, H] of the head in host memory."""
        slot = self._enter(("head", index))
        try:
            yield self._views(slot, ("head", index))[0]
        finally:
            self._leave(slot)

    @contextmanager
    def keeping(self, index: int) -> Iterator[None]:
        item = ("layer", index)
        slot = self._holder(item)
        if slot is None:
            yield
            return
        storage = slot.buffer.untyped_storage()._cdata

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Saved:
            if tensor.untyped_storage()._cdata != storage:
                return tensor
            offset = tensor.storage_offset() * tensor.element_size()
            return _Saved(offset, tensor.shape, tensor.stride(), tensor.dtype)

        def unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
            if isinstance(saved, torch.Tensor):
                return saved
            holder = self._holder(item)
            assert holder is not None, f"layer {index} is not on the device for its backward pass"
            flat = holder.buffer.view(saved.dtype)
            return flat.as_strided(saved.shape, saved.stride, saved.offset // saved.dtype.itemsize)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def forget(self, index: int) -> None:
        """A layer's bytes in host memory change: a copy on the device is out of date."""
        slot = self._holder(("layer", index))
        if slot is not None:
            slot.item = None
            self._is_settled = False

    def device_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """What the ring itself holds on the device, by name; the layers' weights are views of these."""
        return [(f"ring buffer {number}", slot.buffer) for number, slot in enumerate(self.slots)]

    def close(self) -> None:
        """Stop the thread that reads ahead, if there is one."""
        self._feeder.close()

    # -- slots --------------------------------------------------------------------------------------------------------

    def _is_streamed(self, item: Item) -> bool:
        kind, index = item
        return self.head is not None if kind == "head" else self.streamed is not None and index in self.streamed.layouts

    def _holder(self, item: Item) -> _Slot | None:
        return next((slot for slot in self.slots if slot.item == item), None)

    def _views(self, slot: _Slot, item: Item) -> list[torch.Tensor]:
        if item not in slot.views:
            kind, index = item
            if kind == "layer":
                assert self.streamed is not None
                slot.views[item] = self.streamed.views(index, slot.buffer)
            else:
                assert self.head is not None
                rows = self.head.rows(index)
                shape = rows.stop - rows.start, self.head.in_features
                count = shape[0] * shape[1] * self.head.dtype.itemsize
                slot.views[item] = [slot.buffer[:count].view(self.head.dtype).view(shape)]
        return slot.views[item]

    def _enter(self, item: Item) -> _Slot:
        if self._at < len(self._schedule) and self._schedule[self._at] != item:
            self._schedule, self._uses, self._at = [], {}, 0  # not as announced (generation): on demand from here
            self._is_settled = False
        slot = self._holder(item)
        if slot is None:
            slot = self._victim(self._at, needed_at=None)
            assert slot is not None
            self._fetch(item, slot)
            self._is_settled = False
        slot.in_use = True
        if not self._is_settled:
            self._fetch_ahead()
        if not slot.waited:
            self._await(slot)
        return slot

    def _await(self, slot: _Slot) -> None:
        if self._stream is not None and slot.ticket is None and slot.ready.query():
            slot.waited = True  # the copy is over: what is launched from here on sees it
            return
        with self.meter.waiting():
            if slot.ticket is not None:
                slot.ticket.wait()
                slot.ticket = None
            if self._stream is not None:
                self._compute.wait_event(slot.ready)
        slot.waited = True

    def _leave(self, slot: _Slot) -> None:
        if self._stream is not None:
            slot.free.record(self._compute)
        slot.in_use = False
        self._at += 1
        self._fetch_ahead()

    def _next_use(self, item: Item | None, position: int) -> float:
        uses = self._uses.get(item, []) if item is not None else []
        at = bisect.bisect_left(uses, position)
        return uses[at] if at < len(uses) else float("inf")

    def _victim(self, position: int, needed_at: float | None) -> _Slot | None:
        """The slot that is needed last; None when all are needed before `needed_at` (None: it is needed now)."""
        idle = [slot for slot in self.slots if not slot.in_use]
        if not idle:
            return None
        slot = max(idle, key=lambda s: (self._next_use(s.item, position), s.item is None))
        if needed_at is not None and self._next_use(slot.item, position) <= needed_at:
            return None
        return slot

    def _fetch_ahead(self) -> None:
        """Fetch what is needed next into every slot that holds nothing needed sooner."""
        self._is_settled = True
        seen: set[Item] = set()
        for position in range(self._at, len(self._schedule)):
            item = self._schedule[position]
            if item in seen:
                continue
            seen.add(item)
            if self._holder(item) is None:
                slot = self._victim(self._at, needed_at=position)
                if slot is None:
                    self._hint(item)
                    return
                self._fetch(item, slot)
            if len(seen) >= len(self.slots):
                self._hint(self._schedule[position + 1] if position + 1 < len(self._schedule) else None)
                return

    def _hint(self, item: Item | None) -> None:
        if item is not None and item[0] == "layer" and self.streamed is not None and self.streamed.backing is not None:
            self.streamed.backing.will_need(item[1])

    # -- copies -------------------------------------------------------------------------------------------------------

    def _fetch(self, item: Item, slot: _Slot) -> None:
        if slot.ticket is not None:  # an older fetch that nobody waited for
            slot.ticket.wait()
            slot.ticket = None
        slot.item, slot.waited = item, False
        if self.device.type == "meta":
            slot.waited = True
            return
        before = self.not_yet(item[1]) if item[0] == "layer" else None
        pair = slot.copies.get(item)
        if before is not None or pair is None:
            origin = self._origin(item)
            target, source = slot.buffer[: origin.num_bytes], None
            if origin.host is not None and (origin.host.pinned or self.device.type == "cpu"):
                source = origin.host.tensor[origin.start : origin.start + origin.num_bytes]
            if before is not None or source is None:
                ticket = Ticket(target, origin.read_into, slot.free, slot.ready, self.meter, before, source)
                slot.ticket = self._feeder.submit(ticket)
                return
            pair = slot.copies[item] = target, source
        self._copy(slot, *pair)

    def _copy(self, slot: _Slot, target: torch.Tensor, source: torch.Tensor) -> None:
        """From memory that the copying stream can read."""
        num_bytes = target.numel()
        if self._stream is None:
            with self.meter.waiting(), self.meter.copying(num_bytes):
                target.copy_(source)
            slot.waited = True
            return
        # written out: `with torch.cuda.stream` takes the host longer than the copy, and a step has two per layer
        stream = self._stream
        stream.wait_event(slot.free)
        torch.cuda.set_stream(stream)
        try:
            begin = self.meter.begin(stream)
            target.copy_(source, non_blocking=True)
            self.meter.end("copy", begin, stream, num_bytes)
        finally:
            torch.cuda.set_stream(self._compute)
        slot.ready.record(stream)

    def _origin(self, item: Item) -> _Origin:
        kind, index = item
        if kind == "layer":
            assert self.streamed is not None and self.streamed.backing is not None
            backing = self.streamed.backing
            size = self.streamed.layouts[index].num_bytes
            return _Origin(backing.flat(index), 0, size, functools.partial(backing.read_into, index))
        assert self.head is not None and self.head.buffer is not None
        rows, row_bytes = self.head.rows(index), self.head.in_features * self.head.dtype.itemsize
        start, whole = rows.start * row_bytes, self.head.buffer.tensor

        def read_into(offset: int, target: torch.Tensor) -> None:
            target.copy_(whole[start + offset : start + offset + target.numel()])

        return _Origin(self.head.buffer, start, (rows.stop - rows.start) * row_bytes, read_into)


def source_of(built: Built) -> WeightSource:
    """The model's weight source, made at the first call: a ring where something waits in host memory."""
    if built.source is None:
        built.source = Ring(built) if built.streamed is not None or built.host_head is not None else Resident()
    return built.source
