"""Writes checkpoints behind the training's back: a copy in host RAM, one writer, the next save waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fitune.errors import UserError
from fitune.hardware.host import memory
from fitune.train import checkpoint
from fitune.train.oom import classify

# The copy may take this share of the RAM that is free; else the state itself is written and training waits.
COPY_SHARE = 0.25
State = tuple[dict[str, torch.Tensor], dict[str, Any]]


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

    Attributes:
        frugal: every one is written at once, without a copy in RAM.
    """

    def __init__(self, folder: Path, keep: int, *, ram_bytes: int | None = None):
        self.folder, self.keep, self.frugal, self.ram_bytes = folder, keep, False, ram_bytes
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
        """What was finished since the last call. Raises the UserError of one that could not be written."""
        finished: list[Saved] = []
        while True:
            try:
                found = self._done.get_nowait()
            except queue.Empty:
                return finished
            if isinstance(found, BaseException):
                raise found
            finished.append(found)

    def wait(self) -> list[Saved]:
        """As `poll`, after the writer has finished."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.poll()

    def _copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """The tensors in memory of their own, or None where that would not leave enough for others."""
        needed = sum(t.numel() * t.element_size() for t in tensors.values())
        if needed > COPY_SHARE * self._free_bytes():
            return None
        try:
            return {name: tensor.clone() for name, tensor in tensors.items()}
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
        tensors: dict[str, torch.Tensor],
        values: dict[str, Any],
        started: float,
        blocked_s: float | None,
    ) -> None:
        try:
            path, num_bytes = checkpoint.save(self.folder, step, tensors, values, self.keep)
            seconds = time.perf_counter() - started
            self._done.put(Saved(step, path, num_bytes, seconds, seconds if blocked_s is None else blocked_s))
        except (UserError, OSError, RuntimeError, MemoryError) as problem:  # told by the next call of the owner
            self._done.put(problem)
