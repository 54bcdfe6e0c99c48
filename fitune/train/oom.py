"""Memory that ran out, in every wording it has: which memory it was, and whether the process can go on using the GPU.

The wordings are those of torch's c10 and aten (2.1 to 2.13), the status names of cuBLAS and cuDNN, NCCL's warnings and
its watchdog, and the error macros of bitsandbytes' CUDA code. Nothing here imports torch: the supervisor asks too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DEVICE, HOST, PINNED = "device", "host", "pinned"
PEER = "peer"  # another rank: its own failure is not known here
LOST = "lost"  # no memory: the device does not answer any more
PLACES = {DEVICE: "GPU memory", HOST: "host memory", PINNED: "pinned host memory", PEER: "memory on another rank"}


@dataclass(frozen=True)
class MemoryFailure:
    """Memory ran out.

    Attributes:
        where: ``device``, ``host``, ``pinned``, ``peer`` (another rank failed or hangs) or ``lost`` (the device does
            not answer any more, and memory is not why).
        source: who said so: torch, driver, cublas, cudnn, nccl, bitsandbytes, pinned, cpu, python, kernel, rank.
        line: its own words, one line.
        fatal: the process cannot go on with this device (a broken communicator, a library that ended the process).
        untold: the other ranks could not be told.
        rank: of several, whose failure it is; None where nobody knows.
    """

    where: str
    source: str
    line: str
    fatal: bool = False
    untold: bool = False
    rank: int | None = field(default=None, compare=False)


# (source, where, fatal, pattern), the first match wins. All are searched in lower case, line by line.
_FORMS: tuple[tuple[str, str, bool, re.Pattern[str]], ...] = tuple(
    (source, where, fatal, re.compile(pattern))
    for source, where, fatal, pattern in (
        ("bitsandbytes", DEVICE, True, r"^error out of memory at line \d+ in file .*(pythoninterface|ops\.cu)"),
        ("nccl", DEVICE, True, r"nccl error.*out of memory|cuda failure (2 )?'out of memory'"),
        ("rank", PEER, True, r"watchdog caught collective operation timeout|watchdog thread terminated with exception"),
        ("rank", PEER, True, r"timed out waiting .*(recv|send|operation)|connection (closed|reset) by peer"),
        ("rank", PEER, True, r"\bncclremoteerror\b|some nccl operations have failed"),
        ("rank", PEER, True, r"gloo.*(timed? ?out|connection|broken pipe)"),
        ("pinned", PINNED, False, r"cudahost(alloc|register)|cumemhost(alloc|register)|cannot pin|pin_memory.*out of"),
        ("cublas", DEVICE, False, r"cublas_status_alloc_failed"),
        ("cublas", DEVICE, False, r"cublas_status_not_initialized.*(create|alloc)|(hip|roc)blas_status_alloc_failed"),
        ("cublas", DEVICE, False, r"rocblas_status_memory_error|cu(solver|sparse)_status_alloc_failed"),
        ("cudnn", DEVICE, False, r"cudnn_status_alloc_failed|miopenstatusallocfailed"),
        ("torch", DEVICE, False, r"(cuda|hip|xpu|mps|mps backend) out of memory"),
        ("torch", DEVICE, False, r"^allocation on device \d+ would exceed allowed memory"),
        ("driver", DEVICE, False, r"(cuda|hip)( driver)? error:? ?(2, )?out of memory|cudaerrormemoryallocation"),
        ("driver", DEVICE, False, r"cuda_error_out_of_memory|hiperroroutofmemory|cumem(create|map).*out of memory"),
        ("driver", DEVICE, False, r"triton error \[(cuda|hip)\]: out of memory"),
        ("kernel", HOST, False, r"out of memory: killed process \d+|oom-kill:constraint|memory cgroup out of memory"),
        ("kernel", HOST, False, r"detected \d+ oom[-_]kill event|oomkilled"),
        ("cpu", HOST, False, r"defaultcpuallocator: (can't|not enough)|not enough memory: you tried to allocate"),
        ("cpu", HOST, False, r"unable to allocate .*(gib|mib|kib|bytes) for an array|std::bad_alloc"),
        ("cpu", HOST, False, r"cannot allocate memory|unable to mmap \d+ bytes|\benomem\b"),
        ("python", HOST, False, r"^(numpy.*)?memoryerror\b"),
    )
)
# torch's own exceptions by name, so that they are known without importing it. AcceleratorError (torch >= 2.9) is every
# error of the driver: only its text says which.
_TORCH_OOM = "OutOfMemoryError"


def classify(problem: BaseException) -> MemoryFailure | None:
    """What an exception says about memory, its causes included; None when it is about something else."""
    for error in _chain(problem):
        line = next((part.strip() for part in str(error).splitlines() if part.strip()), type(error).__name__)
        names = {kind.__name__ for kind in type(error).__mro__}
        if "1eb memory" in str(error).lower():
            return None  # a nonsensical size: a bug, which no smaller plan mends
        found = classify_text(str(error)) if isinstance(error, (RuntimeError, OSError, ValueError)) else None
        if found is not None:
            return found
        if _TORCH_OOM in names:
            return MemoryFailure(DEVICE, "torch", line)
        if isinstance(error, MemoryError):
            return MemoryFailure(HOST, "python", line)
    return None


def classify_text(text: str) -> MemoryFailure | None:
    """What a program's messages say about memory: the last line that says something decides, where one rank says what
    happened and others that it is gone, the one that knows."""
    if "1EB memory" in text:
        return None
    peer = None
    for raw in reversed(text.splitlines()):
        line = re.sub(r"^(error|why): ", "", raw.strip())  # as `UserError` is printed
        lower = re.sub(r"^[\w.]+(error|exception): ", "", line.lower())
        for source, where, fatal, pattern in _FORMS:
            if pattern.search(lower) or pattern.search(line.lower()):
                found = MemoryFailure(where, source, line[:300], fatal)
                if where != PEER:
                    return found
                peer = peer or found
                break
    return peer


def _chain(problem: BaseException) -> Iterator[BaseException]:
    """The exception and what raised it, at most eight deep."""
    error: BaseException | None = problem
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__


# ---- the kernel's own count of processes that it killed for memory ---------------------------------------------------


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel has killed for memory, as far as this process may know; None where it says nothing.

    The counts of this process' control group (version 2: ``memory.events``, version 1: ``memory.oom_control``; Linux
    documentation, "cgroup-v2" and "cgroup-v1/memory") and of the whole machine (``/proc/vmstat``) are added: only the
    difference between two calls means something.
    """
    counts = [_count(path, "oom_kill") for path in _counters(root)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _counters(root: Path) -> list[Path]:
    groups = root / "sys/fs/cgroup"
    paths = [root / "proc/vmstat"]
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        inside = group.strip().lstrip("/")
        if number == "0" and not controllers:
            paths += _nearest(groups, inside, "memory.events")
        elif "memory" in controllers.split(","):
            paths += _nearest(groups / "memory", inside, "memory.oom_control")
    return paths


def _nearest(base: Path, inside: str, name: str) -> list[Path]:
    """The file of this group, or of the mounted root (in a container the group's path is the host's)."""
    return [path for path in (base / inside / name, base / name) if path.is_file()][:1]


def _count(path: Path, key: str) -> int | None:
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
