"""Measures this machine: what the driver and libraries hold on a card, and what card, link and host do per second.

Every figure is measured once, in an order that matters: the context before anything else has run on the card, and what
training steps add after a few have. Nothing is stored here; a measurement that is interrupted leaves nothing.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform as platform_module
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fitune.errors import UserError
from fitune.hardware import Device, Machine, torch_build
from fitune.hardware.calibration import Calibration
from fitune.units import format_bytes

PRECISIONS = ("bf16", "fp16", "fp32")
BUSY_SHARE = 0.5  # of the processor's cores: a load above it slows what is measured
IDLE_CARD_SHARE = 0.1  # of a card's memory: what a desktop holds is less
STEPS = 3  # training steps: the first makes the optimizer's state, the others load what is left of the kernels
OnStep = Callable[[str], None]


def calibrate(device: Device | None, machine: Machine, on_step: OnStep) -> Calibration:
    """Measures a card, or (None) the processor. A card takes about a minute.

    Args:
        on_step: told what is measured next, in a few words.

    Raises:
        UserError: the card cannot be used, or has no room for a few hundred MiB.
    """
    started = time.perf_counter()
    found = _Found()
    found.notes += busy(device)
    if device is None:
        _measure_processor(found, on_step)
        name, uuid = processor_name(), None
    else:
        try:
            _measure_card(found, device, machine, on_step)
        except RuntimeError as error:
            raise _card_error(device, error) from error
        name, uuid = device.name, device.uuid
    _measure_host(found, on_step)
    return Calibration(
        device="cpu" if device is None else "cuda",
        name=name,
        uuid=uuid,
        host=platform_module.node(),
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        versions=versions(device),
        memory=found.memory,
        rates=found.rates,
        notes=tuple(found.notes),
        seconds=round(time.perf_counter() - started, 1),
    )


def busy(device: Device | None, load: float | None = None) -> list[str]:
    """Why figures may come out too low: other programs at work on the processor or holding memory of the card.

    Args:
        load: mean number of runnable processes over the last minute; None: what the system says, where it does.
    """
    notes = []
    if load is None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cores = os.cpu_count() or 1
    if load > BUSY_SHARE * cores:
        notes.append(f"the processor was busy before (load {load:.1f} on {cores} cores): measure again when it is idle")
    held = 0 if device is None else device.total_bytes - device.free_bytes
    if device is not None and held > IDLE_CARD_SHARE * device.total_bytes:
        notes.append(f"{format_bytes(held)} of the card were in use before: measure again when it is idle")
    return notes


def versions(device: Device | None) -> dict[str, str | None]:
    """Of everything that a figure may depend on."""
    import fitune

    build = torch_build()
    try:
        bitsandbytes: str | None = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        bitsandbytes = None
    driver = device.driver_version if device is not None else None
    return {
        "fitune": fitune.__version__, "torch": build.version, "cuda": build.cuda, "driver": driver,
        "bitsandbytes": bitsandbytes,
    }  # fmt: skip


def processor_name(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor as it calls itself, as far as the system says."""
    try:
        found = re.search(
            r"^model name\s*:\s*(.+)$", cpu_info.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
        )
    except OSError:
        found = None
    return found[1].strip() if found else platform_module.processor() or platform_module.machine() or "CPU"


class _Found:
    """Figures as they come."""

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}
        self.rates: dict[str, Any] = {}
        self.notes: list[str] = []


