"""`fitune calibrate`: measures this machine and stores the result, which plans then use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fitune.cli.output import console, json_option, print_json
from fitune.errors import EXIT_DONE, UserError
from fitune.units import format_bytes, format_duration

if TYPE_CHECKING:
    from fitune.hardware import Device, Machine
    from fitune.hardware.calibration import Calibration

_MEMORY = {
    "context_at_start_bytes": "driver's context, at start",
    "context_bytes": "driver's context and kernels, after training steps",
    "workspace_bytes": "workspaces kept by cuBLAS and others",
}
_RATES = {
    "host_to_device_bytes_per_s": ("copy to the card, pinned", "B/s"),
    "device_to_host_bytes_per_s": ("copy from the card, pinned", "B/s"),
    "pageable_host_to_device_bytes_per_s": ("copy to the card, pageable", "B/s"),
    "pageable_device_to_host_bytes_per_s": ("copy from the card, pageable", "B/s"),
    "memory_bytes_per_s": ("memory, read plus written", "B/s"),
    "dequantise_values_per_s": ("4-bit weights unpacked", " values/s"),
    "host_kernel_s": ("one small operation launched", "s"),
    "ram_bytes_per_s": ("host memory, read plus written", "B/s"),
    "disk_read_bytes_per_s": ("disk, first reading", "B/s"),
}
_PREFIXES = tuple(
    (1000.0**power, prefix)
    for power, prefix in zip(range(5, -4, -1), ("P", "T", "G", "M", "k", "", "m", "u", "n"), strict=True)
)


@click.command("calibrate")
@click.option("--devices", metavar="N,...", help="GPUs to measure by index, or cpu  [default: every GPU, else the CPU]")
@click.option("--show", is_flag=True, help="Show what is stored; measure nothing.")
@json_option
def command(devices: str | None, show: bool, as_json: bool) -> int:
    """Measure this machine's cards, link, memory and disk, for better plans.

    Takes a minute or two per card, and stores the result for this machine. An interrupted measurement changes nothing.
    """
    from fitune import hardware
    from fitune.hardware import calibration as stored

    machine = hardware.probe()
    build = hardware.torch_build()
    chosen = _choose(machine, devices)
    if chosen == [None] and devices is None and not show:
        click.echo("note: there is no GPU here: the processor, its memory and the disk are measured", err=True)
    results: list[dict[str, Any]] = []
    for device in chosen:
        if show:
            found = stored.load(device)
            if found is None:
                name = device.name if device else "this machine's CPU"
                raise UserError(f"no calibration of {name}", "", "run `fitune calibrate`")
        else:
            found = _measure(device, machine, quiet=as_json)
        why = found.outdated(device.driver_version if device else None, build.version)
        results.append({**found.as_dict(), "path": str(stored.path_of(device)), "stale": why})
        if not as_json:
            _show(found, str(stored.path_of(device)), why)
    if as_json:
        print_json({"devices": results, "gpu": any(device is not None for device in chosen)})
    return EXIT_DONE


def _choose(machine: Machine, devices: str | None) -> list[Device | None]:
    """The cards that were asked for; None stands for the processor."""
    if devices is None:
        return [*machine.devices] or [None]
    words = [word.strip().lower() for word in devices.split(",") if word.strip()]
    if words == ["cpu"]:
        return [None]
    by_index = {str(device.index): device for device in machine.devices}
    missing = [word for word in words if word not in by_index]
    if missing or not words:
        there = ", ".join(f"{index} ({device.name})" for index, device in by_index.items()) or "none"
        asked = ", ".join(missing) or repr(devices)
        raise UserError(f"no GPU {asked}", f"the GPUs here: {there}", "use indices such as --devices 0, or cpu")
    return [by_index[word] for word in dict.fromkeys(words)]


def _measure(device: Device | None, machine: Machine, quiet: bool) -> Calibration:
    """Measures and stores, saying on stderr what is going on."""
    from fitune import hardware
    from fitune.hardware import calibration as stored
    from fitune.train.calibrate import calibrate

    stored.check_folder()
    if device is not None:
        hardware.check_torch_matches(machine, hardware.torch_build())
    name = device.name if device is not None else "the processor"
    messages = console(stderr=True)
    if messages.is_terminal and not quiet:
        with messages.status(f"measuring {name}") as status:
            found = calibrate(device, machine, lambda what: status.update(f"measuring {name}: {what}"))
    else:
        found = calibrate(device, machine, lambda what: click.echo(f"measuring {name}: {what}", err=True))
    stored.store(found, device)
    return found


def _show(found: Calibration, path: str, why_stale: str | None) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for label, value in rows(found):
        table.add_row(Text(label), Text(value))
    versions = ", ".join(f"{key} {value}" for key, value in found.versions.items() if value)
    click.echo(f"{found.name}, {found.date[:10]} ({versions})")
    console().print(table)
    for note in found.notes:
        click.echo(f"note: {note}")
    if why_stale:
        click.echo(f"note: stale, {why_stale}: run `fitune calibrate` again")
    click.echo(f"measured in {format_duration(found.seconds)}, stored in {path}")


def rows(found: Calibration) -> list[tuple[str, str]]:
    """(what, how much) of every figure that was measured."""
    shown = [
        (label, format_bytes(found.memory[key])) for key, label in _MEMORY.items() if found.memory.get(key) is not None
    ]
    pinned = found.memory.get("pinned_bytes")
    if pinned is not None:
        least = "" if found.memory.get("pinned_bytes_is_limit") else "at least "
        shown.append(("host memory that can be pinned", least + format_bytes(pinned)))
    for precision, flops in (found.rates.get("gemm_flops_per_s") or {}).items():
        shown.append((f"{precision} matrix products", with_prefix(flops, "FLOP/s")))
    for key, (label, unit) in _RATES.items():
        if found.rates.get(key) is not None:
            shown.append((label, with_prefix(found.rates[key], unit)))
    return shown


def with_prefix(value: float, unit: str) -> str:
    """Three digits and a decimal prefix: `55 TFLOP/s`, `6.38 M values/s`, `2.53 us`."""
    scale, prefix = next((pair for pair in _PREFIXES if value >= pair[0] * 0.9995), _PREFIXES[-1])
    return f"{value / scale:.3g} {prefix}{unit}"
