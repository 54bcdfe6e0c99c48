"""Memory, processors and limits of the host. Linux is read from files below ``root``, other systems through psutil."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from fitune.units import GIB, KIB, MIB

# Under WSL 2 the driver refuses to pin more than this in all, with a bare "out of memory". Reports: 0.5 GiB in Docker
# (microsoft/WSL issue 14078, 2026-01), 0.75 to 1 GiB (2026-08), 1 GB (NVIDIA/nvidia-docker 1725), up to 2 GB. The
# smallest is taken: pinning too little is slow, pinning too much fails.
WSL_PINNED_BYTES = 512 * MIB
# Elsewhere the kernel and other programs need the rest; Windows itself caps shared GPU memory at half of the RAM.
PINNABLE_SHARE = 0.5
# Control groups write an enormous number where they mean "no limit".
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class Memory:
    """RAM in bytes, and where the limit comes from (``machine``, ``cgroup v1`` or ``cgroup v2``)."""

    total_bytes: int
    available_bytes: int
    source: str


def read_text(path: Path) -> str | None:
    """A small file's text without the trailing newline; None when it is absent or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def memory(root: Path) -> Memory:
    """RAM of the machine, cut to the tightest control group (v1 or v2) that this process is in."""
    total, available = _machine_memory(root)
    source = "machine"
    for limit, used, version in _cgroup_memory(root):
        if limit < total:
            total, source = limit, version
        available = min(available, max(0, limit - used))
    return Memory(total, available, source)


def _machine_memory(root: Path) -> tuple[int, int]:
    """(total, available) in bytes from /proc/meminfo, else from psutil."""
    text = read_text(root / "proc/meminfo")
    found = {name: int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text or "", re.MULTILINE)}
    if "MemTotal" in found:
        return found["MemTotal"] * KIB, found.get("MemAvailable", found.get("MemFree", 0)) * KIB
    import psutil

    memory_now = psutil.virtual_memory()
    return int(memory_now.total), int(memory_now.available)


def _cgroup_paths(root: Path) -> tuple[str, dict[str, str]]:
    """This process's group in the v2 tree (empty: not in one), and per controller in the v1 trees."""
    unified, by_controller = "", {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if number == "0" and not controllers:
            unified = path
        for controller in filter(None, controllers.split(",")):
            by_controller[controller] = path
    return unified, by_controller


def _upwards(base: Path, group: str) -> list[Path]:
    """Folders from a group up to the root of its tree. A container may see its own group as the tree's root."""
    folder = base / group.strip("/")
    chain = [folder, *folder.parents]
    return [path for path in chain if path == base or base in path.parents]


def _cgroup_memory(root: Path) -> list[tuple[int, int, str]]:
    """(limit, used, version) of every group above this process that limits memory; caches do not count as used."""
    unified, by_controller = _cgroup_paths(root)
    tree = root / "sys/fs/cgroup"
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "cgroup v1")
    v2 = ("memory.max", "memory.current", "inactive_file", "cgroup v2")
    groups = [(folder, v1) for folder in _upwards(tree / "memory", by_controller.get("memory", ""))]
    groups += [(folder, v2) for folder in _upwards(tree, unified)]
    limits = []
    for folder, (limit_file, used_file, cache_key, version) in groups:
        limit = _number(read_text(folder / limit_file))
        if limit is None or limit >= _UNLIMITED_BYTES:
            continue
        stat = read_text(folder / "memory.stat") or ""
        cache = re.search(rf"^{cache_key} (\d+)", stat, re.MULTILINE)
        used = (_number(read_text(folder / used_file)) or 0) - (int(cache[1]) if cache else 0)
        limits.append((limit, max(0, used), version))
    return limits


def _number(text: str | None) -> int | None:
    """A whole number, or None for ``max``, ``unlimited``, ``-1`` and nonsense."""
    return int(text) if text and text.isdecimal() else None


def num_cpus(root: Path) -> float:
    """Processors for this process: the affinity mask, cut to the quota of its control group (may be a fraction)."""
    count = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    unified, by_controller = _cgroup_paths(root)
    tree = root / "sys/fs/cgroup"
    quotas = [(read_text(folder / "cpu.max") or "").split() for folder in _upwards(tree, unified)]
    for folder in _upwards(tree / "cpu", by_controller.get("cpu", "")):
        quota, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
        quotas.append([quota or "", period or ""])
    for parts in quotas:
        if len(parts) == 2 and (quota_us := _number(parts[0])) and (period_us := _number(parts[1])):
            count = min(count, quota_us / period_us)
    return count


def is_wsl(root: Path) -> bool:
    """Whether this is Linux inside Windows: the kernel's name says so, or the paravirtual GPU device exists."""
    release = read_text(root / "proc/sys/kernel/osrelease") or ""
    return "microsoft" in release.lower() or (root / "dev/dxg").exists()


def memlock_bytes(root: Path) -> int | None:
    """RLIMIT_MEMLOCK (soft) in bytes; None when unlimited or not known."""
    found = re.search(r"^Max locked memory\s+(\S+)", read_text(root / "proc/self/limits") or "", re.MULTILINE)
    return _number(found[1]) if found else None


def pinned_limit(ram: Memory, wsl: bool, platform: str) -> tuple[int, str]:
    """(bytes, reason): a guess of how much host memory the GPU's driver lets one process pin.

    A guess from reports, not a measurement: whoever pins must still be ready for a refusal.
    """
    if wsl:
        return min(WSL_PINNED_BYTES, ram.available_bytes), "WSL: the driver refuses more than 0.5 to 2 GB in all"
    limit = min(int(ram.total_bytes * PINNABLE_SHARE), ram.available_bytes)
    if platform == "win32":
        return limit, "Windows: half of the RAM at most"
    if platform == "darwin":
        return 0, "macOS: no CUDA"
    return limit, "half of the RAM, the rest is for the system and the program"


def disk_free(path: Path) -> tuple[str, int]:
    """(folder, free bytes) of the nearest existing folder at or above ``path``."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return str(folder), shutil.disk_usage(folder).free


def describe_ram(ram: Memory) -> str | None:
    """A sentence when a control group leaves much less memory than a person would expect."""
    if ram.source == "machine":
        return None
    return f"a control group ({ram.source}) limits this process to {ram.total_bytes / GIB:.1f} GiB of RAM"
