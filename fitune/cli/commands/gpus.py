"""`fitune gpus`: the GPUs of this machine and those of the catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fitune.cli.output import console, json_option, print_json
from fitune.errors import EXIT_DONE
from fitune.units import format_bytes

if TYPE_CHECKING:
    from fitune.hardware import Machine


@click.command("gpus")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> int:
    """Show this machine's GPUs and the catalog's.

    With NAME, which may be written loosely (3080, 'RTX 3080 10GB', 'NVIDIA GeForce RTX 3080'), that card alone.
    """
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
