"""Writes checkpoints behind the training's back: one copy in host RAM, one writer, the next save waits for it.

With several ranks each has a saver. State that is whole on the first rank is written by that one; where each has a
share (`Parts`), all write, and meet in a group of their own, which the exchanges of the training do not disturb.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.hardware.host import memory
from fitune.parallel.slices import Gathered, Parts, Slice
from fitune.parallel.world import Single
from fitune.train import checkpoint
from fitune.train.checkpoint import Tensors
from fitune.train.oom import classify

if TYPE_CHECKING:
    import torch

# The copy may take this share of the RAM that is free; else the state itself is written and training waits.
COPY_SHARE = 0.25
State = tuple[Tensors, dict[str, Any]]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on the disk. `blocked_s` is how long training stood still for it."""

    step: int
    path: Path
    num_bytes: int
    seconds: float
    blocked_s: float


class Saver:
    """Saves a run's checkpoints.

    Args:
        folder: of the checkpoints.
        keep: how many of the newest stay.
        ram_bytes: most host memory that this process may use, where the person set a limit.
        group: the ranks of the run. Only the first one's saver tells what has gone wrong, on any of them.

    Attributes:
        frugal: every one is written at once, without a copy in RAM.
    """

    def __init__(self, folder: Path, keep: int, *, ram_bytes: int | None = None, group: Single | None = None):
        self.folder, self.keep, self.frugal, self.ram_bytes = folder, keep, False, ram_bytes
        self._group = group or Single()
        self._writers: Single | None = None  # the ranks' group for writing, made when it is needed first
        self._thread: threading.Thread | None = None
        self._done: queue.SimpleQueue[Saved | BaseException] = queue.SimpleQueue()

    def save(self, step: int, state: Callable[[], State], *, at_once: bool = False) -> list[Saved]:
        """Save the state that `state` gives; it may change as soon as this returns.

        Returns:
            What has been finished meanwhile, this one too when it was written at once.
        Raises:
            UserError: this one (or an earlier one in the background) cannot be written.
        """
        started = time.perf_counter()
        finished = self.wait()
        tensors, values = state()
        if isinstance(tensors, Parts):
            self._writers = self._writers or self._group.apart()
        elif not self._group.is_leader:
            return finished
        copy = None if at_once or self.frugal else self._copy(tensors)
        if copy is None:
            self._write(step, tensors, values, started, None)
            return finished + self.poll()
        blocked_s = time.perf_counter() - started
        work = (step, copy, values, started, blocked_s)
        self._thread = threading.Thread(target=self._write, args=work, name="checkpoint writer", daemon=True)
        self._thread.start()
        return finished

    def poll(self) -> list[Saved]:
        """What was finished since the last call. Raises what kept one from being written: a UserError, or a
        RuntimeError where another rank is gone."""
        finished: list[Saved] = []
        while True:
            try:
                found = self._done.get_nowait()
            except queue.Empty:
                return finished
            if not isinstance(found, BaseException):
                finished.append(found)
            elif self._group.is_leader:
                raise found

    def wait(self) -> list[Saved]:
        """As `poll`, after the writer has finished."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.poll()

    def _copy(self, tensors: Tensors) -> Tensors | None:
        """The tensors in host memory of their own, or None where that would not leave enough for others. From a device
        they come there once; what was gathered for this is such a copy already."""
        in_parts = isinstance(tensors, Parts)
        share = COPY_SHARE / (self._group.local_size if in_parts else 1)
        if checkpoint.num_bytes(tensors) > share * self._free_bytes():
            return None
        if isinstance(tensors, Gathered):
            return tensors
        try:
            copies = {
                name: replace(tensor, part=_host_copy(tensor.part)) if isinstance(tensor, Slice) else _host_copy(tensor)
                for name, tensor in tensors.items()
            }
            return Parts(copies) if in_parts else copies
        except (RuntimeError, MemoryError) as problem:
            if classify(problem) is None:
                raise
            self.frugal = True
            return None

    def _free_bytes(self) -> int:
        free = memory(Path("/")).available_bytes
        if self.ram_bytes is None:
            return free
        import psutil

        return min(free, max(0, self.ram_bytes - psutil.Process().memory_info().rss))

    def _write(
        self,
        step: int,
        tensors: Tensors,
        values: dict[str, Any],
        started: float,
        blocked_s: float | None,
    ) -> None:
        try:
            group = self._writers if isinstance(tensors, Parts) else None
            path, num_bytes = checkpoint.save(self.folder, step, tensors, values, self.keep, group)
            seconds = time.perf_counter() - started
            self._done.put(Saved(step, path, num_bytes, seconds, seconds if blocked_s is None else blocked_s))
        except Exception as problem:  # noqa: BLE001 not silenced: raised by the owner's next call
            self._done.put(problem)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)
