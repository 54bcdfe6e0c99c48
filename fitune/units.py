"""Bytes, tokens and seconds for people. The only place that divides by 1024."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_SUFFIXES = {"": GIB, "g": GIB, "gb": GIB, "gib": GIB, "m": MIB, "mb": MIB, "mib": MIB}


def gib(num_bytes: float) -> float:
    """Bytes as GiB."""
    return num_bytes / GIB


def from_gib(size_gib: float) -> int:
    """GiB as whole bytes."""
    return int(size_gib * GIB)


def parse_size(text: str | float | int) -> int:
    """A size as people type it (``10``, ``"10GiB"``, ``"512 MB"``) in bytes.

    A bare number is GiB; GB and GiB mean the same (as on the box of a graphics card).

    Raises:
        ValueError: the text is not a positive size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", str(text))
    if not match or match[2].lower() not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a size; write GiB as a number (10) or with a unit (10GiB, 512MiB)")
    value = float(match[1]) * _SUFFIXES[match[2].lower()]
    if value <= 0:
        raise ValueError(f"{text!r} is not a positive size")
    return int(value)


def format_bytes(num_bytes: float) -> str:
    """``6.65 GiB``, ``312 MiB`` or ``17 KiB``, whichever reads best; never 1024 of a smaller unit."""
    if abs(num_bytes) >= GIB - MIB / 2:
        return f"{num_bytes / GIB:.2f} GiB"
    if abs(num_bytes) >= MIB - KIB / 2:
        return f"{num_bytes / MIB:.0f} MiB"
    return f"{num_bytes / KIB:.0f} KiB"


def gb_per_s(bytes_per_s: float) -> float:
    """A speed in GB/s, powers of ten, as links are sold."""
    return bytes_per_s / 1e9


def format_rate(bytes_per_s: float) -> str:
    """``54.1 GB/s``, ``812 MB/s`` or ``0.4 MB/s``."""
    if bytes_per_s >= 0.9995e9:
        return f"{gb_per_s(bytes_per_s):.1f} GB/s"
    return f"{bytes_per_s / 1e6:.0f} MB/s" if bytes_per_s >= 0.9995e6 else f"{bytes_per_s / 1e6:.1f} MB/s"


def format_share(share: float) -> str:
    """``0.2 %``."""
    return f"{share * 100:.1f} %"


def format_count(count: float) -> str:
    """``8.03 B``, ``135 M``, ``22.0 K`` or ``812``."""
    for scale, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= scale:
            return f"{count / scale:.3g} {suffix}"
    return f"{count:.0f}"


def format_duration(seconds: float) -> str:
    """``1 h 05 min``, ``3 min 20 s``, ``4.2 s`` or ``24 ms``."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if 0 < seconds < 0.0995:
        return f"{max(1, round(seconds * 1000))} ms"
    return f"{seconds:.1f} s"
