"""Memory watched from step to step: what other processes take, what grows without end, which record is the long one."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fitune.units import MIB, format_bytes

WINDOW = 40  # steps over which growth is looked at
LEAK_BYTES, LEAK_SHARE = 16 * MIB, 0.01  # at rest nothing but weights and state lives on the device: this is much
HOST_LEAK_BYTES, HOST_LEAK_SHARE = 256 * MIB, 0.05  # the resident set also moves with the page cache and the allocator
OTHERS_BYTES = 256 * MIB
PEAK_SHARE = 1.10  # a peak this much above all earlier ones is named with the step's longest record
SETTLED_STEPS = 5
WARM_STEPS = 20  # libraries load parts of themselves in the first steps
MOST_NAMED = 5


@dataclass(frozen=True)
class Sample:
    """Bytes after a step. `rest`: tensors that are left on the device; `others`: what is in use on it beyond this
    process' allocator; None where there is no device."""

    step: int
    rest_bytes: int | None
    peak_bytes: int | None
    others_bytes: int | None
    free_bytes: int | None
    host_bytes: int
    longest_tokens: int
    longest_row: int  # from 1


class Watch:
    """Feed it one `Sample` a step; it answers with sentences for the person, each said once."""

    def __init__(self) -> None:
        self._rest: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._host: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._told: set[str] = set()
        self._others: int | None = None
        self._highest = 0
        self._named = 0
        self._seen = 0

    def look(self, sample: Sample, who: Callable[[], str] = lambda: "") -> list[str]:
        """What is worth saying after this step. `who` names the other processes where there are new ones."""
        self._seen += 1
        found = [self._other_processes(sample, who), self._long_record(sample)]
        if sample.rest_bytes is not None:
            self._rest.append((sample.step, sample.rest_bytes))
            found.append(self._leak("device", self._rest, LEAK_BYTES, LEAK_SHARE, sample.free_bytes))
        if self._seen > WARM_STEPS:
            self._host.append((sample.step, sample.host_bytes))
        found.append(self._leak("host", self._host, HOST_LEAK_BYTES, HOST_LEAK_SHARE, None))
        return [text for text in found if text]

    def _other_processes(self, sample: Sample, who: Callable[[], str]) -> str | None:
        if sample.others_bytes is None or self._seen <= 1:
            return None  # the first step makes workspaces of this process' own
        if self._others is None or sample.others_bytes < self._others:
            self._others = sample.others_bytes
        taken = sample.others_bytes - self._others
        if taken < OTHERS_BYTES:
            return None
        self._others = sample.others_bytes
        free = f", {format_bytes(sample.free_bytes)} are free" if sample.free_bytes is not None else ""
        return f"after step {sample.step} another process has taken {format_bytes(taken)} of the GPU{free}{who()}"

    def _long_record(self, sample: Sample) -> str | None:
        if sample.peak_bytes is None:
            return None
        jump = self._highest and sample.peak_bytes > PEAK_SHARE * self._highest and self._seen > SETTLED_STEPS
        before, self._highest = self._highest, max(self._highest, sample.peak_bytes)
        if not jump or self._named >= MOST_NAMED:
            return None
        self._named += 1
        return (
            f"step {sample.step} needed {format_bytes(sample.peak_bytes)}, the steps before it at most "
            f"{format_bytes(before)}: its longest record is row {sample.longest_row}, {sample.longest_tokens:,} tokens"
        )

    def _leak(self, where: str, kept: deque[tuple[int, int]], least: int, share: float, free: int | None) -> str | None:
        """Growth at rest over the whole window. A long record raises a peak, not what is left after the step."""
        if where in self._told or len(kept) < WINDOW:
            return None
        quarter = WINDOW // 4
        values = [value for _, value in kept]
        lows = [min(values[i : i + quarter]) for i in range(0, WINDOW, quarter)]
        growth = lows[-1] - lows[0]
        rises = all(later - earlier >= growth / 8 for earlier, later in zip(lows, lows[1:], strict=False))
        if growth < max(least, share * lows[0]) or not rises:
            return None
        self._told.add(where)
        a_step = growth / (WINDOW - quarter)
        end = f"; at this rate the GPU is full in {int(free / a_step):,} steps" if free else ""
        place = "GPU memory at rest" if where == "device" else "this process' host memory"
        span = f"from step {kept[0][0]} to {kept[-1][0]}"
        return f"{place} grows by {format_bytes(int(a_step))} a step ({span}): a leak{end}"


def measure(device: Any, step: int, longest_tokens: int, longest_row: int, peaks: dict[str, Any]) -> Sample:
    """The sample after a step.

    Args:
        device: torch device of the run.
        peaks: of the step, as `Meter.peaks` gives them.
    """
    rest = others = free = None
    import psutil

    memory = psutil.Process().memory_info()
    host = memory.rss - getattr(memory, "shared", 0)  # mapped files come and go with the page cache
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        rest = torch.cuda.memory_allocated(device)
        others = total - free - torch.cuda.memory_reserved(device)
    peak = peaks["peak_allocated_bytes"]
    return Sample(step, rest, peak, others, free, host, longest_tokens, longest_row)


def processes(device: Any) -> str:
    """The other processes on a card, as NVML names them ("; there: 4242 (python, 3.20 GiB)"), else nothing."""
    from fitune.hardware.nvidia import load_nvml

    nvml = load_nvml() if device.type == "cuda" else None
    if nvml is None:
        return ""
    import os

    import psutil
    import torch

    parts = []
    with contextlib.suppress(nvml.NVMLError, RuntimeError):
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid():
                continue
            name = ""
            with contextlib.suppress(psutil.Error):
                name = psutil.Process(process.pid).name() + ", "
            used = format_bytes(process.usedGpuMemory) if process.usedGpuMemory else "unknown size"
            parts.append(f"{process.pid} ({name}{used})")
    return f"; there: {', '.join(parts)}" if parts else ""
