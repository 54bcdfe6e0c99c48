"""A thread that brings bytes from pageable memory or a disk to the device, through two small pinned buffers.

The driver can copy on its own only from pinned memory. Here the thread fills one pinned buffer while the other is on
its way; the computation goes on meanwhile (reading and copying release Python's lock).
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fitune.engine.link import LinkMeter
from fitune.model.host import HostBuffer

# Two of these are pinned. Small enough for the tightest caps (WSL 2 in Docker: 512 MiB in all), large enough that the
# link's latency does not show.
STAGING_BYTES = 32 * 2**20

ReadInto = Callable[[int, torch.Tensor], None]
"""Fills a flat uint8 CPU tensor with an item's bytes from a start on."""


@dataclass
class Ticket:
    """A fetch that the thread has been asked for."""

    target: torch.Tensor
    read_into: ReadInto
    free: Any  # CUDA event after which `target` may be overwritten
    ready: Any  # CUDA event that the thread records after the last copy
    meter: LinkMeter
    before: Callable[[], None] | None = None  # waits until the bytes are what they should be
    pinned: torch.Tensor | None = None  # the bytes in pinned memory: copied from there
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def wait(self) -> None:
        """Until the thread has submitted everything; on CUDA `ready` is recorded then.

        Raises:
            OSError, RuntimeError: what the thread met.
        """
        self.done.wait()
        if self.error is not None:
            raise self.error


class Feeder:
    """The thread starts with the first `submit` and ends with `close`, or when nobody holds this object."""

    def __init__(self, device: torch.device, stream: Any):
        self._device, self._stream = device, stream
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, ticket: Ticket) -> Ticket:
        """Ask for a ticket's `target` (flat uint8 on the device) to be filled. Tickets are served in order."""
        if self._thread is None:
            arguments = (self._queue, self._device, self._stream)
            self._thread = threading.Thread(target=_serve, args=arguments, name="weights ahead", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        self._queue.put(ticket)
        return ticket

    def close(self) -> None:
        """End the thread once it has served what was asked for."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


def _serve(waiting: queue.SimpleQueue[Ticket | None], device: torch.device, stream: Any) -> None:
    staging = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        staging = [(HostBuffer(STAGING_BYTES, pin=True), torch.cuda.Event()) for _ in range(2)]
    while (ticket := waiting.get()) is not None:
        try:
            if ticket.before is not None:
                ticket.before()
            if staging is None:
                with ticket.meter.copying(ticket.target.numel()):
                    ticket.read_into(0, ticket.target)
            elif ticket.pinned is not None:
                _directly(ticket, stream)
            else:
                _through(staging, ticket, stream)
        except (OSError, RuntimeError, MemoryError) as error:  # handed to whoever waits for the ticket
            ticket.error = error
        ticket.done.set()
        del ticket


def _directly(ticket: Ticket, stream: Any) -> None:
    assert ticket.pinned is not None
    with torch.cuda.stream(stream):
        stream.wait_event(ticket.free)
        with ticket.meter.copying(ticket.target.numel(), stream):
            ticket.target.copy_(ticket.pinned, non_blocking=True)
        ticket.ready.record(stream)


def _through(staging: list[tuple[HostBuffer, Any]], ticket: Ticket, stream: Any) -> None:
    total = ticket.target.numel()
    with torch.cuda.stream(stream):
        stream.wait_event(ticket.free)
        with ticket.meter.copying(total, stream):
            for number, start in enumerate(range(0, total, STAGING_BYTES)):
                buffer, copied = staging[number % 2]
                count = min(STAGING_BYTES, total - start)
                copied.synchronize()
                ticket.read_into(start, buffer.tensor[:count])
                ticket.target[start : start + count].copy_(buffer.tensor[:count], non_blocking=True)
                copied.record(stream)
        ticket.ready.record(stream)
