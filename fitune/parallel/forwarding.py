"""Signals that a process passes on to those it has started. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP")
Handler = Callable[[int, Any], None]


@contextmanager
def handled(handlers: Mapping[str, Handler]) -> Iterator[None]:
    """Inside, signals go to these handlers, by their names.

    One that this system does not have is left out, one that this process was told to ignore stays ignored (in its
    children too), and outside the main thread nothing is installed: Python delivers signals there only.
    """
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name, handler in handlers.items():
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def signal_name(number: int) -> str:
    """`SIGKILL` of 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
