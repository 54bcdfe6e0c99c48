"""ZeRO's optimizer state on a local disk (ZeRO-Infinity, https://arxiv.org/abs/2104.07857): whether a machine can do
it, told before a model is loaded, and the folder whose files a run needs no longer than it lasts.

DeepSpeed (0.19) reads and writes with `async_io`, an extension in C++ that is compiled at its first use. It is compiled
into a folder of fitune's own, by one process at a time under a lock that the system drops when the process dies:
torch's own lock is a file that a killed compiler leaves behind, and whoever comes next waits for it forever.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fitune.engine.parts import state_bytes_per_parameter
from fitune.errors import UserError
from fitune.files import claim_scratch, clean_leftovers, file_error
from fitune.hardware.host import memlock_bytes
from fitune.parallel.world import Single, environment_with
from fitune.parallel.zero_config import DISK_BUFFERS, LEAST_ON_DISK_BYTES, sub_groups
from fitune.plan import Plan
from fitune.units import format_bytes

try:
    import fcntl
except ImportError:  # Windows, where it is refused
    fcntl = None  # type: ignore[assignment]

Tell = Callable[[str], None]
OP = "async_io"
OPTION = "--offload-optimizer nvme"
INSTEAD = "or use --offload-optimizer cpu"
COMPILES = (
    f"DeepSpeed's {OP}, with which {OPTION} reads and writes the disk, is compiled now: once in each environment, in "
    "several minutes (7 of processor time were seen)"
)
_MEMORY = ("tmpfs", "ramfs")
_NETWORK = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3")
_LOCKS_MEMORY = 1 << 14  # CAP_IPC_LOCK: no limit counts


def check_disk(plan: Plan, deepspeed: Any, tell: Tell) -> None:
    """Before a model is loaded.

    Raises:
        UserError: the folder cannot be used, or DeepSpeed's `async_io` cannot be had.
    """
    assert plan.offload_folder is not None, "a recipe without a folder is refused"
    check_folder(Path(plan.offload_folder), tell)
    load_async_io(deepspeed, tell)


# ---- the folder ------------------------------------------------------------------------------------------------------


def check_folder(folder: Path, tell: Tell) -> None:
    """Files of killed runs are removed; what is slow is told.

    Raises:
        UserError: it is not there, cannot be written to, or not past the system's cache.
    """
    what, fix = f"cannot keep optimizer state in {folder}", f"choose another --offload-folder, {INSTEAD}"
    if not folder.is_dir():
        why = "it is a file" if folder.exists() else "there is no such folder"
        raise UserError(
            what, why, f"make it (is its disk mounted?), {INSTEAD}; a run goes on with --parallel fsdp2 too"
        )
    probe = folder / f".fitune-probe-{os.getpid()}"
    try:
        clean_leftovers(folder)
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise UserError(what, file_error("write", folder, error).why, fix) from error
    try:
        os.close(os.open(probe, os.O_WRONLY | getattr(os, "O_DIRECT", 0)))
    except OSError as error:
        raise UserError(
            what, f"its file system ({_kind(folder) or 'unknown'}) cannot be written past the cache (O_DIRECT)", fix
        ) from error
    finally:
        probe.unlink(missing_ok=True)
    kind = _kind(folder)
    if kind in _MEMORY:
        tell(f"{folder} is in host memory ({kind}), not on a disk: what is offloaded there takes RAM")
    elif kind in _NETWORK:
        tell(f"{folder} is on a network disk ({kind}): every step reads and writes all masters and state there")


def _kind(folder: Path) -> str | None:
    """The file system's type; None where the system does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    places = [line.split(" ")[1:3] for line in lines]
    real = os.path.realpath(folder)
    under = [
        (len(place), i, kind) for i, (place, kind) in enumerate(places) if os.path.commonpath([real, place]) == place
    ]
    return max(under)[2] if under else None  # of those on one place the last one mounted


class Scratch:
    """A run's files on a node, in a hidden folder below the plan's; all ranks make it together. They are gone when this
    object or its process is; of killed processes the last one that ends well, or the next run there, removes them."""

    def __init__(self, folder: Path, group: Single):
        path, descriptor = claim_scratch(folder / "zero") if group.leads_node else (None, -1)
        self.path: Path = group.of_node(path)  # type: ignore[assignment]
        self.remove = weakref.finalize(self, _remove, self.path, descriptor)


def _remove(path: Path, descriptor: int) -> None:
    if descriptor >= 0:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)
    clean_leftovers(path.parent)


def check_room(plan: Plan, sizes: Sequence[int], group: Single) -> None:
    """Before DeepSpeed begins to write. All ranks call it, and all raise.

    Args:
        sizes: elements of the trained parameters, in their order.

    Raises:
        UserError: no room on a disk, too little memory may be locked, or nothing would be on the disk.
    """
    from fitune.parallel.start import shared_problem

    found = shared_problem(group, _no_room(plan, sizes, group))
    if found is not None:
        raise found


