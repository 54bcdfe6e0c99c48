"""What connects the GPUs of a machine: with each other, and together with the host. Nothing of it was measured here.

To measure on a machine with several GPUs: `python benchmarks/multi_gpu.py`; NVIDIA's `nccl-tests` (all_reduce_perf,
"busbw") gives the same figures without fitune.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fitune.catalog import gpus
from fitune.catalog.gpus import Gpu
from fitune.errors import UserError
from fitune.speed import constants

NVLINK_SHARE = 0.75
"""Of one direction's rate that a collective over NVLink reaches with messages of some MiB."""
PCIE_SHARE = 0.7
"""Of a pinned copy's rate that a collective over PCIe reaches where cards read each other's memory."""
THROUGH_HOST_SHARE = 0.4
"""The same where they cannot (GeForce cards from the 40 series on have no peer-to-peer in NVIDIA's driver; of older
ones it depends on the board): every byte is written to host memory and read again."""
EXCHANGE_LATENCY_S = 30e-6
"""Of one collective: launches and the first bytes' way."""
SOCKET_GB_PER_S = 80.0
"""What the GPUs of one socket can copy from host memory together: four channels of DDR4-3200 have 102 GB/s, two of
DDR5-5600 90; a desktop processor's 16 to 24 lanes stop earlier, at 32 to 50."""
CARDS_PER_SOCKET = 4
"""More cards than these are taken to be on two sockets."""


@dataclass(frozen=True)
class Links:
    """Rates in bytes/s, of each card while all of them are busy.

    Attributes:
        peer: what a rank sends (and receives at the same time) in a collective.
        host: a pinned copy from host memory to one card.
        kind: NVLink | PCIe | PCIe through host memory.
        sentence: what was assumed, for people.
    """

    peer: float
    host: float
    kind: str
    sentence: str


def links_of(names: Sequence[str], host_bytes_per_s: Sequence[float | None]) -> Links:
    """Of the cards of one machine, each by its name and the rate of its own link to the host (None: the catalog's)."""
    cards = [_card(name) for name in names]
    own = [rate or (card.link_bytes_per_s if card else constants.UNKNOWN_LINK_GB_PER_S * 1e9)
           for card, rate in zip(cards, host_bytes_per_s, strict=True)]  # fmt: skip
    on_socket = -(-len(names) // (2 if len(names) > CARDS_PER_SOCKET else 1))
    host = min(min(own), SOCKET_GB_PER_S * 1e9 / on_socket)
    peer, kind, between = _between(cards, min(own))
    sentence = (
        f"assumed: {len(names)} GPUs over {between}, {peer / 1e9:.0f} GB/s each in an exchange; from host memory "
        f"{host / 1e9:.0f} GB/s each while all copy (not measured)"
    )
    return Links(peer, host, kind, sentence)


def _between(cards: Sequence[Gpu | None], slot: float) -> tuple[float, str, str]:
    """(bytes/s, kind, in words). NVLink's figure in the catalog is of both directions together."""
    known = [card for card in cards if card is not None]
    alike = len({card.id for card in known}) == 1 and len(known) == len(cards)
    if alike and known[0].nvlink_gb_per_s and _is_soldered(known[0]):
        return known[0].nvlink_gb_per_s * 1e9 / 2 * NVLINK_SHARE, "NVLink", "NVLink"
    if any(card is None or _without_peer_access(card) for card in cards):
        return slot * THROUGH_HOST_SHARE, "PCIe through host memory", "PCIe, through host memory"
    bridge = " (an NVLink bridge is not assumed)" if known[0].nvlink_gb_per_s else ""
    return slot * PCIE_SHARE, "PCIe", f"PCIe{bridge}"


def _is_soldered(card: Gpu) -> bool:
    """NVLink is on the board, between all cards; elsewhere it is a bridge between two that is bought apart."""
    return any(mark in card.id for mark in ("sxm", "hgx", "gb200", "gh200", "h20"))


def _without_peer_access(card: Gpu) -> bool:
    return card.id.startswith(("rtx-40", "rtx-50"))


def _card(name: str) -> Gpu | None:
    try:
        return gpus.find(name)[0]
    except UserError:
        return None
