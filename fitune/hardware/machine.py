"""The machine as plain data, whether it was probed or is only assumed."""

from __future__ import annotations

import dataclasses
import platform as platform_module
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from fitune.catalog.gpus import Gpu
from fitune.hardware.host import Memory, pinned_limit
from fitune.units import GIB, format_bytes

# Without --ram: the least RAM to assume beside a card, and RAM per byte of card memory. Half of it can be pinned.
ASSUMED_RAM_BYTES = 16 * GIB
ASSUMED_RAM_PER_VRAM = 2
PINNABLE_SHARE = 0.5


@dataclass(frozen=True)
class Device:
    """One graphics card. Sizes in bytes as the driver counts them.

    Attributes:
        index: number among the cards that are visible to this process, as torch counts them.
        total_bytes: all of its memory.
        reserved_bytes: what the driver keeps from every process; ``usable_bytes`` is the rest.
        free_bytes: what a new process could take now.
        used_by_others_bytes: what other processes hold now.
        compute_capability: ``8.6`` for NVIDIA, the target (``gfx942``) for AMD.
        pcie_gen: generation negotiated now (idle cards fall back to a lower one), ``pcie_gen_max`` under load.
        pcie_width: lanes negotiated; ``pcie_width_max`` is what card and slot could do.
        link_bytes_per_s: pinned copies between host and device at ``pcie_gen_max`` x ``pcie_width``; None unknown.
    """

    index: int
    name: str
    vendor: str
    total_bytes: int
    free_bytes: int
    reserved_bytes: int = 0
    used_by_others_bytes: int = 0
    compute_capability: str = ""
    bf16: bool = False
    flash_attention: bool = False
    driver_version: str | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    link_bytes_per_s: float | None = None
    uuid: str | None = None

    @property
    def usable_bytes(self) -> int:
        """What CUDA reports as the card's total: ``total_bytes`` without what the driver reserves."""
        return self.total_bytes - self.reserved_bytes


@dataclass(frozen=True)
class Machine:
    """A host and its cards.

    Attributes:
        ram_total_bytes, ram_available_bytes: of the machine, or less where a control group limits it;
            ``ram_limit_source`` says which (``machine``, ``cgroup v1``, ``cgroup v2``, ``assumed``, ``given``).
        num_cpus: processors that this process may use; a fraction where a control group gives one.
        pinned_limit_bytes: a guess of how much host memory can be pinned, ``pinned_limit_reason`` says why.
        memlock_bytes: RLIMIT_MEMLOCK, None when unlimited or unknown. It binds mlock(), not the pinning that CUDA's
            driver does, so it is no part of the guess.
        nvidia_present, amd_present: a card of that maker with a working driver is visible to this process
            (AMD: with at least 6 GiB of its own memory, so that processors with graphics do not count).
        cuda_version: highest CUDA version that the driver supports, ``12.8``.
        notes: sentences for the person, such as a card without a driver.
        assumptions: one line on what was assumed; empty for a machine that was probed.
    """

    devices: tuple[Device, ...]
    ram_total_bytes: int
    ram_available_bytes: int
    ram_limit_source: str
    num_cpus: float
    pinned_limit_bytes: int
    pinned_limit_reason: str
    memlock_bytes: int | None = None
    disk_path: str = ""
    disk_free_bytes: int | None = None
    platform: str = ""
    is_wsl: bool = False
    python_version: str = ""
    nvidia_present: bool = False
    nvidia_driver_version: str | None = None
    cuda_version: str | None = None
    amd_present: bool = False
    notes: tuple[str, ...] = ()
    assumptions: str = ""

    def as_dict(self) -> dict:
        """All fields, and ``usable_bytes`` of each device, ready for JSON."""
        fields = dataclasses.asdict(self)
        for values, device in zip(fields["devices"], self.devices, strict=True):
            values["usable_bytes"] = device.usable_bytes
        return fields


def virtual(gpu: Gpu, count: int = 1, ram_bytes: int | None = None) -> Machine:
    """A machine with ``count`` cards that one does not have; see :func:`virtual_mixed`."""
    return virtual_mixed([(gpu, count)], ram_bytes)


