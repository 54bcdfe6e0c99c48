"""Rentable instances with dated prices. Prices are for the whole instance, in US dollars per hour."""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from pathlib import Path

from fitune.catalog import gpus


@dataclass(frozen=True)
class Instance:
    """One offer at one date. ``status`` says how well the price is known.

    ``verified`` (read from the named file), ``partly verified``, ``secondary`` (a third party's table), ``recalled``
    (not checked) or ``doubtful`` (old or converted). None where the source has no figure.
    """

    provider: str
    instance: str
    gpu_id: str
    num_gpus: int
    host_vcpus: int | None
    host_ram_gib: float | None
    usd_per_hour: float | None
    usd_per_hour_spot: float | None
    region: str
    status: str
    source: str
    date: str
    note: str

    @property
    def gpu(self) -> gpus.Gpu:
        """The catalog's entry for the instance's card."""
        return _gpus_by_id()[self.gpu_id]


@functools.cache
def _gpus_by_id() -> dict[str, gpus.Gpu]:
    return {gpu.id: gpu for gpu in gpus.all_gpus()}


@functools.cache
def all_instances() -> tuple[Instance, ...]:
    """Every offer of the catalog, in the order of the file."""
    with Path(__file__).with_name("clouds.csv").open(encoding="utf-8", newline="") as handle:
        return tuple(_instance(row) for row in csv.DictReader(handle))


def _instance(row: dict[str, str]) -> Instance:
    """One line of clouds.csv; an empty number is None."""

    def number(column: str) -> float | None:
        return float(row[column]) if row[column] else None

    return Instance(
        provider=row["provider"], instance=row["instance"], gpu_id=row["gpu_id"], num_gpus=int(row["num_gpus"]),
        host_vcpus=int(row["host_vcpus"]) if row["host_vcpus"] else None, host_ram_gib=number("host_ram_gib"),
        usd_per_hour=number("usd_per_hour"), usd_per_hour_spot=number("usd_per_hour_spot"), region=row["region"],
        status=row["status"], source=row["source"], date=row["date"], note=row["note"],
    )  # fmt: skip


def offers(gpu_id: str | None = None, num_gpus: int | None = None) -> list[Instance]:
    """Offers with a price, cheapest first; optionally only those with this card and this number of cards."""
    found = [
        offer
        for offer in all_instances()
        if offer.usd_per_hour is not None and gpu_id in (None, offer.gpu_id) and num_gpus in (None, offer.num_gpus)
    ]
    return sorted(found, key=lambda offer: offer.usd_per_hour or 0.0)
