"""AMD cards from the kernel's files (amdgpu and kfd), without any ROCm library."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from fitune.catalog.gpus import link_rate
from fitune.hardware.host import read_text
from fitune.hardware.machine import Device
from fitune.units import GIB

# Processors with graphics have a carve-out of 0.5 to 4 GiB; cards worth training on have more.
SMALLEST_CARD_BYTES = 6 * GIB
# Targets with matrix instructions for bf16 (CDNA 1, RDNA 3 and up), and those of torch's flash kernel (AOTriton).
_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
_FLASH = ("gfx90a", "gfx94", "gfx95", "gfx1100", "gfx120")
# GT/s per lane, as the kernel writes a link's speed, to PCIe generation.
_GENERATION = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}


def has_kfd(root: Path) -> bool:
    """Whether the kernel offers AMD's compute interface, or ROCm's own tool is installed."""
    return (root / "sys/class/kfd").exists() or (root == Path("/") and shutil.which("rocm-smi") is not None)


def probe_amd(root: Path) -> tuple[Device, ...]:
    """AMD cards with at least ``SMALLEST_CARD_BYTES`` of their own memory, in the kernel's order."""
    targets = _targets(root)
    devices: list[Device] = []
    for card in sorted((root / "sys/class/drm").glob("card*"), key=lambda path: (len(path.name), path.name)):
        folder = card / "device"
        if not re.fullmatch(r"card\d+", card.name) or read_text(folder / "vendor") != "0x1002":
            continue
        total = int(read_text(folder / "mem_info_vram_total") or 0)
        if total < SMALLEST_CARD_BYTES:
            continue
        used = int(read_text(folder / "mem_info_vram_used") or 0)
        target = next((targets[node.name] for node in folder.glob("drm/renderD*") if node.name in targets), "")
        gen, width = _link(folder, "current")
        gen_max, width_max = _link(folder, "max")
        devices.append(
            Device(
                index=len(devices),
                name=read_text(folder / "product_name") or f"AMD {target or 'GPU'}",
                vendor="AMD",
                total_bytes=total,
                free_bytes=total - used,
                used_by_others_bytes=used,
                compute_capability=target,
                bf16=target.startswith(_BF16),
                flash_attention=target.startswith(_FLASH),
                driver_version=read_text(root / "sys/module/amdgpu/version"),
                pcie_gen=gen,
                pcie_gen_max=gen_max,
                pcie_width=width,
                pcie_width_max=width_max,
                link_bytes_per_s=link_rate(gen_max, width) if gen_max and width else None,
            )
        )
    return tuple(devices)


def _targets(root: Path) -> dict[str, str]:
    """Render node (``renderD128``) to target (``gfx942``), from the compute topology."""
    targets = {}
    for file in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        values = dict(re.findall(r"^(\w+) (\d+)$", read_text(file) or "", re.MULTILINE))
        version = int(values.get("gfx_target_version", 0))
        if version:  # 90402 is 9.4.2
            name = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
            targets[f"renderD{values.get('drm_render_minor', '')}"] = name
    return targets


def _link(folder: Path, which: str) -> tuple[int | None, int | None]:
    """(generation, lanes) of a card's link, ``current`` or ``max``."""
    speed = (read_text(folder / f"{which}_link_speed") or "").split(" ")[0]
    width = read_text(folder / f"{which}_link_width") or ""
    return _GENERATION.get(speed), int(width) if width.isdecimal() and int(width) else None