def _measure_card(found: _Found, device: Device, machine: Machine, on_step: OnStep) -> None:
    """Context first: whatever runs before would be counted as part of it."""
    import torch

    from fitune.memory import measure
    from fitune.speed import link, rates

    index = device.index
    on_step("the driver's context")
    clean = not torch.cuda.is_initialized() or not torch.cuda.max_memory_reserved(index)
    before = measure.free_bytes(index)
    torch.cuda.set_device(index)
    torch.zeros(1, device="cuda")
    if clean:
        found.memory["context_at_start_bytes"] = measure.outside_bytes(index, before)
    on_step("training steps of a small model")
    _run_steps(found, index)
    found.memory["workspace_bytes"] = measure.kept_bytes(index)
    if clean:
        found.memory["context_bytes"] = measure.outside_bytes(index, before)
    else:
        found.notes.append("memory of the context: not measured, this process had used CUDA before")
    for name, to_device in (("host_to_device", True), ("device_to_host", False)):
        on_step(f"copies {'to' if to_device else 'from'} the card")
        for prefix, pinned in (("", True), ("pageable_", False)):
            key = f"{prefix}{name}_bytes_per_s"
            found.rates[key] = link.copy_bytes_per_s(index, to_device=to_device, pinned=pinned)
    _measure_arithmetic(found, torch.device("cuda", index), on_step)
    on_step("the card's memory")
    found.rates["memory_bytes_per_s"] = rates.memory_bytes_per_s(f"cuda:{index}")
    torch.cuda.empty_cache()
    on_step("how much memory can be pinned")
    pinned_found = measure.probe_pinned(machine.ram_available_bytes)
    found.memory["pinned_bytes"] = pinned_found.num_bytes
    found.memory["pinned_bytes_is_limit"] = pinned_found.is_limit


def _run_steps(found: _Found, index: int | None) -> None:
    """Steps of a 4-bit model where bitsandbytes is there, and of a 16-bit one: their kernels are loaded afterwards."""
    from fitune.train.tiny import tiny_engine, tiny_step

    for base_format in ("nf4", "fp16" if index is not None and not _has_bf16(index) else "bf16"):
        try:
            engine = tiny_engine(index, base_format=base_format)
        except (UserError, ImportError) as error:
            found.notes.append(f"{base_format} training steps: not run ({_first_line(error)})")
            continue
        for step in range(STEPS):
            tiny_step(engine, step)


def _has_bf16(index: int) -> bool:
    import torch

    return torch.cuda.get_device_capability(index) >= (8, 0)


def _measure_arithmetic(found: _Found, device: Any, on_step: OnStep) -> None:
    """Products per precision, launches, unpacking: the same for a card and a processor."""
    from fitune.speed import rates

    on_step("matrix products")
    products = {precision: rates.gemm_flops_per_s(device, precision) for precision in PRECISIONS}
    found.rates["gemm_flops_per_s"] = {key: value for key, value in products.items() if value is not None}
    found.notes += [f"{key} products: not measured, this card has none" for key, value in products.items() if not value]
    on_step("launches")
    found.rates["host_kernel_s"] = rates.host_kernel_s(device)
    on_step("unpacking of 4-bit weights")
    try:
        found.rates["dequantise_values_per_s"] = rates.dequantise_values_per_s(device)
    except ImportError as error:
        found.notes.append(f"unpacking of 4-bit weights: not measured ({_first_line(error)})")


def _measure_processor(found: _Found, on_step: OnStep) -> None:
    import torch

    from fitune.speed import rates

    _measure_arithmetic(found, torch.device("cpu"), on_step)
    on_step("elementwise operations")
    found.rates["memory_bytes_per_s"] = rates.memory_bytes_per_s("cpu")


def _measure_host(found: _Found, on_step: OnStep) -> None:
    from fitune.speed import rates

    on_step("host memory")
    found.rates["ram_bytes_per_s"] = rates.ram_bytes_per_s()
    on_step("the disk")
    place = _disk_place()
    try:
        read = rates.disk_read_bytes_per_s(place)
    except OSError as error:
        read = None
        found.notes.append(f"disk: not measured, cannot write in {place} ({error.strerror or error})")
    if read is not None:
        found.rates["disk_read_bytes_per_s"] = read
    elif not found.notes or not found.notes[-1].startswith("disk:"):
        found.notes.append("disk: not measured, too little room, or the system cannot drop a file from its cache")


def _disk_place() -> Path:
    """The folder of downloaded and converted models, where there is one: its disk is what models are read from."""
    from fitune.model.cache import cache_dir

    folder = cache_dir()
    for place in (folder, *folder.parents):
        if place.is_dir():
            return place
    return Path(tempfile.gettempdir())


def _card_error(device: Device, error: RuntimeError) -> UserError:
    """torch's errors on a card, in our words; what is no memory shortage keeps its own."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return UserError(
            f"cannot calibrate {device.name}",
            "its memory ran out: other processes use the card",
            "end them, or choose another card with --devices",
        )
    return UserError(
        f"cannot calibrate {device.name}", _first_line(error), "see `fitune gpus` for what this machine has"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
