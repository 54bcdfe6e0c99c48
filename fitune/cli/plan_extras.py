"""What `fitune plan` shows on request beside the plan: techniques in this job, what-ifs, limits. One place adds the
options and answers them, so that the command itself stays small."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fitune.cli.output import lang_option

if TYPE_CHECKING:
    from rich.console import Console

    from fitune.hardware import Machine
    from fitune.recipe import Recipe

F = TypeVar("F", bound=Callable[..., Any])


def extra_options(function: F) -> F:
    """The options `--explain`, `--what-if`, `--limits` and `--lang`."""
    function = lang_option(function)
    function = click.option("--limits", is_flag=True,
                            help="Also the longest record, the largest micro-batch and model.")(function)  # fmt: skip
    function = click.option("--what-if", "what_if", multiple=True, metavar="K=V[,K=V]",
                            help="Also the plan with other settings, side by side; repeatable.")(function)  # fmt: skip
    return click.option("--explain", is_flag=True,
                        help="Also each technique of the plan, and the memory it saves here.")(function)  # fmt: skip


def answer(
    recipe: Recipe,
    machine: Machine,
    plan: Mapping[str, Any],
    *,
    explain: bool = False,
    what_if: Sequence[str] = (),
    limits: bool = False,
) -> dict[str, Any]:
    """What was asked for, as `--json` prints it under `explain`, `what_if` and `limits`; nothing that was not.

    Args:
        machine: what `plan` was made for.
        plan: of the recipe, as it is shown.

    Raises:
        UserError: a question that cannot be.
    """
    found: dict[str, Any] = {}
    if explain:
        from fitune.plan import from_dict
        from fitune.planner import effects
        from fitune.planner.context import open_context

        context = open_context(recipe, machine)
        found["explain"] = [effect.as_dict() for effect in effects.effects(context, from_dict(dict(plan)))]
    if what_if or limits:
        from fitune.planner import whatif

        if what_if:
            found["what_if"] = [entry.as_dict() for entry in whatif.ask(recipe, what_if, machine)]
        if limits:
            found["limits"] = [limit.as_dict() for limit in whatif.limits(recipe, machine)]
    return found


def show(console: Console, result: Mapping[str, Any], lang: str) -> None:
    """Prints what `answer` found."""
    if result.get("explain"):
        from fitune.cli.render_techniques import show_techniques

        show_techniques(console, result["explain"], lang)
    if result.get("what_if"):
        from fitune.cli.render_whatif import show_what_if

        show_what_if(console, result, result["what_if"], lang)
    if result.get("limits"):
        from fitune.cli.render_whatif import show_limits

        show_limits(console, result["limits"], lang)
