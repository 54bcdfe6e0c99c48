"""NVIDIA cards through NVML (nvidia-ml-py, module pynvml) and, without it, through the driver's files in /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fitune.catalog.gpus import MARGIN_FROM_DRIVER, PCIE_LANE_BYTES_PER_S, link_rate
from fitune.hardware.host import read_text
from fitune.hardware.machine import Device

# Tensor cores for bf16 and the flash kernel of torch's scaled_dot_product_attention begin with compute capability 8.0.
_FIRST_MODERN = (8, 0)


@dataclass(frozen=True)
class Nvidia:
    """What the NVIDIA driver says. ``driver_loaded`` with no devices: none is visible, or NVML cannot be asked."""

    devices: tuple[Device, ...] = ()
    driver_loaded: bool = False
    driver_version: str | None = None
    cuda_version: str | None = None
    notes: tuple[str, ...] = ()


def load_nvml() -> Any | None:
    """The pynvml module of nvidia-ml-py, or None when it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def probe_nvidia(root: Path, nvml: Any | None, visible: str | None) -> Nvidia:
    """The cards, from NVML if it answers, else driver version and card names from /proc/driver/nvidia.

    Args:
        nvml: the pynvml module or an object with the same functions; None: not installed.
        visible: the value of CUDA_VISIBLE_DEVICES, None when it is not set.
    """
    if nvml is None:
        return _from_proc(root, "nvidia-ml-py is not installed: the cards' memory is not known")
    try:
        nvml.nvmlInit()
        try:
            driver = _text(nvml.nvmlSystemGetDriverVersion())
            code = int(_ask(nvml, nvml.nvmlSystemGetCudaDriverVersion) or 0)
            devices = [_device(nvml, index, driver) for index in range(nvml.nvmlDeviceGetCount())]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return _from_proc(root, f"NVML does not answer ({error}): the cards' memory is not known")
    cuda = f"{code // 1000}.{code % 1000 // 10}" if code else None
    notes = ("CUDA_VISIBLE_DEVICES names a MIG slice: its memory is not known",) if "MIG-" in (visible or "") else ()
    return Nvidia(_only_visible(devices, visible), True, driver, cuda, notes)


def _from_proc(root: Path, note: str) -> Nvidia:
    """Driver version without NVML; nothing at all (and no note) when no NVIDIA driver is loaded."""
    text = read_text(root / "proc/driver/nvidia/version")
    if text is None:
        return Nvidia()
    version = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    names = [re.search(r"^Model:\s*(.+)$", read_text(file) or "", re.MULTILINE)
             for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))]  # fmt: skip
    named = ", ".join(name[1].strip() for name in names if name)
    return Nvidia((), bool(names), version[1] if version else None, None, (f"{named or 'NVIDIA driver'}: {note}",))


def _text(value: str | bytes) -> str:
    """Old NVML bindings answer bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _ask(nvml: Any, function: Callable, *args: Any) -> Any:
    """One NVML answer, or None where this card or system does not support the question."""
    try:
        return function(*args)
    except nvml.NVMLError:
        return None


def _memory(nvml: Any, handle: Any) -> tuple[int, int, int, int]:
    """(total, reserved, free, used) in bytes. Without NVML's second form, reserved is estimated by the margin."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    info = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, version) if version is not None else None
    if info is not None:
        return int(info.total), int(info.reserved), int(info.free), int(info.used)
    info = nvml.nvmlDeviceGetMemoryInfo(handle)
    reserved = int(info.total * MARGIN_FROM_DRIVER["gddr"])
    return int(info.total), reserved, int(info.free), max(0, int(info.used) - reserved)


def _own_bytes(nvml: Any, handle: Any) -> int:
    """What this very process holds on the card; 0 where the driver hides processes (containers, WSL, Windows)."""
    processes = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return sum(int(process.usedGpuMemory or 0) for process in processes if process.pid == os.getpid())


def _device(nvml: Any, index: int, driver: str) -> Device:
    """One card as NVML sees it."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    total, reserved, free, used = _memory(nvml, handle)
    capability = tuple(_ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle) or (0, 0))
    gen_max = _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    width = _ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
    return Device(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        vendor="NVIDIA",
        total_bytes=total,
        free_bytes=free,
        reserved_bytes=reserved,
        used_by_others_bytes=max(0, used - _own_bytes(nvml, handle)),
        compute_capability=f"{capability[0]}.{capability[1]}",
        bf16=capability >= _FIRST_MODERN,
        flash_attention=capability >= _FIRST_MODERN,
        driver_version=driver,
        pcie_gen=_ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_gen_max=gen_max,
        pcie_width=width,
        pcie_width_max=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        link_bytes_per_s=link_rate(gen_max, width) if width and gen_max in PCIE_LANE_BYTES_PER_S else None,
        uuid=_text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or "") or None,
    )


def _only_visible(devices: list[Device], visible: str | None) -> tuple[Device, ...]:
    """The cards that CUDA_VISIBLE_DEVICES leaves, renumbered as torch counts them.

    As CUDA reads it: numbers or beginnings of UUIDs; the first entry that names no card ends the list. Numbers are
    NVML's (bus order); CUDA's own default order differs only on machines with different cards.
    """
    if visible is None:
        return tuple(devices)
    chosen: list[Device] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal():
            matches = [device for device in devices if device.index == int(entry)]
        else:
            matches = [device for device in devices if entry and (device.uuid or "").startswith(entry)]
        if not matches:
            break
        chosen.append(replace(matches[0], index=len(chosen)))
    return tuple(chosen)
