"""A model of torch's caching allocator for CUDA: what a list of births and deaths makes it reserve. Plain Python.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h`, torch 2.11 to 2.13, with
the default settings and with `expandable_segments:True`. In short:

- A request is rounded up to 512 bytes. At most 1 MiB: the small pool; more: the large pool. Streams share nothing.
- The smallest free block that fits is taken, of several the one at the lowest address. What is left of it becomes a
  free block, if it is at least 512 bytes (small pool, and all of expandable segments) or more than 1 MiB (large pool).
- Nothing fits: a new segment of 2 MiB (small), 20 MiB (less than 10 MiB) or the request rounded up to 2 MiB.
- Expandable: one range of addresses per pool, 1 1/8 as large as the card. Pages of 2 MiB (small) or 20 MiB (large) are
  mapped behind the free block before the first unmapped range that has room. A free block counts as large as it can
  become, so that the one at the end is taken last.
- A freed block joins its free neighbours. Nothing goes back to the driver before a request would exceed the limit:
  then every segment (page) that is free goes back, and the request is tried once more (a retry); else it is an OOM.
- The limit is compared with what is reserved plus the size of a new segment, also where expandable segments would map
  less (there is a free block to grow) or more (up to a page).

Left out: private pools of CUDA graphs, blocks that wait for another stream (`record_stream`), `max_split_size_mb`,
`roundup_power2_divisions` and `garbage_collection_threshold`, which fitune does not set. The driver's addresses of
segments are taken to grow.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from fitune.memory.events import GRANULE, Event, rounded
from fitune.units import MIB

SMALL_REQUEST_BYTES = MIB  # the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB  # requests from this size on get a segment of their own
SEGMENT_STEP_BYTES = 2 * MIB

_ENDLESS_BYTES = 1 << 46  # a range of addresses that no card fills


@dataclass(frozen=True)
class Replayed:
    """What the allocator did with a list of events.

    Attributes:
        peak_allocated_bytes: as `torch.cuda.max_memory_allocated` counts: whole blocks, after rounding.
        peak_reserved_bytes: as `torch.cuda.max_memory_reserved` counts: segments, or mapped pages.
        num_retries: requests that were met only after cached memory had gone back (`num_alloc_retries`).
        oom_at: the request that could not be met; what came after it was not replayed. None: all were met.
        allocated_peak_at, reserved_peak_at: the birth that made the peak; None where a list began at its peak.
        allocated_bytes, reserved_bytes: at the end of the list.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_retries: int
    oom_at: Event | None
    allocated_peak_at: Event | None
    reserved_peak_at: Event | None
    allocated_bytes: int
    reserved_bytes: int


def replay(
    events: Iterable[Event], *, expandable: bool, limit_bytes: int | None = None, device_bytes: int | None = None
) -> Replayed:
    """Replays one list on a fresh allocator; the arguments are those of :class:`CachingAllocator`."""
    return CachingAllocator(expandable=expandable, limit_bytes=limit_bytes, device_bytes=device_bytes).run(events)


class _Block:
    """A run of addresses: in use, free, or (expandable segments) unmapped. `before` and `after` are its neighbours."""

    __slots__ = ("after", "before", "free", "mapped", "pool", "size", "start")

    def __init__(
        self, pool: _Pool, start: int, size: int, mapped: bool = True, before: _Block | None = None,
        after: _Block | None = None,
    ):  # fmt: skip
        """A free block, which its neighbours know of."""
        self.pool, self.start, self.size, self.free, self.mapped = pool, start, size, True, mapped
        self.before, self.after = before, after
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self


class _Pool:
    """Free blocks of one size class and stream by (size, address), and unmapped ranges by address.

    `least_rest` is the smallest rest of a block that becomes a block of its own.
    """

    __slots__ = ("free", "is_small", "least_rest", "page_bytes", "unmapped")

    def __init__(self, is_small: bool, expandable: bool):
        self.is_small = is_small
        self.page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self.least_rest = GRANULE if is_small or expandable else SMALL_REQUEST_BYTES + 1
        self.free: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = []

    def insert(self, block: _Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.start, block))
        else:
            insort(self.unmapped, (block.start, block))

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.start))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.start,))]


class OutOfMemory(Exception):
    """The model's allocator cannot meet a request, as torch's would raise `torch.OutOfMemoryError`."""


