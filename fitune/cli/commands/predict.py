"""`fitune predict`: what a recipe needs exactly as it is given, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from fitune.cli import api
from fitune.cli.options import SettingsCommand, given, settings_options
from fitune.cli.output import console, json_option, lang_option, print_json
from fitune.errors import EXIT_DOES_NOT_FIT, EXIT_DONE

# Settings that change nothing in a prediction: where a run writes, and how often. (How often it evaluates: whether
# another tool does so at all.)
NOT_PREDICTED = ("log_to", "out", "save_every", "on_nan", "lang")


@click.command("predict", cls=SettingsCommand)
@click.argument("model", required=False)
@click.option(
    "--stack", metavar="NAME", help="Predict another tool with the same settings: hf-trainer, trl, unsloth, ..."
)
@lang_option
@click.option("--chart", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Also draw phases and step: a file that ends in .svg or .png.")  # fmt: skip
@json_option
@settings_options(leave_out=NOT_PREDICTED)
def command(
    model: str | None, stack: str | None, lang: Literal["en", "zh"], chart: Path | None, as_json: bool, **settings: Any
) -> int:
    """Predict the memory of a recipe exactly as given, in every phase.

    MODEL is a model id, a folder, a GGUF file, a short name (smollm2) or a recipe file (.yaml), whose settings the
    options override. What the recipe leaves open is the plain choice: the whole batch at once, nothing recomputed.
    Shows each phase against the budget, one step part by part, what each technique would take off, and the plan that
    fits. Exit code 3 where the recipe does not fit.
    """
    if chart is not None:
        from fitune.cli.chart import check_path, write_chart

        check_path(chart)  # before the work, not after it
    result = api.predict(model, stack=stack, **given(settings))
    if chart is not None:
        write_chart(result, chart, lang)
    if as_json:
        print_json(result)
    else:
        from fitune.cli.render_predict import show_prediction

        show_prediction(console(), result, lang)
    return EXIT_DONE if result["fits"] else EXIT_DOES_NOT_FIT
