"""Machines made of files and of a small NVML, for cases that need hardware one does not have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fitune.units import GIB, MIB


def write(root: Path, files: dict[str, str]) -> Path:
    """Files below ``root`` by relative path; returns ``root``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def linux(root: Path, total_gib: float = 32, available_gib: float = 24, **more: str) -> Path:
    """A plain Linux machine; ``more`` are further files, with ``__`` for ``/`` in their names."""
    kib = GIB // 1024
    files = {
        "proc/meminfo": f"MemTotal:       {int(total_gib * kib)} kB\nMemFree:  1 kB\n"
        f"MemAvailable:   {int(available_gib * kib)} kB",
        "proc/sys/kernel/osrelease": "6.8.0-45-generic",
        "proc/self/cgroup": "0::/user.slice",
        "proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max locked memory         8388608              8388608              bytes",
    }
    files.update({name.replace("__", "/"): text for name, text in more.items()})
    return write(root, files)


class FakeNvml:
    """The functions of pynvml that fitune calls, over a list of cards.

    A card is a dict: name, total_mib, reserved_mib, used_mib, capability, gen, gen_max, width, width_max, uuid,
    processes (list of (pid, MiB or None)). ``fail_init`` is the text of an error that nvmlInit raises.
    """

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 0x02000028

    def __init__(self, cards: list[dict[str, Any]], driver: str = "570.86.10", cuda: int = 12080,
                 fail_init: str | None = None):  # fmt: skip
        self.cards, self.driver, self.cuda, self.fail_init = cards, driver, cuda, fail_init
        self.started = 0

    def nvmlInit(self) -> None:
        if self.fail_init:
            raise self.NVMLError(self.fail_init)
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.cards[index]

    def nvmlDeviceGetName(self, card: dict[str, Any]) -> str:
        return card["name"]

    def nvmlDeviceGetUUID(self, card: dict[str, Any]) -> str:
        return card.get("uuid", "GPU-0")

    def nvmlDeviceGetMemoryInfo(self, card: dict[str, Any], version: int | None = None) -> Any:
        total, reserved, used = (card[key] * MIB for key in ("total_mib", "reserved_mib", "used_mib"))
        if version is None:
            return SimpleNamespace(total=total, free=total - reserved - used, used=used + reserved)
        if card.get("old"):
            raise self.NVMLError("Function Not Found")
        return SimpleNamespace(total=total, reserved=reserved, free=total - reserved - used, used=used)

    def nvmlDeviceGetCudaComputeCapability(self, card: dict[str, Any]) -> tuple[int, int]:
        return card["capability"]

    def nvmlDeviceGetCurrPcieLinkGeneration(self, card: dict[str, Any]) -> int:
        return self._link(card, "gen")

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: dict[str, Any]) -> int:
        return self._link(card, "gen_max")

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: dict[str, Any]) -> int:
        return self._link(card, "width")

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: dict[str, Any]) -> int:
        return self._link(card, "width_max")

    def _link(self, card: dict[str, Any], key: str) -> int:
        if key not in card:
            raise self.NVMLError("Not Supported")
        return card[key]

    def nvmlDeviceGetComputeRunningProcesses(self, card: dict[str, Any]) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * MIB)
                for pid, mib in card.get("processes", [])]  # fmt: skip


RTX_3080 = {
    "name": "NVIDIA GeForce RTX 3080", "total_mib": 10240, "reserved_mib": 230, "used_mib": 700, "capability": (8, 6),
    "gen": 1, "gen_max": 4, "width": 8, "width_max": 16, "uuid": "GPU-aaaa1111",
}  # fmt: skip
TESLA_T4 = {
    "name": "Tesla T4", "total_mib": 15360, "reserved_mib": 448, "used_mib": 0, "capability": (7, 5),
    "gen": 3, "gen_max": 3, "width": 16, "width_max": 16, "uuid": "GPU-bbbb2222",
}  # fmt: skip
