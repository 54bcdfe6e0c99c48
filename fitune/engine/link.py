"""How much crossed the link between host and device, how fast, and how long the computation waited for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_MOST_PAIRS = 4096  # events in flight before their times are added up


@dataclass(frozen=True)
class LinkStats:
    """Of one step. `copy_s` is the time copies of weights took, `wait_s` how long the computation stood still for
    them; `bytes_moved` are the weights' bytes, host to device; gradients, masters and state are not counted."""

    bytes_moved: int
    copy_s: float
    wait_s: float

    @property
    def link_bytes_per_s(self) -> float | None:
        """The speed that copies reached; None where nothing was moved."""
        return self.bytes_moved / self.copy_s if self.copy_s > 0 else None

    def wait_share(self, step_s: float) -> float:
        """Part of a step's time spent waiting."""
        return self.wait_s / step_s if step_s > 0 else 0.0


class LinkMeter:
    """Collects during a step; on CUDA with events on the streams, so that measuring makes nothing wait."""

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._device = device
        self._bytes = 0
        self._seconds = {"copy": 0.0, "wait": 0.0}
        self._pairs: list[tuple[str, Any, Any]] = []
        self._spare: list[Any] = []
        self._lock = threading.Lock()  # the thread that reads ahead measures too

    @contextmanager
    def copying(self, num_bytes: int, stream: Any = None) -> Iterator[None]:
        """Around one copy; on CUDA around its submission to `stream`, after whatever it waits for."""
        begin = self.begin(stream)
        yield
        self.end("copy", begin, stream, num_bytes)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the computing stream's wait for a copy."""
        stream = torch.cuda.current_stream(self._device) if self._on_cuda else None
        begin = self.begin(stream)
        yield
        self.end("wait", begin, stream)

    def begin(self, stream: Any = None) -> Any:
        """Now, or when `stream` comes to here; for `end`."""
        if not self._on_cuda:
            return time.perf_counter()
        begin = self._event()
        begin.record(stream)
        return begin

    def end(self, kind: str, begin: Any, stream: Any = None, num_bytes: int = 0) -> None:
        """What began ("copy" or "wait") is over here."""
        if not self._on_cuda:
            with self._lock:
                self._bytes += num_bytes
                self._seconds[kind] += time.perf_counter() - begin
            return
        end = self._event()
        end.record(stream)
        with self._lock:
            self._bytes += num_bytes
            self._pairs.append((kind, begin, end))
            if len(self._pairs) > _MOST_PAIRS:  # nobody has asked for a long time: generation
                self._fold()

    def _event(self) -> Any:
        try:
            return self._spare.pop()  # one step, whichever thread asks
        except IndexError:
            return torch.cuda.Event(enable_timing=True)

    def take(self) -> LinkStats:
        """The sums since the last call. The caller has synchronised with the computing stream; copies that run ahead
        for the next step are left for the next call."""
        with self._lock:
            self._fold()
            stats = LinkStats(self._bytes, self._seconds["copy"], self._seconds["wait"])
            self._bytes, self._seconds = 0, {"copy": 0.0, "wait": 0.0}
        return stats

    def _fold(self) -> None:
        """Add up what is over."""
        pending = []
        for kind, begin, end in self._pairs:
            if not end.query():
                pending.append((kind, begin, end))
                continue
            self._seconds[kind] += begin.elapsed_time(end) / 1e3
            self._spare += [begin, end]
        self._pairs = pending
