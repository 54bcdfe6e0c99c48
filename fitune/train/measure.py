"""Memory as measured while a run goes on, in the fields of a `phase` event."""

from __future__ import annotations

from typing import Any


class Meter:
    """Peaks since the last `reset`. Device fields are None on the CPU; host bytes are this process' resident set."""

    def __init__(self, device: str):
        self.device = device
        self._highest: dict[str, int] = {}

    def reset(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, Any]:
        """Bytes since `reset`; `device_bytes` is what the driver counts for the whole card now."""
        import psutil

        values: dict[str, Any] = dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes"))
        values["host_bytes"] = psutil.Process().memory_info().rss
        if self.device == "cuda":
            import torch

            free, total = torch.cuda.mem_get_info()
            values |= {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
                "device_bytes": total - free,
            }
        return values

    def is_higher(self, phase: str, peaks: dict[str, Any]) -> bool:
        """Whether these peaks are the highest of the phase so far (by the first field that is known)."""
        key = peaks["peak_allocated_bytes"] or peaks["host_bytes"]
        higher = key > self._highest.get(phase, -1) * 1.01
        if higher:
            self._highest[phase] = key
        return higher
