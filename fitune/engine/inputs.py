"""Saved inputs of recomputed layers in host memory: written during forward, read back before they are needed.

Copies run on a stream of their own beside the computation. The host memory is one pinned buffer for the life of the
run, as large as the largest step so far needed; on the device are two buffers for what comes back, in backward only.
The values are the same to the bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from fitune.model.host import HostBuffer


class OffloadedInputs:
    """Inputs of `num_layers` layers for a group of micro-batches.

    Order of calls: `begin`, `put` for every layer and micro-batch (layers outside), `turn`, `take` in the reverse order
    of layers (micro-batches in the same order), `end`.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream: Any = None
        self._compute: Any = None  # the stream that computes, in the pass that has begun
        self._free_events: list[Any] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._now = torch.cuda.Event()
        self._arena: HostBuffer | None = None
        self._views: dict[tuple[int, int], torch.Tensor] = {}  # of the arena, by layer and member
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._offsets: list[int] = []
        self._layer_bytes = 0
        self._num_layers = 0
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        self._buffers: list[torch.Tensor] = []
        self._parts: dict[tuple[int, int], torch.Tensor] = {}  # of the buffers, by buffer and member
        self._events: list[Any] = []
        self._order: list[tuple[int, int]] = []
        self._next = 0

    def host_bytes(self) -> int:
        """Of the buffer as it is now."""
        return self._arena.num_bytes if self._arena is not None else 0

    def begin(self, hidden: Sequence[torch.Tensor], num_layers: int) -> None:
        """Room for `num_layers` times these tensors."""
        shapes = [(h.shape, h.dtype) for h in hidden]
        if shapes != self._shapes:
            self._views = {}
        self._shapes = shapes
        sizes = [h.numel() * h.element_size() for h in hidden]
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._layer_bytes, self._num_layers = sum(sizes), num_layers
        if self._stream is not None:
            self._compute = torch.cuda.current_stream(self.device)
        self._leaving.clear()
        self.end()
        needed = self._layer_bytes * num_layers
        if self.device.type != "meta" and self.host_bytes() < needed:
            if self._stream is not None:
                self._stream.synchronize()
            size = max(needed, self.host_bytes() * 5 // 4)  # longer rows may come: not pinned again for each of them
            self._views = {}
            self._arena = None  # let go before the larger one is made
            self._arena = HostBuffer(size, self.device.type == "cuda")

    def _host(self, layer: int, member: int) -> torch.Tensor:
        view = self._views.get((layer, member))
        if view is None:
            assert self._arena is not None
            shape, dtype = self._shapes[member]
            start = layer * self._layer_bytes + self._offsets[member]
            view = self._arena.tensor[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            self._views[layer, member] = view
        return view

    def put(self, layer: int, member: int, hidden: torch.Tensor) -> None:
        """Send a layer's input away. It stays on the device while its layer runs, until the next `put`."""
        if self.device.type == "meta":
            self._leaving.append((hidden, None))
        elif self._stream is None:
            self._host(layer, member).copy_(hidden)
        else:
            self._leaving.append((hidden, self._copied(self._host(layer, member), hidden)))
        while len(self._leaving) > 1:
            self._let_go()

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy after everything that has been submitted; the event after which it is over. (Written out: `with
        torch.cuda.stream` and new events take the host longer than the copy does.)"""
        event = self._free_events.pop() if self._free_events else torch.cuda.Event()
        self._now.record(self._compute)
        self._stream.wait_event(self._now)
        torch.cuda.set_stream(self._stream)
        try:
            target.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(self._compute)
        event.record(self._stream)
        return event

    def _wait(self, event: Any) -> None:
        """The computing stream waits; the event may be recorded again for another copy then."""
        self._compute.wait_event(event)
        self._free_events.append(event)

    def _let_go(self) -> None:
        _, event = self._leaving.popleft()
        if event is not None:  # its memory may be used again only after the copy
            self._wait(event)

    def turn(self) -> None:
        """Forward is over: the device buffers are made and the first input is fetched."""
        while self._leaving:
            self._let_go()
        members = range(len(self._shapes))
        self._order = [(layer, member) for layer in reversed(range(self._num_layers)) for member in members]
        self._next = 0
        self.end()
        largest = max((shape.numel() * dtype.itemsize for shape, dtype in self._shapes), default=0)
        count = min(2, len(self._order))
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self.device) for _ in range(count)]
        self._events = [None] * count
        if self._order:
            self._fetch(0)

    def _on_device(self, number: int) -> torch.Tensor:
        member = self._order[number][1]
        part = self._parts.get((number % 2, member))
        if part is None:
            shape, dtype = self._shapes[member]
            part = self._buffers[number % 2][: shape.numel() * dtype.itemsize].view(dtype).view(shape)
            self._parts[number % 2, member] = part
        return part

    def _fetch(self, number: int) -> None:
        if self.device.type == "meta":
            return
        target, source = self._on_device(number), self._host(*self._order[number])
        if self._stream is None:
            target.copy_(source)
            return
        self._events[number % 2] = self._copied(target, source)  # what used this buffer before has been submitted

    def take(self, layer: int, member: int) -> torch.Tensor:
        """A layer's input, on the device again until the second `take` from here."""
        number = self._next
        assert self._order[number] == (layer, member), f"layer {layer} of {member} is not due"
        if self._events[number % 2] is not None:
            self._wait(self._events[number % 2])
            self._events[number % 2] = None
        self._next += 1
        if self._next < len(self._order):
            self._fetch(self._next)
        return self._on_device(number)

    def end(self) -> None:
        """Let the device buffers go."""
        self._parts = {}
        self._buffers = []
