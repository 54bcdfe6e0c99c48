"""Ctrl-C, SIGTERM and a closed terminal ask a run to save and stop; a second one stops it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType, TracebackType

from fitune.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

EXIT_CODES = {"interrupted": EXIT_INTERRUPTED, "terminated": EXIT_TERMINATED}
# What a scheduler or a cloud gives between SIGTERM and SIGKILL is often 10 s (docker stop) to 30 s (Kubernetes, spot
# instances). A step that would not be over after this share of the shortest is given up: the resumed run repeats it.
GRACE_S = 10.0
STEP_SHARE = 0.4
_HEARD = b"\nstopping: this step is finished and saved first (Ctrl-C again stops at once)\n"
_HEARD_HANGUP = b"\nthe terminal was closed: saving and stopping\n"


class Stopped(Exception):
    """A stop was asked for while there was nothing to save yet. `status` says by what."""

    def __init__(self, status: str):
        self.status = status
        super().__init__(status)


class StepGivenUp(Exception):
    """A stop was asked for, and the step in work would take too long: it is dropped, as if it had not begun."""


class StopSignals:
    """While entered, notes the first SIGINT, SIGTERM or SIGHUP in `requested`; the second acts as it always does.

    Outside the main thread nothing is installed (Python delivers signals there only), and a signal that the process was
    told to ignore (`nohup`, a background job of a shell) stays ignored.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self.requested_at = 0.0  # time.monotonic()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
            for number in numbers:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()

    def sync(self) -> None:
        """Called where all ranks of a run are at the same place (`fitune.train.ranks.SharedStop`)."""

    def check(self) -> None:
        """Raises `Stopped` when a stop was asked for."""
        if self.requested is not None:
            raise Stopped(self.requested)

    def check_step(self, started: float, usual_s: float | None) -> None:
        """Raises `StepGivenUp` when the process is being ended and this step would take too much of the grace.

        Ctrl-C waits for the step: nobody kills the process after it.

        Args:
            started: when the step began, as `time.monotonic()`.
            usual_s: how long a step takes; None when none has been done.
        """
        if self.requested != "terminated":
            return
        now = time.monotonic()
        left_s = float("inf") if usual_s is None else max(0.0, started + usual_s - now)
        if now - self.requested_at + left_s > STEP_SHARE * GRACE_S:
            raise StepGivenUp

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = "interrupted" if number == signal.SIGINT else "terminated"
        self.requested_at = time.monotonic()
        hangup = hasattr(signal, "SIGHUP") and number == signal.SIGHUP
        self._restore()
        if hangup:  # it often comes twice, and a SIGCONT or SIGTERM with it: only a SIGTERM ends the process now
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # past Python's buffers: the handler may run in the middle of a print
            os.write(2, _HEARD_HANGUP if hangup else _HEARD)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}
