"""`fitune train`: plan, then fine-tune; or continue a run."""

from __future__ import annotations

from typing import Any, Literal

import click

from fitune.cli import api
from fitune.cli.options import SettingsCommand, given, settings_options
from fitune.cli.output import close_quietly, console, json_option, print_json


@click.command("train", cls=SettingsCommand)
@click.argument("model", required=False)
@click.option("--resume", metavar="RUN", help="Continue this run from its last checkpoint, exactly.")
@click.option("--lang", type=click.Choice(["en", "zh"]), default="en", show_default=True, help="The report's language.")
@json_option
@settings_options()
def command(model: str | None, resume: str | None, lang: Literal["en", "zh"], as_json: bool, **settings: Any) -> int:
    """Plan, then fine-tune; --resume continues a run.

    MODEL is a model id, a folder, a GGUF file, a short name (smollm2) or a recipe file (.yaml), whose settings the
    options override. Ctrl-C saves, and says how to continue. The result lies in the run folder: adapter/ (PEFT
    format) or model/, report.html, and everything that happened in events.jsonl.
    """
    from fitune.cli.progress import Display

    with Display(console(stderr=as_json)) as display:
        result = api.train(model, resume=resume, on_event=display.on_event, lang=lang, **given(settings))
    try:
        if as_json:
            print_json(result)
        else:
            click.echo("\n".join(last_lines(result)))
    except BrokenPipeError:  # nobody reads on; the run is what it is
        close_quietly()
    return int(result["exit_code"])


def last_lines(result: dict[str, Any]) -> list[str]:
    """Where the result is and what to do next."""
    run = result["run"]
    if result["status"] == "done":
        return [f"report: {run}/report.html", f"next:   fitune chat {run}    fitune export {run}"]
    return [f"continue with: fitune train --resume {run}"]
