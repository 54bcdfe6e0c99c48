"""Ctrl-C and SIGTERM ask a run to stop at the next step; a second one stops it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType

from fitune.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

EXIT_CODES = {"interrupted": EXIT_INTERRUPTED, "terminated": EXIT_TERMINATED}
_HEARD = b"\nstopping: this step is finished and saved first (Ctrl-C again stops at once)\n"


class Stopped(Exception):
    """A stop was asked for while there was nothing to save yet. `status` says by what."""

    def __init__(self, status: str):
        self.status = status
        super().__init__(status)


class StopSignals:
    """While entered, notes the first SIGINT or SIGTERM in `requested`; the second one acts as it always does.

    Outside the main thread nothing is installed (Python delivers signals there only), and a signal that the process was
    told to ignore (`nohup`, a background job of a shell) stays ignored.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()

    def check(self) -> None:
        """Raises `Stopped` when a stop was asked for."""
        if self.requested is not None:
            raise Stopped(self.requested)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = "interrupted" if number == signal.SIGINT else "terminated"
        self._restore()
        with contextlib.suppress(OSError):  # past Python's buffers: the handler may run in the middle of a print
            os.write(2, _HEARD)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}
