"""Looks at this machine once and returns it as data."""

from __future__ import annotations

import os
import platform as platform_module
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fitune.hardware import amd, host, nvidia
from fitune.hardware.machine import Machine


def probe(
    path: Path | str = ".",
    *,
    root: Path = Path("/"),
    nvml: Any | None = None,
    platform: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Machine:
    """This machine. Never fails for want of a driver or a file: what cannot be known is None or a note.

    Takes some milliseconds without a GPU and about 50 ms with one (NVML starts). Does not create a CUDA context.

    Args:
        path: where the run will write; the free disk space is that of this place.
        root: the folder that holds ``proc``, ``sys`` and ``dev``; another one for tests.
        nvml: an object with pynvml's functions; None is pynvml itself when it is installed and ``root`` is ``/``.
        platform: as in ``sys.platform``.
        environ: for CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES; None is the process's own.
    """
    platform = platform or sys.platform
    environ = os.environ if environ is None else environ
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if nvml is None and root == Path("/"):
        nvml = nvidia.load_nvml()
    cards = nvidia.probe_nvidia(root, nvml, visible)
    hidden = visible is not None and visible.strip() in ("", "-1", "NoDevFiles")
    amd_hidden = environ.get("HIP_VISIBLE_DEVICES", visible) in ("", "-1")
    amd_cards = amd.probe_amd(root) if amd.has_kfd(root) and not amd_hidden else ()
    ram = host.memory(root)
    wsl = host.is_wsl(root)
    pinned, reason = host.pinned_limit(ram, wsl, platform)
    disk_path, disk_free_bytes = host.disk_free(Path(path))
    unseen = cards.driver_loaded and not cards.devices and bool(cards.notes)
    notes = [*cards.notes, host.describe_ram(ram), None if cards.driver_loaded else _driverless(root)]
    return Machine(
        devices=cards.devices or amd_cards,
        ram_total_bytes=ram.total_bytes,
        ram_available_bytes=ram.available_bytes,
        ram_limit_source=ram.source,
        num_cpus=host.num_cpus(root),
        pinned_limit_bytes=pinned,
        pinned_limit_reason=reason,
        memlock_bytes=host.memlock_bytes(root),
        disk_path=disk_path,
        disk_free_bytes=disk_free_bytes,
        platform=platform,
        is_wsl=wsl,
        python_version=platform_module.python_version(),
        nvidia_present=not hidden and (bool(cards.devices) or unseen),
        nvidia_driver_version=cards.driver_version,
        cuda_version=cards.cuda_version,
        amd_present=bool(amd_cards),
        notes=tuple(note for note in notes if note),
    )


def _driverless(root: Path) -> str | None:
    """A sentence when the bus shows an NVIDIA card (class 03, display or 3D) but no NVIDIA driver is loaded."""
    for folder in (root / "sys/bus/pci/devices").glob("*"):
        is_display = (host.read_text(folder / "class") or "").startswith("0x03")
        if is_display and host.read_text(folder / "vendor") == "0x10de":
            return "an NVIDIA card is in this machine, but no NVIDIA driver is loaded: it cannot be used"
    return None
