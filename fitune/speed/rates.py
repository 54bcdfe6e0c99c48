"""Measures what a device does per second: matrix products, memory, launches, unpacking; and the host's disk.

Every function measures once and returns one number with its unit in its name; None where the device cannot do it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fitune.speed.link import seconds_each

ENOUGH_S = 0.5
GEMM_SIDE = {"cuda": 8192, "cpu": 1024}
COPY_VALUES = {"cuda": 256 * 1024**2, "cpu": 64 * 1024**2}  # of 2 bytes: far beyond every cache
SMALL_OPERATIONS = 500  # launched in a row
DISK_BYTES = 256 * 1024**2
SLOW_S = 0.25  # a product that takes longer is measured at half the side (fp16 on processors without it)
SMALLEST_SIDE = 256
UNPACK_SIDE = {"cuda": 8192, "cpu": 1024}


def gemm_flops_per_s(device: Any, precision: str, enough_s: float = ENOUGH_S) -> float | None:
    """FLOP/s of a large square product in `bf16`, `fp16` or `fp32` (full fp32: TF32 stays off, as torch's default).

    Returns:
        None where the device has no such product (bf16 on cards before Ampere is emulated: not measured).
    """
    import torch

    device = torch.device(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    if device.type == "cuda" and precision == "bf16" and torch.cuda.get_device_capability(device) < (8, 0):
        return None
    side = GEMM_SIDE[device.type]
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        while 3 * side * side * dtype.itemsize > free // 2 and side > SMALLEST_SIDE:
            side //= 2
    while side > SMALLEST_SIDE and _product_s(device, dtype, side) > SLOW_S:
        side //= 2
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty(side, side, device=device, dtype=dtype)
    each = seconds_each(lambda: torch.mm(a, b, out=out), _wait(device), enough_s, batch=_batch(device, 5))
    return 2 * side**3 / each


def _product_s(device: Any, dtype: Any, side: int) -> float:
    """Seconds of one product, the second of two: the first loads the kernel."""
    import torch

    a = torch.ones(side, side, device=device, dtype=dtype)
    for _ in range(2):
        started = time.perf_counter()
        torch.mm(a, a)
        _wait(device)()
        seconds = time.perf_counter() - started
        if seconds > 2 * SLOW_S:
            break
    return seconds


def memory_bytes_per_s(device: Any, enough_s: float = ENOUGH_S) -> float:
    """Bytes read plus written per second by an elementwise kernel (a sum with a number, 2 bytes a value)."""
    import torch

    device = torch.device(device)
    values = COPY_VALUES[device.type]
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        values = min(values, max(free // 16, 1024**2))
    source = torch.ones(values, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    each = seconds_each(lambda: torch.add(source, 1, out=target), _wait(device), enough_s, batch=_batch(device, 5))
    return 2 * 2 * values / each


def ram_bytes_per_s(enough_s: float = ENOUGH_S) -> float:
    """Bytes read plus written per second by a copy within host memory, on all of torch's threads."""
    import torch

    source = torch.ones(COPY_VALUES["cpu"], dtype=torch.int16)
    target = torch.empty_like(source)
    return 2 * 2 * source.numel() / seconds_each(lambda: target.copy_(source), lambda: None, enough_s)


def host_kernel_s(device: Any, enough_s: float = 0.2) -> float:
    """Host seconds per small operation that is launched from Python (an in-place sum of 256 values)."""
    import torch

    device = torch.device(device)
    tensor = torch.zeros(256, device=device)

    def launch() -> None:
        tensor.add_(1.0)

    return seconds_each(launch, _wait(device), enough_s, batch=SMALL_OPERATIONS)


def dequantise_values_per_s(device: Any, base_format: str = "nf4", enough_s: float = ENOUGH_S) -> float:
    """Weights of a 4-bit base unpacked to 16 bits (fp32 on the CPU) per second, one large matrix after the other, by
    the function that training uses.

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    import torch

    from fitune.model.formats import pack, unpack

    device = torch.device(device)
    on_card = device.type == "cuda"
    side = UNPACK_SIDE[device.type]
    dtype = torch.float16 if on_card else torch.float32
    packed = pack(torch.randn(side, side, device=device, dtype=dtype), base_format)

    def work() -> None:
        unpack(packed, dtype)

    return side * side / seconds_each(work, _wait(device), enough_s, batch=_batch(device, 10))


def disk_read_bytes_per_s(place: Path, num_bytes: int = DISK_BYTES) -> float | None:
    """Bytes per second of reading a file for the first time, on the disk of the folder `place`.

    A file is written there, flushed, and dropped from the system's cache before it is read; it is removed in any case.

    Returns:
        None where the system cannot be told to drop it (Windows, macOS), or too little room is there.

    Raises:
        OSError: the file cannot be written.
    """
    advise = getattr(os, "posix_fadvise", None)
    disk = os.statvfs(place) if hasattr(os, "statvfs") else None
    if advise is None or disk is None or disk.f_bavail * disk.f_frsize < 4 * num_bytes:
        return None
    chunk = os.urandom(16 * 1024**2)
    with tempfile.NamedTemporaryFile(dir=place, prefix=".fitune-disk-") as file:
        for _ in range(num_bytes // len(chunk)):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        advise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(len(chunk))
        with open(file.name, "rb", buffering=0) as reader:
            started = time.perf_counter()
            read = 0
            while count := reader.readinto(buffer):
                read += count
            return read / (time.perf_counter() - started)


def _wait(device: Any) -> Callable[[], None]:
    import torch

    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def _batch(device: Any, on_card: int) -> int:
    """How many at once: a card's work is queued."""
    return on_card if device.type == "cuda" else 1