def _no_room(plan: Plan, sizes: Sequence[int], group: Single) -> UserError | None:
    groups = sub_groups([-(-size // group.size) for size in sizes])
    if max(groups) * 4 < LEAST_ON_DISK_BYTES:
        least = format_bytes(LEAST_ON_DISK_BYTES)
        return UserError(
            f"there is too little to offload with {OPTION}",
            f"each GPU has {format_bytes(max(groups) * 4)} of masters, and DeepSpeed leaves less than {least} in RAM",
            "use --offload-optimizer cpu",
        )
    folder = Path(plan.offload_folder or "")
    each = 4 + 4 + int(state_bytes_per_parameter(plan.optimizer))  # master, gradient, state
    needed = group.local_size * sum(groups) * each
    free = shutil.disk_usage(folder).free
    if needed > free:
        return UserError(f"not enough disk space in {folder}",
                         f"masters, gradients and optimizer state take {format_bytes(needed)}, "
                         f"{format_bytes(free)} are free", f"free some space, {INSTEAD}")  # fmt: skip
    locked, limit = DISK_BUFFERS * 4 * max(groups), lockable_bytes()
    if limit is not None and locked > limit:
        return UserError(f"{OPTION} may not lock enough memory",
                         f"its buffers are {format_bytes(locked)}, a process of yours may lock {format_bytes(limit)}",
                         f"raise the limit (`ulimit -l`, docker: --ulimit memlock=-1), {INSTEAD}")  # fmt: skip
    return None


def lockable_bytes() -> int | None:
    """How much memory this process may lock; None: as much as there is."""
    limit = memlock_bytes(Path("/"))
    if limit is None:
        return None
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        allowed = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    except OSError:
        return limit
    return None if int(allowed, 16) & _LOCKS_MEMORY else limit


# ---- DeepSpeed's extension -------------------------------------------------------------------------------------------


def build_folder() -> Path:
    """Where extensions are compiled: below torch's own folder for them. What they were compiled for is in the name, and
    where that is installed: with the headers of another environment ninja would compile all of it again."""
    import deepspeed
    import torch

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")  # as torch.utils.cpp_extension has it
    base = os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions"
    versions = f"torch{torch.__version__}-deepspeed{deepspeed.__version__}"
    places = hashlib.sha256(f"{torch.__file__}\n{deepspeed.__file__}".encode()).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return Path(base).absolute() / f"fitune-{versions}-{python}-{places}"


def is_compiled(folder: Path) -> bool:
    return (folder / OP / f"{OP}.so").is_file()


def load_async_io(deepspeed: Any, tell: Tell) -> None:
    """Have DeepSpeed's extension in this process; compile it where it is not.

    Raises:
        UserError: what it takes is not installed, or it cannot be compiled here.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException

    failures = (RuntimeError, ImportError, OSError, subprocess.SubprocessError, CUDAMismatchException,
                MissingCUDAException)  # fmt: skip
    builder = AsyncIOBuilder()
    folder = build_folder()
    with compiling_in(folder):
        if not deepspeed.git_version_info.installed_ops.get(OP):
            missing = missing_tool(builder)
            if missing is not None:
                raise missing
            if not is_compiled(folder):
                tell(COMPILES)
        try:
            with _alone(folder):
                builder.load(verbose=False)
        except failures as error:
            raise UserError(f"cannot use {OPTION}", f"DeepSpeed's {OP} cannot be compiled here: {_first_error(error)}",
                            f"see that g++ suits this torch, and remove {folder}; {INSTEAD}") from error  # fmt: skip


def missing_tool(builder: Any) -> UserError | None:
    """What has to be installed before the extension can be compiled (or loaded: DeepSpeed looks for it each time)."""
    compiler = os.environ.get("CXX") or "c++"
    why, fix = None, ""
    if not sys.platform.startswith("linux"):
        why, fix = f"it reads and writes with Linux's libaio, and this is {sys.platform}", "use --offload-optimizer cpu"
    elif shutil.which(compiler) is None or shutil.which("cc") is None:
        why, fix = f"there is no C++ compiler ({compiler}) to compile {OP} with", "`apt-get install g++`"
    elif shutil.which("ninja") is None:
        why, fix = f"there is no ninja to compile {OP} with", "`pip install ninja`"
    elif _needs_cuda_toolkit():
        why, fix = f"with a GPU {OP} is compiled with the CUDA toolkit, and there is none", "install it (CUDA_HOME)"
    elif not builder.is_compatible(verbose=False):
        why, fix = f"{OP} needs libaio, which is not installed", "`apt-get install libaio-dev`"
    if why is None:
        return None
    return UserError(f"cannot use {OPTION}", why, fix if fix.startswith("use ") else f"{fix}, {INSTEAD}")


def _needs_cuda_toolkit() -> bool:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    return torch.cuda.is_available() and CUDA_HOME is None


def _first_error(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[0])


@contextmanager
def compiling_in(folder: Path) -> Iterator[None]:
    """Inside, torch compiles into this folder, and finds programs that are installed beside this Python."""
    path = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    with environment_with({"TORCH_EXTENSIONS_DIR": str(folder), "PATH": path}):
        yield


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Inside, no other process compiles there; what a killed one has left of torch's lock is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "compiling", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for leftover in folder.glob("*/lock"):
            leftover.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)
