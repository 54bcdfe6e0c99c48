"""`fitune plan`: what will fit, why, and how much memory each phase needs."""

from __future__ import annotations

from typing import Any

import click

from fitune.cli import api
from fitune.cli.options import SettingsCommand, given, settings_options
from fitune.cli.output import console, json_option, print_json
from fitune.cli.plan_extras import answer, extra_options, show
from fitune.errors import EXIT_DOES_NOT_FIT, EXIT_DONE

# Settings that change nothing in a plan: where a run writes, and how often.
NOT_PLANNED = ("log_to", "out", "save_every", "eval_every", "keep_checkpoints", "on_nan", "lang")


@click.command("plan", cls=SettingsCommand)
@click.argument("model", required=False)
@extra_options
@json_option
@settings_options(leave_out=NOT_PLANNED)
def command(
    model: str | None, as_json: bool, explain: bool, what_if: tuple[str, ...], limits: bool, lang: str, **settings: Any
) -> int:
    """Say what will fit, why, and how much memory each phase needs.

    MODEL is a model id, a folder, a GGUF file, a short name (smollm2) or a recipe file (.yaml), whose settings the
    options override. With --gpu no GPU is needed; for the models of the catalog no network either.
    """
    recipe, machine, planned = api.planned(model, given(settings))
    result = planned.as_dict()
    result |= answer(recipe, machine, result["plan"], explain=explain, what_if=what_if, limits=limits)
    if as_json:
        print_json(result)
    else:
        from fitune.cli.render import show_plan
        from fitune.cli.render_needs import next_line

        show_plan(console(), result, lang)
        show(console(), result, lang)
        if result["fits"]:
            click.echo(next_line(recipe.as_dict(), lang))
    return EXIT_DONE if result["fits"] else EXIT_DOES_NOT_FIT
