"""`fitune export`: a run's adapter, or the merged model, in a folder of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from fitune.cli.output import console, json_option, print_json
from fitune.errors import EXIT_DONE, UserError
from fitune.units import format_bytes, parse_size


class _WithLaunch(click.Command):
    """`fitune export launch ...` is a command of its own."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["launch"]:
            from fitune.cli.launch import export_command

            return export_command.make_context("export launch", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("export", cls=_WithLaunch)
@click.argument("run")
@click.option("--merged", is_flag=True, help="Write the whole model with the adapter merged into its 16-bit weights.")
@click.option("--best", is_flag=True, help="The checkpoint with the lowest held-out loss instead of the last step.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Format of merged weights.  [default: bf16]")
@click.option("--ram", metavar="SIZE", help="Most host memory a merge may use, in GiB or with a unit.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR",
              help="Where to.  [default: RUN/merged or RUN/export, RUN/best-... with --best]")  # fmt: skip
@json_option
def command(
    run: str, merged: bool, best: bool, dtype: str | None, ram: str | None, out: Path | None, as_json: bool
) -> int:  # fmt: skip
    """Write a run's adapter, or the merged model, to a folder.

    The adapter is in PEFT format. A merge goes layer by layer, into the original 16-bit weights also where the run
    trained on a quantised base.

    \b
    fitune export launch RECIPE    files that start a job on several machines
    """
    if dtype and not merged:
        raise UserError("--dtype needs --merged", "an adapter is written as it was trained", "add --merged")
    try:
        ram_bytes = None if ram is None else parse_size(ram)
    except ValueError as error:
        raise UserError(f"cannot use --ram {ram}", str(error), "for example: --ram 8GiB") from None
    from fitune.export import export_run
    from fitune.train.run_folder import RunFolder

    with progress_bar() as progress:
        written = export_run(
            RunFolder.open_existing(run), merged=merged, best=best, dtype=dtype or "bf16", out=out,
            ram_bytes=ram_bytes, progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(written.as_dict())
    else:
        size = format_bytes(written.size_bytes)
        if written.ram_bytes is not None:
            size += f", with at most {format_bytes(written.ram_bytes)} of tensors in RAM"
        if written.step is not None:
            size += f", as it was after step {written.step}"
        click.echo(f"{written.kind} written to {written.path} ({size})")
    return EXIT_DONE


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes on stderr where that is a terminal, nothing elsewhere."""
    shown = console(stderr=True)
    if not shown.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    with Progress(BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn(), console=shown) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
