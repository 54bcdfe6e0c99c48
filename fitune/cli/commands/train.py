"""`fitune train`: plan, then fine-tune; or continue a run."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from fitune.cli import api, launch
from fitune.cli.options import SettingsCommand, given, settings_options
from fitune.cli.output import close_quietly, console, is_closed_output, json_option, print_json


@click.command("train", cls=SettingsCommand)
@click.argument("model", required=False)
@click.option("--resume", metavar="RUN", help="Continue this run from its last checkpoint, exactly.")
@click.option(
    "--supervise/--no-supervise",
    default=True,
    help="Train in a process of its own that is started again when it is killed; --no-supervise for debugging.  "
    "[default: yes]",
)
@json_option
@settings_options()
@click.pass_obj
def command(
    started: list[str] | None, model: str | None, resume: str | None, supervise: bool, as_json: bool,
    **settings: Any,
) -> int:  # fmt: skip
    """Plan, then fine-tune; --resume continues a run.

    MODEL is a model id, a folder, a GGUF file, a short name (smollm2) or a recipe file (.yaml), whose settings the
    options override. Ctrl-C saves, and says how to continue. The result lies in the run folder: adapter/ (PEFT
    format) or model/, report.html, and everything that happened in events.jsonl.
    """
    from fitune.parallel import world as worlds
    from fitune.train import supervise as supervision

    link = supervision.link()
    if started is not None and worlds.from_environment() is None and supervision.is_possible():
        if supervise and link is None:
            return _supervised(started, as_json, resumes=resume is not None)
        size = launch.wanted(model, resume, given(settings))
        if size > 1:
            return launch.run([*_program(started), *started], size, link)
    from fitune.cli.progress import Display, last_lines

    with Display(console(stderr=as_json)) as display:

        def on_event(event: dict[str, Any]) -> None:
            if link is not None:
                link.on_event(event)
            display.on_event(event)

        supervised = link is not None and link.is_supervised
        result = api.train(model, resume=resume, on_event=on_event, supervised=supervised, **given(settings))
    world = worlds.from_environment()
    if world is not None and world.rank != 0:  # the first process tells it
        return int(result["exit_code"])
    try:
        if as_json:
            print_json(result)
        else:
            click.echo("\n".join(last_lines(result, display.words)))
    except OSError as error:  # nobody reads on; the run is what it is
        if not is_closed_output(error):
            raise
        close_quietly()
    return int(result["exit_code"])


def _supervised(started: list[str], as_json: bool, *, resumes: bool) -> int:
    """This very command again in a process of its own, and after it died one that resumes the run (`resumes`: as the
    command itself does, with what it says of where the run goes on)."""
    from fitune.train.supervise import Supervisor

    program = _program(started)

    def again(folder: Path) -> list[str]:
        more = started if resumes else ["train", "--resume", str(folder), *(["--json"] if as_json else [])]
        return [*program, *more]

    def tell(text: str) -> None:
        with contextlib.suppress(OSError):
            click.echo(text, err=True)

    return Supervisor([*program, *started], again, tell=tell).run()


def _program(started: list[str]) -> list[str]:
    """What stands before fitune's own arguments in the command of this process."""
    return sys.orig_argv[: len(sys.orig_argv) - len(started)]
