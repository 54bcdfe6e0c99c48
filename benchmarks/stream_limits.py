"""What a case of `stream.py` is kept to: so much host memory, a slower link."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench import GIB

_GROUPS = Path("/sys/fs/cgroup")


def leave_ram(num_bytes: int, *, fill: bool = True) -> str:
    """Leave this process so much host memory; says how, or why it has all of it still.

    In a control group of its own where one can be made (its page cache counts too); else another process takes up the
    rest, locked where the system allows that.

    Args:
        fill: whether another process may take up the rest.
    """
    problems = []
    for folder, limit in _own_groups():
        group = folder / f"stream-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(num_bytes))
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        return f"control group of {num_bytes / GIB:.1f} GiB"
    why = "; ".join(problems) or "no control groups of memory here"
    return f"{_taken_up(num_bytes)} (no control group: {why})" if fill else f"not limited (no control group: {why})"


def sweep() -> None:
    """Remove the control groups of processes that have ended."""
    for folder, _ in _own_groups():
        for group in folder.glob("stream-*"):
            with contextlib.suppress(OSError):  # one that still has a process
                group.rmdir()


def _own_groups() -> list[tuple[Path, str]]:
    """Folders in which this process may make a control group of memory, and the name of the limit's file (versions 1
    and 2 of control groups)."""
    with contextlib.suppress(OSError):
        text = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        found = []
        if old := re.search(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(.*)$", text, re.M):
            for own in (
                _GROUPS / "memory" / old[1].strip("/"),
                _GROUPS / "memory",
            ):  # a container sees its own as the root
                if (own / "memory.limit_in_bytes").is_file():
                    found.append((own, "memory.limit_in_bytes"))
                    break
        if new := re.search(r"^0::(.*)$", text, re.M):
            own = _GROUPS / new[1].strip("/")
            # A group with processes may not hand memory down to groups in it, but its parent may.
            found += [(folder, "memory.max") for folder in (own, own.parent) if _hands_memory_down(folder)]
        return found
    return []


def _hands_memory_down(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return "memory" in (folder / "cgroup.subtree_control").read_text(encoding="utf-8").split()
    return False


def _taken_up(left_bytes: int) -> str:
    import mmap
    import threading

    from fitune.hardware.host import memory as host_memory

    taken = host_memory(Path("/")).available_bytes - left_bytes
    if taken <= 0:
        return "there is no more"
    ready, told = os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        Path("/proc/self/oom_score_adj").write_text("1000")  # the first to be killed if memory runs out
        part = -(-taken // 16 // mmap.PAGESIZE) * mmap.PAGESIZE
        rooms = [mmap.mmap(-1, part) for _ in range(16)]
        fill = [threading.Thread(target=_touch, args=(room,)) for room in rooms]
        for thread in fill:
            thread.start()
        for thread in fill:
            thread.join()
        os.write(told, b"l" if all(map(_locked, rooms)) else b"u")
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(0)
    os.close(told)
    answer = os.read(ready, 1)
    os.close(ready)
    if not answer:
        return "not limited: the process that was to hold the rest has died"
    locked = "" if answer == b"l" else ", not locked: it may be swapped out"
    return f"another process holds {taken / GIB:.0f} GiB{locked}"


def _touch(room: Any) -> None:
    view = np.frombuffer(room, np.uint8)
    for start in range(0, len(view), 2**28):  # numpy lets other threads run meanwhile
        view[start : start + 2**28] = 1


def _locked(room: Any) -> bool:
    """Keep a mapping in memory; whether the system allows it (root, or RLIMIT_MEMLOCK)."""
    begin = ctypes.addressof(ctypes.c_char.from_buffer(room))
    return ctypes.CDLL(None).mlock(ctypes.c_void_p(begin), ctypes.c_size_t(len(room))) == 0


def throttle(ring: Any, bytes_per_s: float) -> None:
    """Make the link as slow as another machine's: after each copy its stream sleeps for the rest of the time that the
    copy would take there. (The recorded link speed stays that of the copies themselves.)"""
    import torch

    fetch = ring._fetch
    cycles_per_s = _clock()
    own = _copy_speed(ring)

    def slow(item: Any, slot: Any) -> None:
        fetch(item, slot)
        num_bytes = ring._origin(item).num_bytes
        missing_s = num_bytes / bytes_per_s - num_bytes / own
        with torch.cuda.stream(ring._stream):
            torch.cuda._sleep(int(max(0.0, missing_s) * cycles_per_s))
        slot.ready.record(ring._stream)

    ring._fetch = slow


def _clock() -> float:
    """Cycles per second of `torch.cuda._sleep`."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        torch.cuda._sleep(100_000_000)
        end.record()
        torch.cuda.synchronize()
    return 100_000_000 / (begin.elapsed_time(end) / 1e3)


def _copy_speed(ring: Any) -> float:
    """Bytes per second of the real link, from one layer's copy."""
    import torch

    buffer = ring.streamed.backing.flat(next(iter(ring.streamed.layouts))).tensor
    target = ring.slots[0].buffer[: buffer.numel()]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        begin.record()
        target.copy_(buffer, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
    return buffer.numel() / (begin.elapsed_time(end) / 1e3)
