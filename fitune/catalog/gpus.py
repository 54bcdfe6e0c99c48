"""GPUs by any name a person or a driver gives them, with their memory, rates and host link."""

from __future__ import annotations

import csv
import dataclasses
import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from fitune.errors import UserError
from fitune.units import GIB, MIB

# Bytes per second and lane after line coding (8b/10b to generation 2, 128b/130b from 3): PCI-SIG base specifications.
PCIE_LANE_BYTES_PER_S = {1: 250e6, 2: 500e6, 3: 984.6e6, 4: 1969.2e6, 5: 3938.5e6, 6: 7563e6}
# Share of that rate which pinned copies to the device reach: about 25 of 31.5 GB/s on consumer cards with PCIe 4 x16
# (0.79), 55 of 63.0 GB/s measured on an H200 with torch 2.11 (0.87). The lower one, so that plans do not promise more.
PCIE_EFFICIENCY = 0.79

# What CUDA reports as total on Linux lies below the other two figures. Measured pairs (driver total, CUDA total, GiB):
# T4 15.00/14.56 (2.9 %), RTX 3060 12.00/11.75, RTX 3090 24.00/23.68, RTX 4060 Ti 16.00/15.57, RTX 4090 23.99/23.53,
# RTX 5090 31.84/31.34 (1.6 %); HBM: A100 40.00/39.49 (1.3 %), H100 79.65/79.18, H200 140.4/139.8 (0.4 %).
# The largest of each kind is taken, so that a plan errs to the safe side.
MARGIN_FROM_DRIVER = {"gddr": 0.03, "gddr_ecc": 0.03, "hbm": 0.013, "shared": 0.013}
# From the size on the box: the driver total is up to 0.5 % below it (RTX 5090, H100, H200), ECC on data-centre GDDR
# cards takes 1/16 more (T4, L4, A10), and memory shared with the CPU loses 6.5 % (GB10: 119.7 of 128).
MARGIN_FROM_MARKETING = {"gddr": 0.035, "gddr_ecc": 0.0925, "hbm": 0.018, "shared": 0.07}

_NOISE = re.compile(r"\b(nvidia|geforce|amd|radeon|instinct|tesla|quadro|huawei|gpus?|graphics|card|generation|edition|"
                    r"corporation|jetson|hbm\d?e?)\b")  # fmt: skip
_MEMORY = re.compile(r"(?<![a-z0-9])(\d{1,3})\s*(?:gib|gb|g)(?![a-z0-9])")
_TIMES = re.compile(r"(\d+)\s*x\s*([^:]+)", re.IGNORECASE)
LIKE = 0.5  # share of letters (difflib's ratio) from which on a name is suggested for another


@dataclass(frozen=True)
class Gpu:
    """One accelerator as the catalog knows it. Rates are dense peaks in TFLOP/s with fp32 accumulation.

    A field is None where the source has no figure; ``doubt`` names columns that should not be relied on.
    """

    id: str
    name: str
    aliases: tuple[str, ...]
    vendor: str
    memory_kind: str
    cuda_total_gib: float | None
    driver_total_mib: float | None
    marketing_gb: float
    memory_gb_per_s: float
    fp16_tflops: float | None
    bf16_tflops: float | None
    fp32_tflops: float | None
    compute_capability: str
    bf16: bool
    flash_attention: bool
    pcie_gen: int
    pcie_lanes: int
    nvlink_gb_per_s: float | None
    tdp_w: float | None
    launch_year: int | None
    launch_price_usd: float | None
    source: str
    date: str
    tensor_basis: str
    doubt: str
    note: str

    @property
    def usable_bytes(self) -> int:
        """Total memory that CUDA reports on Linux, in bytes: measured where known, else with a margin subtracted.

        The margins are ``MARGIN_FROM_DRIVER`` and ``MARGIN_FROM_MARKETING`` (0.4 to 9.25 %). Windows shows slightly
        more; ECC switched on by hand on a workstation card takes about 6 % more than this.
        """
        if self.cuda_total_gib is not None:
            return int(self.cuda_total_gib * GIB)
        if self.driver_total_mib is not None:
            return int(self.driver_total_mib * MIB * (1 - MARGIN_FROM_DRIVER[self.memory_kind]))
        return int(self.marketing_gb * GIB * (1 - MARGIN_FROM_MARKETING[self.memory_kind]))

    @property
    def memory_basis(self) -> str:
        """Where ``usable_bytes`` comes from: ``cuda total``, ``driver total`` or ``marketing``."""
        if self.cuda_total_gib is not None:
            return "cuda total"
        return "driver total" if self.driver_total_mib is not None else "marketing"

    @property
    def memory_bytes_per_s(self) -> float:
        """Peak memory bandwidth in bytes/s."""
        return self.memory_gb_per_s * 1e9

    @property
    def link_bytes_per_s(self) -> float:
        """What a pinned copy between host and device reaches, in bytes/s; see :func:`link_rate`."""
        return link_rate(self.pcie_gen, self.pcie_lanes)

    def as_dict(self) -> dict:
        """All fields and the three derived figures, ready for JSON."""
        return {
            **dataclasses.asdict(self),
            "usable_bytes": self.usable_bytes,
            "memory_basis": self.memory_basis,
            "link_bytes_per_s": self.link_bytes_per_s,
        }


