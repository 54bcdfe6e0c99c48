"""`fitune runs`: the runs below a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fitune.cli.output import console, json_option, print_json
from fitune.errors import EXIT_DONE
from fitune.units import format_bytes, format_duration


@click.command("runs")
@click.argument("folder", required=False, default="runs", type=click.Path(path_type=Path))
@json_option
def command(folder: Path, as_json: bool) -> int:
    """List the runs of a folder.

    FOLDER is ./runs when it is not given. The newest run comes first; one that was killed or cannot be read says so.
    """
    from fitune.train.run_folder import list_runs

    infos = list_runs(folder)
    if as_json:
        print_json([info.as_dict() for info in infos])
    elif not infos:
        click.echo(f"no runs in {folder}; `fitune train` starts one, `fitune runs FOLDER` looks elsewhere")
    else:
        _show(infos)
    return EXIT_DONE


def _show(infos: list[Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("run", "status", "model", "method", "steps", "loss", "held out", "time", "size"):
        table.add_column(heading, overflow="fold")
    for info in infos:
        held_out = [f"{loss:.3f}" for loss in (info.eval_loss_before, info.eval_loss_after) if loss is not None]
        cells = (
            info.name, info.status + (f": {info.problem}" if info.problem else ""), info.model or "", info.method or "",
            f"{info.steps_done}/{info.steps_total}" if info.steps_total else str(info.steps_done),
            "" if info.last_loss is None else f"{info.last_loss:.3f}", " to ".join(held_out),
            "" if info.duration_s is None else format_duration(info.duration_s), format_bytes(info.size_bytes),
        )  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells))
    console().print(table)
    for info in infos:
        if info.recovered:
            console().print(Text(f"{info.name}: {info.recovered}"), soft_wrap=True)