def under_wsl(machine: Machine) -> Machine:
    """An assumed machine as Linux within Windows sees it: half of the RAM, unless `.wslconfig` gives it more
    (https://learn.microsoft.com/windows/wsl/wsl-config, "memory"), and little that can be pinned."""
    ram = machine.ram_total_bytes // 2
    memory = Memory(ram, ram, machine.ram_limit_source)
    pinned, reason = pinned_limit(memory, wsl=True, platform="linux")
    windows = f", {format_bytes(machine.pinned_limit_bytes)} of it pinnable"  # of no use to a program in WSL
    more = f"under WSL: {format_bytes(ram)} of the RAM, {format_bytes(pinned)} of it pinnable"
    return dataclasses.replace(
        machine, ram_total_bytes=ram, ram_available_bytes=ram, pinned_limit_bytes=pinned, pinned_limit_reason=reason,
        platform="linux", assumptions=f"{machine.assumptions.replace(windows, '')}; {more}",
    )  # fmt: skip


def virtual_mixed(cards: Sequence[tuple[Gpu, int]], ram_bytes: int | None = None) -> Machine:
    """A machine with cards from the catalog, all of their memory free.

    Assumes, unless ``ram_bytes`` is given, RAM = max(16 GiB, 2 x the memory of all cards); half of the RAM pinnable;
    the link of the catalog; all RAM available. ``assumptions`` says so in one line.

    Raises:
        ValueError: no card, or a count below 1.
    """
    if not cards or any(count < 1 for _, count in cards):
        raise ValueError(f"a virtual machine needs at least one card, got {[(gpu.id, n) for gpu, n in cards]}")
    devices = [
        Device(
            index=index,
            name=gpu.name,
            vendor=gpu.vendor,
            total_bytes=gpu.usable_bytes,
            free_bytes=gpu.usable_bytes,
            compute_capability=gpu.compute_capability,
            bf16=gpu.bf16,
            flash_attention=gpu.flash_attention,
            pcie_gen=gpu.pcie_gen,
            pcie_gen_max=gpu.pcie_gen,
            pcie_width=gpu.pcie_lanes,
            pcie_width_max=gpu.pcie_lanes,
            link_bytes_per_s=gpu.link_bytes_per_s,
        )
        for index, gpu in enumerate(gpu for gpu, count in cards for _ in range(count))
    ]
    vram_bytes = int(sum(gpu.marketing_gb * GIB * count for gpu, count in cards))
    ram = ram_bytes or max(ASSUMED_RAM_BYTES, ASSUMED_RAM_PER_VRAM * vram_bytes)
    pinnable = int(ram * PINNABLE_SHARE)
    named = " + ".join(f"{count} x {gpu.name}" for gpu, count in cards)
    links = ", ".join(
        dict.fromkeys(f"PCIe {g.pcie_gen} x{g.pcie_lanes} at {g.link_bytes_per_s / 1e9:.1f} GB/s" for g, _ in cards)
    )
    sizes = ", ".join(dict.fromkeys(format_bytes(gpu.usable_bytes) for gpu, _ in cards))
    return Machine(
        devices=tuple(devices),
        ram_total_bytes=ram,
        ram_available_bytes=ram,
        ram_limit_source="given" if ram_bytes else "assumed",
        num_cpus=8,
        pinned_limit_bytes=pinnable,
        pinned_limit_reason="half of the RAM is assumed to be pinnable",
        platform=sys.platform,
        python_version=platform_module.python_version(),
        nvidia_present=any(gpu.vendor == "NVIDIA" for gpu, _ in cards),
        amd_present=any(gpu.vendor == "AMD" for gpu, _ in cards),
        assumptions=(
            f"assumed: {named} ({sizes} usable{' each' if len(devices) > 1 else ''}), {format_bytes(ram)} RAM"
            f"{' (as given)' if ram_bytes else ''}, {format_bytes(pinnable)} of it pinnable, {links}"
        ),
    )
