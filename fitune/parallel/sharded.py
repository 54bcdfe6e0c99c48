"""Fully sharded data parallel: every rank holds 1/N of each layer's bytes and gathers a layer when it runs.

The driver runs layers one by one and knows the order of a pass, so the ring that streams weights from the host does
the same with an all-gather instead of a copy: a layer's flat buffer (packed 4-bit data, scales and norms, as it is) is
put together in a ring buffer ahead of its use. What is trained is sharded in flat fp32 parts: a layer's gradients are
reduce-scattered as soon as its backward is over, the optimizer updates this rank's part. That is ZeRO stage 3
(https://arxiv.org/abs/1910.02054) for weights that all ranks gather, stage 2 for adapters and the ends of the model,
which every rank keeps whole in their compute format.

torch's `fully_shard` is not used: it hooks modules' own forward and backward, which the driver replaces, and cannot
shard packed 4-bit tensors together with their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from fitune.engine.ring import Item, Ring
from fitune.errors import UserError
from fitune.model.build import Built
from fitune.model.host import HostBuffer
from fitune.model.streamed import Layout, Piece, StreamedLayers
from fitune.parallel.exchange import all_gather
from fitune.parallel.world import FLAT_OPTIMIZERS, Single
from fitune.plan import Plan

_PART_ALIGNMENT = 16  # bytes: no element of any type straddles two ranks' parts


class ShardBacking:
    """This rank's part of every layer, on the device (see `fitune.model.streamed.Backing`)."""

    reused = False

    def __init__(self, layouts: dict[int, Layout], group: Single, device: torch.device):
        self._layouts, self._group, self._device = layouts, group, device
        self.parts = {layer: torch.zeros(self.part_bytes(layer), dtype=torch.uint8, device=device) for layer in layouts}

    def part_bytes(self, layer: int) -> int:
        return -(-self._layouts[layer].num_bytes // (self._group.size * _PART_ALIGNMENT)) * _PART_ALIGNMENT

    def write(self, layer: int, piece: Piece, tensor: torch.Tensor) -> None:
        part, size = self.parts[layer], self.part_bytes(layer)
        first = self._group.rank * size
        start, end = max(piece.offset, first), min(piece.offset + piece.num_bytes, first + size)
        if start >= end:
            return
        flat = tensor.detach().to(piece.dtype).contiguous().reshape(-1).view(torch.uint8)
        part[start - first : end - first].copy_(flat[start - piece.offset : end - piece.offset])

    def finish(self) -> None:
        pass

    def flat(self, layer: int) -> HostBuffer | None:
        return None

    def gather(self, layer: int, target: torch.Tensor) -> None:
        """Fill `target`, at least N times a part, with the layer's bytes; all ranks call it together."""
        part = self.parts[layer]
        all_gather(target[: part.numel() * self._group.size], part)

    def read_into(self, layer: int, start: int, target: torch.Tensor) -> None:
        """All ranks call it together."""
        whole = torch.empty(self.part_bytes(layer) * self._group.size, dtype=torch.uint8, device=self._device)
        self.gather(layer, whole)
        target.copy_(whole[start : start + target.numel()])

    def will_need(self, layer: int) -> None:
        pass


class ShardedRing(Ring):
    """A ring whose layers are gathered from all ranks. All of them use the same items in the same order.

    A head in host memory has buffers of its own: what it keeps there must not decide which layers are fetched, since
    ranks have different numbers of target tokens.

    Attributes:
        after_backward: called with a layer's index when its backward pass of a group is over.
    """

    def __init__(self, built: Built, group: Single):
        self.num_layers = len(built.layers)
        self.after_backward: Callable[[int], None] = lambda index: None
        self._owed: int | None = None
        self._changed = True
        super().__init__(SimpleNamespace(streamed=built.streamed, host_head=None, device=built.device))  # type: ignore[arg-type]
        self._make_room(group)
        self.head_ring: Ring | None = None
        if built.host_head is not None:
            shown: Any = SimpleNamespace(streamed=None, host_head=built.host_head, device=built.device)
            self.head_ring = Ring(shown)

    def _make_room(self, group: Single) -> None:
        """Buffers for N whole parts, where N does not divide a layer evenly."""
        assert self.streamed is not None and isinstance(self.streamed.backing, ShardBacking)
        needed = max(self.streamed.backing.part_bytes(layer) * group.size for layer in self.streamed.layouts)
        if needed <= self.buffer_bytes:
            return
        self.buffer_bytes = needed
        for slot in self.slots:
            slot.buffer, slot.views = torch.empty(needed, dtype=torch.uint8, device=self.device), {}
            if slot.free is not None:
                slot.free.record()
        for index in self.streamed.layouts:
            self.streamed.attach(index, self._views(self.slots[0], ("layer", index)))

    def begin(self, schedule: Sequence[Item]) -> None:
        self._owed = None
        super().begin(schedule)
        if self.head_ring is not None:
            self.head_ring.begin(schedule)

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        is_backward = self.num_layers <= self._at < len(self._schedule)
        if is_backward:
            self._owed = index
        with super().layer(index):
            yield
        if is_backward:
            self._pay()

    def _pay(self) -> None:
        """The exchange after a layer's backward; also when the layer failed, since the other ranks wait for it."""
        if self._owed is not None:
            index, self._owed = self._owed, None
            self.after_backward(index)

    def finish(self) -> None:
        """Go through the rest of the pass with nothing to compute."""
        self._pay()
        while self._at < len(self._schedule):
            with self.layer(self._schedule[self._at][1]):
                pass

    def forget_all(self) -> None:
        """What the buffers hold is out of date."""
        self._changed = True
        for slot in self.slots:
            slot.item = None

    def _fetch(self, item: Item, slot: Any) -> None:
        slot.item, slot.waited = item, True
        if self.device.type == "meta":
            return
        assert self.streamed is not None and isinstance(self.streamed.backing, ShardBacking)
        backing, layer = self.streamed.backing, item[1]
        if self._stream is None:
            backing.gather(layer, slot.buffer)
            return
        slot.waited = False
        num_bytes = self.streamed.layouts[layer].num_bytes
        if self._changed:  # the parts have been written since, in the computing stream
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            self._changed = False
        self._stream.wait_event(slot.free)
        with torch.cuda.stream(self._stream), self.meter.copying(num_bytes, self._stream):
            backing.gather(layer, slot.buffer)
        slot.ready.record(self._stream)


def open_shards(built: Built, plan: Plan, group: Single) -> None:
    """Room for this rank's parts; before the first weight is read.

    Raises:
        UserError: an optimizer whose state cannot be cut into flat parts.
    """
    if plan.optimizer not in FLAT_OPTIMIZERS:
        raise UserError(
            f"optimizer {plan.optimizer} cannot be used with --parallel fsdp2",
            "its state belongs to whole matrices or blocks, and each GPU holds a part that ends anywhere",
            "use --optimizer adamw, lion or sgd",
        )
    if built.streamed is None:  # full fine-tuning: the layers' own weights
        built.streamed = StreamedLayers(built, plan)
    built.streamed.backing = ShardBacking(built.streamed.layouts, group, built.device)
    built.host_opened = True
