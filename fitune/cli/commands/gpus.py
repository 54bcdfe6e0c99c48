"""`fitune gpus`: the GPUs of this machine and the catalog's; with a model, which of them do a job and for how much."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fitune.cli.options import SettingsCommand, given, settings_options
from fitune.cli.output import console, json_option, lang_option, print_json
from fitune.errors import EXIT_DOES_NOT_FIT, EXIT_DONE, UserError
from fitune.units import format_bytes

if TYPE_CHECKING:
    from fitune.hardware import Machine

# Settings that change nothing in which card does a job: where a run writes, and what this machine has.
NOT_ASKED = ("log_to", "out", "save_every", "eval_every", "keep_checkpoints", "on_nan", "lang", "gpu", "devices",
             "nproc", "parallel", "vram")  # fmt: skip
_COUNT = re.compile(r"([0-9]*\.?[0-9]+)\s*([kmb]?)", re.IGNORECASE)
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}


@click.command("gpus", cls=SettingsCommand)
@click.argument("name", required=False, metavar="[GPU | MODEL]")
@click.option("--tokens", metavar="N", help="Tokens of one pass, instead of --data: 5M, 1.2B.")
@click.option("--max-cost", type=float, metavar="AMOUNT", help="Only what costs at most this much, in all.")
@click.option("--max-hours", type=float, metavar="HOURS", help="Only what is done in this time.")
@click.option("--prices", type=click.Path(path_type=Path), metavar="FILE",
              help="Your own price table (CSV) instead of fitune's.")  # fmt: skip
@click.option("--among", metavar="NAMES", help="Only these GPUs: 3090,4090,h100.")
@click.option("--top", type=int, default=None, metavar="N", help="How many choices to show (default 10).")
@lang_option
@json_option
@settings_options(leave_out=NOT_ASKED)
def command(
    name: str | None, tokens: str | None, max_cost: float | None, max_hours: float | None, prices: Path | None,
    among: str | None, top: int | None, lang: str, as_json: bool, **settings: Any,
) -> int:  # fmt: skip
    """Show this machine's GPUs and the catalog's, or say which GPU does a job.

    With the name of a GPU, which may be written loosely (3080, 'RTX 3080 10GB'), that card alone. With a MODEL (or a
    recipe file): which cards do the job of --data, how fast, and for how much money. Needs no network for the models
    of the catalog. Exit code 3 where no card does it, or none within the limits.
    """
    job = given(settings)
    limits = {"tokens": tokens, "max-cost": max_cost, "max-hours": max_hours, "prices": prices, "among": among}
    named = [*(f"--{key}" for key, value in limits.items() if value is not None), *(f"--{key}" for key in job)]
    if name is not None and (named or not _is_card(name)):
        return _advise(name, job, _tokens(tokens), max_cost, max_hours, prices, among, _top(top), lang, as_json)
    if named:
        raise UserError(f"{named[0].replace('_', '-')} needs a model", "it is about a job, and no model is named",
                        "write `fitune gpus MODEL --data FILE`")  # fmt: skip
    return _show_catalog_of(name, as_json)


def _is_card(name: str) -> bool:
    """Whether a name is a card's and not a model's.

    Raises:
        UserError: it is neither.
    """
    from fitune.catalog import gpus, models
    from fitune.cli.api import RECIPE_SUFFIXES

    if models.find(name.removeprefix("random:")) or name.lower().endswith(RECIPE_SUFFIXES) or Path(name).exists():
        return False
    try:
        gpus.find(name)
    except UserError as error:
        if "/" in name:
            return False  # a model of a hub
        close = models.nearest(name)
        more = f"; models of the catalog like it: {', '.join(close)}" if close else ""
        raise UserError(error.what.replace("unknown GPU", "no GPU and no model is called"), "", error.fix + more
                        ) from None  # fmt: skip
    return True


def _tokens(text: str | None) -> float | None:
    """`5M` as 5e6.

    Raises:
        UserError: it is no number.
    """
    if text is None:
        return None
    match = _COUNT.fullmatch(text.strip().replace(",", ""))
    if not match:
        raise UserError(f"cannot read --tokens {text!r}", "it is not a positive number",
                        "write it as 5000000, 5M or 1.2B")  # fmt: skip
    return float(match[1]) * _SCALES[match[2].lower()]


def _top(top: int | None) -> int:
    from fitune.cli.render_gpus import TOP

    if top is not None and top < 1:
        raise UserError(f"--top {top} shows nothing", "it has to be at least 1", "leave it out for the first 10")
    return top or TOP


def _advise(
    model: str, settings: dict[str, Any], tokens: float | None, max_cost: float | None, max_hours: float | None,
    prices: Path | None, among: str | None, top: int, lang: str, as_json: bool,
) -> int:  # fmt: skip
    from fitune.catalog import gpus
    from fitune.catalog.clouds import read_prices
    from fitune.cli import api
    from fitune.planner.advise import advise

    table = read_prices(prices) if prices is not None else None
    cards = [card for card, _ in gpus.parse(among)] if among is not None else None
    recipe = api.make_recipe(model, settings)
    if tokens is not None and recipe.data is not None:
        raise UserError("--tokens and --data contradict each other", "both say how long the job is",
                        "leave one of them out")  # fmt: skip
    advice = advise(recipe, tokens=tokens, max_cost=max_cost, max_hours=max_hours, prices=table, among=cards,
                    tell=_tell)  # fmt: skip
    if as_json:
        print_json(advice.as_dict())
    else:
        from fitune.cli.render_gpus import show_advice

        show_advice(console(), advice, lang, top)
    return EXIT_DONE if advice.within else EXIT_DOES_NOT_FIT


def _tell(sentence: str) -> None:
    click.echo(sentence, err=True)


# ---- the catalog -----------------------------------------------------------------------------------------------------


def _show_catalog_of(name: str | None, as_json: bool) -> int:
    """This machine and all cards, or one card."""
    from fitune.catalog import gpus

    if name is not None:
        card, note = gpus.find(name)
        if as_json:
            print_json({**card.as_dict(), "choice": note})
        else:
            _show_one(card, note)
        return EXIT_DONE
    from fitune.hardware import probe

    machine, cards = probe(), gpus.all_gpus()
    if as_json:
        print_json({"machine": machine.as_dict(), "catalog": [card.as_dict() for card in cards]})
    else:
        _show_machine(machine)
        _show_catalog(cards)
    return EXIT_DONE


def _show_machine(machine: Machine) -> None:
    for device in machine.devices:
        link = f", {device.link_bytes_per_s / 1e9:.0f} GB/s to the host" if device.link_bytes_per_s else ""
        sizes = f"{format_bytes(device.free_bytes)} of {format_bytes(device.usable_bytes)} free"
        click.echo(f"GPU {device.index}: {device.name}, {sizes}{link}")
    if not machine.devices:
        click.echo("no GPU in this machine: training runs on the CPU")
    ram = f"{format_bytes(machine.ram_available_bytes)} of {format_bytes(machine.ram_total_bytes)} available"
    click.echo(f"RAM: {ram}; {machine.num_cpus:g} processors")
    for note in machine.notes:
        click.echo(f"note: {note}")
    click.echo()


def _show_one(card: Any, note: str | None) -> None:
    if note:
        click.echo(f"note: {note}")
    click.echo(card.name)
    values = card.as_dict()
    skip = ("name", "aliases", "id")
    for key, value in values.items():
        if key not in skip and value not in (None, ""):
            shown = format_bytes(value) if key.endswith("_bytes") else value
            click.echo(f"  {key.replace('_', ' '):24} {shown}")


def _show_catalog(cards: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("card")
    for heading in ("usable", "memory GB/s", "bf16 TFLOP/s", "PCIe", "year"):
        table.add_column(heading, justify="right", no_wrap=True)
    for card in cards:
        table.add_row(
            Text(card.name), format_bytes(card.usable_bytes), f"{card.memory_gb_per_s:,.0f}",
            f"{card.bf16_tflops:g}" if card.bf16 and card.bf16_tflops else "no bf16" if not card.bf16 else "",
            f"{card.pcie_gen} x{card.pcie_lanes}", str(card.launch_year or ""),
        )  # fmt: skip
    console().print(table)