class CachingAllocator:
    """The allocator of one card. Carries its state from list to list: load, then step after step.

    Args:
        expandable: `expandable_segments:True`, which fitune sets where the platform has it.
        limit_bytes: what `set_per_process_memory_fraction` allows torch to reserve; None: no such limit.
        device_bytes: what the driver can give this process at most; None: enough.
        total_bytes: memory of the whole card, from which the range of addresses follows; None: endless.
    """

    def __init__(
        self,
        *,
        expandable: bool,
        limit_bytes: int | None = None,
        device_bytes: int | None = None,
        total_bytes: int | None = None,
    ):
        self.expandable, self.limit_bytes, self.device_bytes = expandable, limit_bytes, device_bytes
        self._range_bytes = _ENDLESS_BYTES if total_bytes is None else total_bytes + total_bytes // 8
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._next_address = 0
        self._live: dict[object, _Block] = {}
        self._num_lists = 0
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0

    def run(self, events: Iterable[Event]) -> Replayed:
        """Replays a list; its peaks and retries are counted from its beginning.

        Blocks of earlier lists stay until a death with their number. A number that is born again while its block of an
        earlier list lives is a new block; the earlier one stays for good.

        Raises:
            ValueError: a number that is born twice within the list, or the death of a block that is not there.
        """
        self._num_lists += 1
        born: set[int] = set()
        retries = self.num_retries
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes
        allocated_peak = reserved_peak = oom = None
        for event in events:
            if event.num_bytes < 0:
                born.discard(event.block)
                self.free(event.block)
                continue
            if event.num_bytes == 0:
                continue
            if event.block in self._live:
                if event.block in born:
                    raise ValueError(f"block {event.block} is born twice ({event.label})")
                self._live["earlier", self._num_lists, event.block] = self._live.pop(event.block)
            allocated, reserved = self.peak_allocated_bytes, self.peak_reserved_bytes
            try:
                self.allocate(event.block, event.num_bytes)
            except OutOfMemory:
                oom = event
            else:
                born.add(event.block)
            if self.peak_allocated_bytes > allocated:
                allocated_peak = event
            if self.peak_reserved_bytes > reserved:
                reserved_peak = event
            if oom is not None:
                break
        return Replayed(
            self.peak_allocated_bytes, self.peak_reserved_bytes, self.num_retries - retries, oom, allocated_peak,
            reserved_peak, self.allocated_bytes, self.reserved_bytes,
        )  # fmt: skip

    def allocate(self, key: object, num_bytes: int, stream: int = 0) -> None:
        """A tensor of `num_bytes` (more than 0) is made; `key` names it until it is freed.

        Raises:
            OutOfMemory: also after all that was cached has gone back to the driver.
        """
        size = rounded(num_bytes)
        is_small = size <= SMALL_REQUEST_BYTES
        pool = self._pools.get((is_small, stream))
        if pool is None:
            pool = self._pools[is_small, stream] = _Pool(is_small, self.expandable)
        index = bisect_left(pool.free, (size,))
        if index < len(pool.free):
            block = self._best_fit(pool.free, index)
        else:
            block = self._new_block(pool, size) or self._retried(pool, size)
        left = block.size - size
        if left >= pool.least_rest:
            rest = _Block(pool, block.start + size, left, True, block, block.after)
            block.size = size
            insort(pool.free, (left, rest.start, rest))
        block.free = False
        self._live[key] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes

    def free(self, key: object) -> None:
        """The tensor dies.

        Raises:
            ValueError: there is none of this name.
        """
        block = self._live.pop(key, None)
        if block is None:
            raise ValueError(f"block {key} dies and is not there")
        self.allocated_bytes -= block.size
        block.free = True
        _join_neighbours(block)
        insort(block.pool.free, (block.size, block.start, block))

    def release_cached(self) -> None:
        """Gives free segments (pages) back to the driver, as `torch.cuda.empty_cache` does: large pools first."""
        for (_, _), pool in sorted(self._pools.items(), key=lambda item: item[0]):
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    @staticmethod
    def _best_fit(free: list[tuple[int, int, _Block]], index: int) -> _Block:
        """The best of the cached blocks from `index` on, taken out of its pool: the first, unless that can grow."""
        block = free.pop(index)[2]
        after = block.after
        if after is None or after.mapped:
            return block
        room = block.size + after.size
        while index < len(free) and _room(free[index][2]) < room:
            other = free[index][2]
            free[index] = (block.size, block.start, block)
            block, room = other, _room(other)
            index += 1
        return block

    def _retried(self, pool: _Pool, size: int) -> _Block:
        """A new block after what was cached has gone back to the driver.

        Raises:
            OutOfMemory: there is none.
        """
        self.release_cached()
        self.num_retries += 1
        block = self._new_block(pool, size)
        if block is None:
            raise OutOfMemory(f"{size} bytes")
        return block

    def _new_block(self, pool: _Pool, size: int) -> _Block | None:
        """A block from the driver, not in its pool; None where a limit forbids it."""
        segment = _segment_bytes(size)
        if self.limit_bytes is not None and self.reserved_bytes + segment > self.limit_bytes:
            return None
        if self.expandable:
            return self._expand(pool, size)
        if not self._driver_has(segment):
            return None
        block = _Block(pool, self._addresses(segment), segment)
        self._reserve(segment)
        return block

    def _expand(self, pool: _Pool, size: int) -> _Block | None:
        """Maps pages until a block of `size` bytes is there, from the lowest address on that has room for it."""
        block = self._room_to_expand(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            unmapped = block.after
            assert unmapped is not None
            if not self._map(unmapped, min(size - block.size, unmapped.size)):
                return None
            block = unmapped  # which has taken in the block before it
        pool.remove(block)
        return block

    def _room_to_expand(self, pool: _Pool, size: int) -> _Block:
        for _, unmapped in pool.unmapped:
            block = unmapped.before if unmapped.before is not None and unmapped.before.free else unmapped
            found = 0
            at: _Block | None = block
            while at is not None and at.free and found < size:
                found, at = found + at.size, at.after
            if found >= size:
                return block
        length = -(-self._range_bytes // pool.page_bytes) * pool.page_bytes
        block = _Block(pool, self._addresses(length), length, False)
        pool.insert(block)
        return block

    def _map(self, block: _Block, size: int) -> bool:
        """Maps the first `size` bytes of an unmapped block, rounded up to pages, and joins them to free neighbours."""
        pool = block.pool
        mapped = -(-size // pool.page_bytes) * pool.page_bytes
        if not self._driver_has(mapped):
            return False
        pool.remove(block)
        block.mapped = True
        if mapped < block.size:
            rest = _Block(pool, block.start + mapped, block.size - mapped, False, block, block.after)
            block.size = mapped
            pool.insert(rest)
        _join_neighbours(block)
        pool.insert(block)
        self._reserve(mapped)
        return True

    def _unmap(self, block: _Block) -> None:
        """Unmaps the whole pages of a free block; what is left of it at either end stays a free block."""
        pool = block.pool
        start = -(-block.start // pool.page_bytes) * pool.page_bytes
        end = (block.start + block.size) // pool.page_bytes * pool.page_bytes
        if start >= end:
            return
        pool.remove(block)
        if block.start < start:
            pool.insert(_Block(pool, block.start, start - block.start, True, block.before, block))
        if end < block.start + block.size:
            pool.insert(_Block(pool, end, block.start + block.size - end, True, block, block.after))
        block.start, block.size, block.mapped = start, end - start, False
        self.reserved_bytes -= block.size
        _join_neighbours(block)
        if block.before is not None or block.after is not None:  # else the whole range of addresses is given up
            pool.insert(block)

    def _driver_has(self, num_bytes: int) -> bool:
        return self.device_bytes is None or self.reserved_bytes + num_bytes <= self.device_bytes

    def _reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _addresses(self, num_bytes: int) -> int:
        """Fresh addresses, aligned to both sizes of a page."""
        start = self._next_address
        step = SMALL_SEGMENT_BYTES * LARGE_SEGMENT_BYTES // MIB
        self._next_address = start + -(-num_bytes // step) * step
        return start


def _segment_bytes(size: int) -> int:
    """What is asked of the driver for a request of `size` bytes that no cached block can meet."""
    if size <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES


def _room(block: _Block) -> int:
    """The size that a free block can grow to."""
    after = block.after
    return block.size if after is None or after.mapped else block.size + after.size


def _join_neighbours(block: _Block) -> None:
    """`block`, which is in no pool, takes in the free blocks beside it that are mapped (or not) as it is."""
    before, after = block.before, block.after
    if before is not None and before.free and before.mapped == block.mapped:
        before.pool.remove(before)
        block.start = before.start
        block.size += before.size
        block.before = before.before
        if block.before is not None:
            block.before.after = block
    if after is not None and after.free and after.mapped == block.mapped:
        after.pool.remove(after)
        block.size += after.size
        block.after = after.after
        if block.after is not None:
            block.after.before = block
