"""`fitune runs`: the runs below a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fitune.cli.output import console, json_option, lang_option, print_json
from fitune.errors import EXIT_DONE
from fitune.units import format_bytes, format_duration

if TYPE_CHECKING:
    from fitune.cli.words import Words
    from fitune.train.run_folder import RunInfo


@click.command("runs")
@click.argument("folder", required=False, default="runs", type=click.Path(path_type=Path))
@lang_option
@json_option
def command(folder: Path, as_json: bool, lang: str) -> int:
    """List the runs of a folder.

    FOLDER is ./runs when it is not given. The newest run comes first; one that was killed or cannot be read says so.
    Below the table: what a run survived, and what it streamed.
    """
    from fitune.train.run_folder import list_runs

    infos = list_runs(folder)
    if as_json:
        print_json([info.as_dict() for info in infos])
        return EXIT_DONE
    from fitune.cli.words import Words
    from fitune.cli.words_progress import RUNS

    words = Words(lang, RUNS)
    if not infos:
        click.echo(words("none", folder=folder))
    else:
        _show(infos, words)
    return EXIT_DONE


def _show(infos: list[RunInfo], words: Words) -> None:
    from rich.table import Table
    from rich.text import Text

    from fitune.cli.progress import streamed_line
    from fitune.planner.sentences import duration

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("run", "status", "model", "method", "steps", "loss", "held_out", "time", "size"):
        table.add_column(words(heading), overflow="fold")
    for info in infos:
        held_out = [f"{loss:.3f}" for loss in (info.eval_loss_before, info.eval_loss_after) if loss is not None]
        changed = words("from_to", before=held_out[0], after=held_out[1]) if len(held_out) == 2 else "".join(held_out)
        status = words(info.status)
        time = "" if info.duration_s is None else duration(format_duration(info.duration_s), words.lang)
        cells = (
            info.name, words("line", name=status, text=info.problem) if info.problem else status, info.model or "",
            info.method or "", f"{info.steps_done}/{info.steps_total}" if info.steps_total else str(info.steps_done),
            "" if info.last_loss is None else f"{info.last_loss:.3f}", changed, time, format_bytes(info.size_bytes),
        )  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells))
    console().print(table)
    for info in infos:
        for line in (info.recovered, streamed_line(info.as_dict(), words.lang)):
            if line:
                console().print(Text(words("line", name=info.name, text=line)), soft_wrap=True)
