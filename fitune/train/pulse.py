"""Signs of life: a training that hangs is told apart from one that takes its time.

The worker gives a sign with every part of a step, every weight that is loaded, every piece of an evaluation and every
token of an answer; where it knows beforehand that it will be silent for long (a large checkpoint on a slow disk) it
says so. The supervisor ends a worker whose silence is far longer than anything it has seen or was told of.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# Generous: what is ended too early is lost, what is ended late only waited. Compiling kernels, the first use of a card
# that others hold, and a large optimizer on the CPU are silent for minutes.
LEAST_S = 1800.0
TIMES = 20  # of the longest silence so far, or of a step as the plan expects it
EVERY_S = 1.0  # a sign at most this often
SLOW_DISK_BYTES_PER_S = 20e6  # a network folder at its worst
BEAT = "beat"


class Pulse:
    """The worker's side: call it where something has been done.

    Args:
        tell: takes the event (``{"event": "beat"}``, with ``expected_s`` where a silence was announced).
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None]):
        self._tell = tell
        self._last = float("-inf")

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last >= EVERY_S:
            self._last = now
            self._tell({"event": BEAT})

    def expect_s(self, seconds: float) -> None:
        """A silence of this length will be nothing unusual."""
        self._tell({"event": BEAT, "expected_s": round(seconds, 3)})

    def expect_write(self, num_bytes: int) -> None:
        """As `expect_s`, for writing so much to a disk."""
        self.expect_s(num_bytes / SLOW_DISK_BYTES_PER_S)


def nobody(event: dict[str, Any]) -> None:
    """Who hears the events of a run that nobody watches, and the pulse of one without a supervisor."""


class Patience:
    """The supervisor's side: how long a worker may be silent.

    It begins with the worker's first sign: what comes before (a download, say) is not watched.

    Args:
        least_s: never less than this.
        clock: seconds that do not pass while the machine sleeps.
    """

    def __init__(self, least_s: float = LEAST_S, clock: Callable[[], float] = time.monotonic):
        self.least_s, self._clock = least_s, clock
        self._heard_at: float | None = None
        self._longest_s = self._expected_s = 0.0

    def hear(self, event: dict[str, Any]) -> None:
        """Every event is a sign once there was a first `BEAT`."""
        now = self._clock()
        if self._heard_at is not None:
            self._longest_s = max(self._longest_s, now - self._heard_at)
        elif event.get("event") != BEAT:
            return
        self._heard_at = now
        self._expected_s = max(self._expected_s, float(event.get("expected_s") or 0.0))

    def forgive(self) -> None:
        """The silence until now was not the worker's (it was stopped by hand)."""
        if self._heard_at is not None:
            self._heard_at = self._clock()

    @property
    def allowed_s(self) -> float:
        return max(self.least_s, TIMES * self._longest_s, self._expected_s)

    @property
    def silent_s(self) -> float:
        """Since the last sign; 0 before the first."""
        return 0.0 if self._heard_at is None else self._clock() - self._heard_at

    @property
    def left_s(self) -> float | None:
        """Seconds until it is over; None before the first sign."""
        return None if self._heard_at is None else self.allowed_s - self.silent_s