def link_rate(pcie_gen: int, pcie_lanes: int) -> float:
    """Bytes/s of a pinned copy over a PCIe link: lane rate x lanes x ``PCIE_EFFICIENCY``.

    Leaves out contention of several cards on one root port, and NUMA. Within 10 % of the two measurements it stands on.
    """
    return PCIE_LANE_BYTES_PER_S[pcie_gen] * pcie_lanes * PCIE_EFFICIENCY


@functools.cache
def all_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalog, in the order of the file."""
    with Path(__file__).with_name("gpus.csv").open(encoding="utf-8", newline="") as handle:
        return tuple(_gpu(row) for row in csv.DictReader(handle))


def _gpu(row: dict[str, str]) -> Gpu:
    """One line of gpus.csv; an empty number is None."""

    def number(column: str) -> float | None:
        return float(row[column]) if row[column] else None

    def whole(column: str) -> int | None:
        return int(row[column]) if row[column] else None

    return Gpu(
        id=row["id"], name=row["name"], aliases=tuple(filter(None, row["aliases"].split(";"))), vendor=row["vendor"],
        memory_kind=row["memory_kind"], cuda_total_gib=number("cuda_total_gib"),
        driver_total_mib=number("driver_total_mib"), marketing_gb=float(row["marketing_gb"]),
        memory_gb_per_s=float(row["memory_gb_per_s"]), fp16_tflops=number("fp16_tflops"),
        bf16_tflops=number("bf16_tflops"), fp32_tflops=number("fp32_tflops"),
        compute_capability=row["compute_capability"], bf16=row["bf16"] == "yes",
        flash_attention=row["flash_attention"] == "yes", pcie_gen=int(row["pcie_gen"]),
        pcie_lanes=int(row["pcie_lanes"]), nvlink_gb_per_s=number("nvlink_gb_per_s"), tdp_w=number("tdp_w"),
        launch_year=whole("launch_year"), launch_price_usd=number("launch_price_usd"), source=row["source"],
        date=row["date"], tensor_basis=row["tensor_basis"], doubt=row["doubt"], note=row["note"],
    )  # fmt: skip


def _split(name: str) -> tuple[str, int | None]:
    """A name without maker, memory size and punctuation, and the memory size in GB if it names one."""
    text = name.lower().replace("_", " ").replace("-", " ")
    memory = _MEMORY.search(text)
    text = _NOISE.sub(" ", _MEMORY.sub(" ", text))
    text = re.sub(r"\bmobile\b", "laptop", text)
    text = re.sub(r"\bsxm\d\b", "sxm", text)
    return re.sub(r"[^a-z0-9]", "", text), int(memory[1]) if memory else None


@functools.cache
def _index() -> dict[str, tuple[Gpu, ...]]:
    """Core name (``rtx3080``, and ``3080`` for it) to the cards that carry it."""
    index: dict[str, list[Gpu]] = {}
    for gpu in all_gpus():
        cores = {_split(name)[0] for name in (gpu.id, gpu.name, *gpu.aliases)}
        cores |= {re.sub(r"^rt?x", "", core) for core in cores}
        for core in cores:
            index.setdefault(core, []).append(gpu)
    return {core: tuple(cards) for core, cards in index.items()}


def _candidates(core: str, memory_gb: int | None) -> tuple[Gpu, ...]:
    """Cards of this core name; with a memory size also cards whose core name goes on after it (H100 94GB)."""
    cards = _index().get(core, ())
    if memory_gb is None:
        return cards
    exact = tuple(card for card in cards if round(card.marketing_gb) == memory_gb)
    if exact or len(core) < 3:
        return exact
    longer = {card.id: card for key, keyed in _index().items() if key.startswith(core) for card in keyed}
    return tuple(card for card in longer.values() if round(card.marketing_gb) == memory_gb)


@functools.cache
def find(name: str) -> tuple[Gpu, str | None]:
    """The card that a person means, and a sentence about the choice where the name fits several.

    Case, spaces, hyphens and the maker's name do not matter: ``rtx3080``, ``3080``, ``RTX 3080 10GB``,
    ``NVIDIA GeForce RTX 3080``, ``A100-SXM4-80GB``. Of several memory sizes the smallest is taken, of several
    forms with the same memory (PCIe, SXM) the slower one.

    Raises:
        UserError: no card of that name (the nearest names are given), or none with that memory size.
    """
    core, memory_gb = _split(name)
    cards = _candidates(core, memory_gb)
    if not cards:
        raise _unknown(name, core, memory_gb)
    chosen = min(cards, key=lambda card: (card.marketing_gb, card.bf16_tflops or card.fp16_tflops or 0.0,
                                          card.memory_gb_per_s))  # fmt: skip
    if chosen not in _index().get(core, ()):
        return chosen, f"{name!r} is taken as {chosen.name}, the card of that family with {memory_gb} GB."
    if len(cards) == 1:
        return chosen, None
    others = [card for card in cards if card is not chosen]
    sizes = sorted({card.marketing_gb for card in cards})
    if len(sizes) > 1:
        listed = " and ".join(f"{size:g} GB" for size in sizes)
        return chosen, f"{name!r} exists with {listed}: the smaller, {chosen.name}, is assumed."
    return chosen, f"{name!r} is also {', '.join(card.name for card in others)}: the slower, {chosen.name}, is assumed."


def find_device(name: str, total_bytes: int) -> Gpu | None:
    """The catalog's entry for a card that is present: its driver name, and the memory size nearest to its own.

    None when the catalog does not know it, or when its memory differs by more than 15 % (a modified card).
    """
    cards = _index().get(_split(name)[0], ())
    if not cards:
        return None
    nearest = min(cards, key=lambda card: abs(card.usable_bytes - total_bytes))
    return nearest if abs(nearest.usable_bytes - total_bytes) <= 0.15 * total_bytes else None


def _unknown(name: str, core: str, memory_gb: int | None) -> UserError:
    """The error for a name without a card: wrong memory size, or nearest names."""
    same_name = _index().get(core, ())
    if same_name and memory_gb is not None:
        sizes = ", ".join(dict.fromkeys(f"{card.marketing_gb:g} GB" for card in same_name))
        return UserError(
            f"unknown GPU {name!r}",
            f"the catalog has {same_name[0].name} with {sizes}, not with {memory_gb} GB",
            f"name one of these sizes, or add --vram {memory_gb} to a larger card",
        )
    if not core:
        return UserError("the GPU's name is empty", fix="name a card, for example rtx3090; `fitune gpus` lists all")
    near = ", ".join(nearest(name))
    return UserError(
        f"unknown GPU {name!r}",
        "the catalog has no card of that name" + ("" if near else ", nor one like it"),
        (f"nearest names: {near}; " if near else "") + "`fitune gpus` lists all of them",
    )


def nearest(name: str, n: int = 3) -> list[str]:
    """At most n catalog names that are like ``name``, the most alike first, each once; none where nothing is."""
    core = _split(name)[0]
    keys = difflib.get_close_matches(core, list(_index()), n=4 * n, cutoff=LIKE)
    return list(dict.fromkeys(_index()[key][0].name for key in keys))[:n]


def parse_with_notes(text: str) -> tuple[list[tuple[Gpu, int]], list[str]]:
    """``NAME``, ``NAME:COUNT``, ``COUNTxNAME`` or several of them with commas, as cards with counts and the notes of
    :func:`find`.

    Raises:
        UserError: an unknown name, or a count that is not a whole number of at least 1.
    """
    cards, notes = [], []
    for part in text.split(","):
        times = _TIMES.fullmatch(part.strip())
        if times is not None and not _candidates(*_split(part)):  # 7900xtx is a name, and 2x3090 two cards
            part = f"{times[2]}:{times[1]}"
        name, colon, count_text = part.strip().rpartition(":")
        if not colon:
            name, count_text = part.strip(), "1"
        if not count_text.strip().isdecimal() or int(count_text) < 1:
            raise UserError(
                f"cannot read the GPU count in {part.strip()!r}",
                f"{count_text.strip()!r} is not a whole number of at least 1",
                f"write NAME:COUNT, for example {name or 'rtx3090'}:2",
            )
        gpu, note = find(name)
        cards.append((gpu, int(count_text)))
        notes += [note] if note else []
    return cards, notes


def parse(text: str) -> list[tuple[Gpu, int]]:
    """:func:`parse_with_notes` without the notes."""
    return parse_with_notes(text)[0]
