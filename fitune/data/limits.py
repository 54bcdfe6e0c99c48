"""Bounds for a piece of Python that somebody else wrote: a chat template is a program that came with a model."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fitune.units import GIB

# No template that is meant to be used comes near: rendering takes milliseconds and a few times the conversation's size.
RENDER_CPU_S = 10.0
RENDER_BYTES = 2 * GIB
_STATM = Path("/proc/self/statm")


class TooMuch(Exception):
    """More time or memory than allowed; the text says which."""


class _TimeIsUp(BaseException):
    """Not an `Exception`, which Jinja's optimizer takes for an expression that it cannot compute beforehand."""


@contextlib.contextmanager
def bounded(cpu_s: float, num_bytes: int) -> Iterator[None]:
    """Run the block with at most `cpu_s` seconds of processor time and `num_bytes` of new memory.

    Time is limited in the main thread of a POSIX system (a signal interrupts the block), memory on Linux (the limit of
    the address space is lowered meanwhile, see setrlimit(2); it holds for all threads).

    Raises:
        TooMuch: it took more.
    """
    try:
        with _memory(num_bytes), _time(cpu_s):
            yield
    except _TimeIsUp:
        raise TooMuch(f"it takes longer than {cpu_s:g} s") from None
    except MemoryError:
        raise TooMuch(f"it needs more than {num_bytes / GIB:g} GiB of memory") from None


@contextlib.contextmanager
def _memory(num_bytes: int) -> Iterator[None]:
    try:
        import resource

        pages = int(_STATM.read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):  # not Linux
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + num_bytes
    if resource.RLIM_INFINITY != soft <= limit:
        yield
        return
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def _time(cpu_s: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: Any) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
