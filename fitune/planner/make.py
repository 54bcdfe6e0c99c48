"""Recipe, model shape and machine in; one plan with its reasons out."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fitune.memory.constants import HEADROOM
from fitune.planner import finish, layouts
from fitune.planner.choose import base_formats, choose, least_of
from fitune.planner.context import REPLAY_MARGIN, open_context
from fitune.planner.layouts import Ranks
from fitune.planner.lengths import DataFacts
from fitune.planner.phases import with_phases
from fitune.planner.result import PlanResult
from fitune.recipe import Recipe

if TYPE_CHECKING:
    from fitune.hardware import Machine


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's garbage collector, which would walk a plan's million events again and again: none of them is in
    a circle, and it takes a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_uncollected()
def make_plan(
    recipe: Recipe,
    machine: Machine | None = None,
    *,
    config: Any = None,
    data: DataFacts | None = None,
    detailed: bool = False,
    notes: Sequence[str] = (),
    ranks: Ranks | None = None,
) -> PlanResult:
    """The plan for a recipe on a machine (this one, or the cards of `--gpu`); where it has several GPUs, for all of
    them together (see `fitune.planner.layouts`).

    Args:
        config: the model's configuration when it is known already; otherwise it is looked up by name, without weights.
        data: lengths of the data when it has been read.
        detailed: also predict every phase of the chosen plan, event for event, with whose the bytes are.
        notes: what `find_machine` said of the machine, where it was asked before.
        ranks: processes that have been started for this job; None: as many as the machine has GPUs for.

    Raises:
        UserError: unknown model or card, contradictory or impossible settings.
    """
    context = open_context(recipe, machine, config=config, data=data, replays=detailed, notes=notes)
    assert context.machine is not None
    targets = layouts.targets_of(recipe, context.machine, ranks)
    if len(targets) > 1:
        return layouts.plan_together(context, targets, ranks=ranks, detailed=detailed)
    context.notes += finish.budget_note(context.target, REPLAY_MARGIN if detailed else HEADROOM)
    found, tried = choose(context, base_formats(context))
    prediction = None
    if detailed:
        found, tried, prediction = finish.replayed(context, found, tried)
    if found:
        result = finish.result(context, found[0], found[1:], tried, fits=True)
    else:
        least = least_of(context, tried)
        others = [pair for pair in tried if pair[0].base_format != least.draft.base_format]
        result = finish.result(context, least, [], others, fits=False)
    if not detailed:
        return result
    return with_phases(context, result, prediction)
