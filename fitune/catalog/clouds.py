"""Rentable instances with dated prices: the catalog's table, or one of the person's own. Prices are per hour and for
the whole instance.

A price is *firm* when a named source says it and it is not old; all others (recalled, converted, of years ago) are
shown as doubtful wherever they appear.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fitune.catalog import gpus
from fitune.errors import UserError

FILES = ("clouds.csv", "clouds_more.csv")  # written by scripts/build_catalog.py; added by hand, each with its source
TABLE_DATE = "2026-11-30"  # when they were put together
READ_FROM_A_SOURCE = ("verified", "partly verified", "secondary", "yours")
YEARS_FRESH = 1  # a price of an earlier year than the one before the table's is old
OWN = "yours"  # status of prices from a person's own file
_CURRENCY = re.compile(r"([a-z]{3})_per_hour")
_SYMBOLS = {"USD": "$", "CNY": "¥", "EUR": "€", "GBP": "£"}


@dataclass(frozen=True)
class Instance:
    """One offer at one date. ``status`` says how well the price is known.

    ``verified`` (read from the named file), ``partly verified``, ``secondary`` (a third party's table), ``recalled``
    (not checked), ``doubtful`` (old or converted) or ``yours`` (a person's own table). None where the source has no
    figure.
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

    @property
    def year(self) -> int | None:
        """The latest year that ``date`` names."""
        years = [int(year) for year in re.findall(r"\b(20\d\d)\b", self.date)]
        return max(years, default=None)

    @property
    def firm(self) -> bool:
        """Whether the price can be taken for a fact of its date: from a named source, and not years old."""
        if self.status == OWN:
            return True
        fresh = self.year is not None and self.year >= int(TABLE_DATE[:4]) - YEARS_FRESH
        return self.status in READ_FROM_A_SOURCE and fresh


@dataclass(frozen=True)
class PriceTable:
    """Offers and where they come from. ``currency`` is a three-letter code; amounts of all offers are in it."""

    offers: tuple[Instance, ...]
    name: str
    date: str
    currency: str = "USD"

    @property
    def symbol(self) -> str:
        return _SYMBOLS.get(self.currency, self.currency + " ")

    @property
    def is_own(self) -> bool:
        return any(offer.status == OWN for offer in self.offers)


@functools.cache
def _gpus_by_id() -> dict[str, gpus.Gpu]:
    return {gpu.id: gpu for gpu in gpus.all_gpus()}


@functools.cache
def all_instances() -> tuple[Instance, ...]:
    """Every offer of the catalog, in the order of the files."""
    found: list[Instance] = []
    for name in FILES:
        with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as handle:
            found += [_instance(row) for row in csv.DictReader(handle)]
    return tuple(found)


def catalog_table() -> PriceTable:
    """The catalog's offers as a table."""
    return PriceTable(all_instances(), "fitune's price table", TABLE_DATE)


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


# ---- a person's own table --------------------------------------------------------------------------------------------

HOW = "columns: gpu, usd_per_hour (or cny_per_hour, ...); optional: provider, num_gpus, usd_per_hour_spot, date, ..."


def read_prices(path: Path) -> PriceTable:
    """A person's price table: a CSV file whose first line names the columns.

    ``gpu`` (any name that `fitune gpus` understands) and ``usd_per_hour`` (or another currency's, such as
    ``cny_per_hour``) are needed. ``provider``, ``instance``, ``num_gpus`` (1), ``usd_per_hour_spot``, ``host_ram_gib``,
    ``region``, ``date`` and ``note`` may be there; other columns, and a line without a price, are an error.

    Raises:
        UserError: the file cannot be read, a column is missing or unknown, or a value is none; the line is named.
    """
    rows, columns = _rows(path)
    priced = [match[1] for name in columns if (match := _CURRENCY.fullmatch(name))]
    if len(priced) != 1 or not {"gpu", "gpu_id"} & set(columns):
        lacks = "gpu" if not {"gpu", "gpu_id"} & set(columns) else "usd_per_hour"
        why = f"there is no column {lacks}" if len(priced) < 2 else "it names prices in several currencies"
        raise UserError(f"cannot use the price table {path}", why, HOW)
    known = {"gpu", "gpu_id", "provider", "instance", "num_gpus", f"{priced[0]}_per_hour", f"{priced[0]}_per_hour_spot",
             "host_vcpus", "host_ram_gib", "region", "status", "source", "date", "note"}  # fmt: skip
    unknown = [name for name in columns if name not in known]
    if unknown:
        raise UserError(f"cannot use the price table {path}", f"it has an unknown column {unknown[0]!r}", HOW)
    offers = tuple(_own(path, line, row, priced[0]) for line, row in rows)
    if not offers:
        raise UserError(f"cannot use the price table {path}", "it has no line besides the columns' names", HOW)
    dates = [offer.date for offer in offers if offer.date]
    return PriceTable(offers, path.name, max(dates, default=""), priced[0].upper())


def _rows(path: Path) -> tuple[list[tuple[int, dict[str, str]]], list[str]]:
    """(line number, row) of every line that is not empty, and the columns' names."""
    what = f"cannot read the price table {path}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"no price table at {path}", "the file does not exist", "check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(what, f"it is not UTF-8 text (byte {error.start})", "save it as CSV in UTF-8") from None
    except OSError as error:
        raise UserError(what, str(error.strerror or error), "check the path and its permissions") from None
    try:
        reader = csv.DictReader(text.splitlines(), strict=True)
        columns = [(name or "").strip().lower() for name in reader.fieldnames or ()]
        reader.fieldnames = columns
        rows = [(reader.line_num, row) for row in reader if any(_flat(row.values()))]
    except csv.Error as error:
        raise UserError(what, f"it is not CSV ({error})", HOW) from None
    for line, row in rows:
        if None in row or None in row.values():
            count = "more" if None in row else "fewer"
            raise UserError(what, f"line {line} has {count} values than there are columns", "correct the line")
    return rows, columns


def _flat(values: Iterable[object]) -> list[str]:
    return [str(value).strip() for value in values if value not in (None, [])]


def _own(path: Path, line: int, row: dict[str, str], currency: str) -> Instance:
    """One line of a person's own table."""

    def number(column: str, kind: type = float) -> float | None:
        text = (row.get(column) or "").strip()
        if not text:
            return None
        try:
            value = float(kind(text))
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e9:
            what = "a price or size" if kind is float else "a whole number"
            raise _bad_line(path, line, f"{column} is {text!r}, not {what}", "write a number, such as 0.69")
        return value

    price = number(f"{currency}_per_hour")
    if price is None:
        raise _bad_line(path, line, "there is no price", f"fill in {currency}_per_hour, or leave the line out")
    num_gpus = number("num_gpus", int)
    if num_gpus == 0:
        raise _bad_line(path, line, "num_gpus is 0", "an instance has at least one GPU; leave it empty for 1")
    vcpus = number("host_vcpus", int)
    return Instance(
        provider=(row.get("provider") or "").strip() or "you", instance=(row.get("instance") or "").strip(),
        gpu_id=_gpu_of(path, line, row), num_gpus=int(num_gpus or 1), host_vcpus=None if vcpus is None else int(vcpus),
        host_ram_gib=number("host_ram_gib"), usd_per_hour=price,
        usd_per_hour_spot=number(f"{currency}_per_hour_spot"), region=(row.get("region") or "").strip(), status=OWN,
        source=(row.get("source") or "").strip() or path.name, date=(row.get("date") or "").strip(),
        note=(row.get("note") or "").strip(),
    )  # fmt: skip


def _gpu_of(path: Path, line: int, row: dict[str, str]) -> str:
    name = (row.get("gpu_id") or row.get("gpu") or "").strip()
    if name in _gpus_by_id():
        return name
    try:
        return gpus.find(name)[0].id
    except UserError as error:
        raise _bad_line(path, line, error.what, error.fix or "`fitune gpus` lists all names") from None


def _bad_line(path: Path, line: int, why: str, fix: str) -> UserError:
    return UserError(f"cannot use the price table {path}, line {line}", why, fix)
