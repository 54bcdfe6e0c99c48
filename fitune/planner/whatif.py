"""What would be planned if one thing were different, and how far a card goes: longest record, largest micro-batch,
largest model. Every answer is a plan that was made."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fitune import recipe as recipes
from fitune.catalog import models as catalog
from fitune.errors import UserError
from fitune.memory import shipped
from fitune.plan import Plan
from fitune.planner import ladder, make, nofit, positions
from fitune.planner.context import PlanContext, open_context
from fitune.recipe import Recipe

if TYPE_CHECKING:
    from fitune.hardware import Machine
    from fitune.planner.result import PlanResult

SHORT = {"seq": "seq_len", "length": "seq_len", "r": "lora_r", "rank": "lora_r", "alpha": "lora_alpha",
         "targets": "lora_targets", "format": "base_format", "bs": "batch", "micro": "micro_batch"}  # fmt: skip
OPEN_WORDS = ("auto", "none", "")  # of a setting that is derived unless it is set
NO_CHANGE = ("data", "eval_data", "out", "log_to", "save_every", "eval_every", "keep_checkpoints", "on_nan", "hub",
             "trust_remote_code", "columns", "eval_share")  # fmt: skip
MOST_TOKENS, TOKENS_STEP = 1 << 20, 128  # of a record: where the search for the longest ends, and what it rounds to
MOST_ROWS = 4096
OFF_CARD = ("stream_from", "resident_layers", "ring_buffers", "head_place", "offload_inputs", "mlp_tiles")


@dataclass(frozen=True)
class WhatIf:
    """The plan under a change; `problem` instead of it where the change cannot be made."""

    changes: dict[str, Any]
    result: PlanResult | None
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        found = self.result
        return {
            "changes": self.changes, "problem": self.problem, "fits": found.fits if found else None,
            "plan": found.plan.with_(predicted={}, reasons=()).as_dict() if found else None,
            "predicted": found.predicted if found else None,
            "nearest_fits": list(found.nearest_fits) if found else [],
        }  # fmt: skip


def parse(text: str) -> dict[str, Any]:
    """`seq=8192` or `seq=8192,batch=4` as settings of a recipe, not validated.

    Raises:
        UserError: it is not of that form, or names no setting that changes a plan.
    """
    pairs = [part.partition("=") for part in re.split(r",(?=\s*[\w-]+\s*=)", text)]
    changes: dict[str, Any] = {}
    for key, equals, value in pairs:
        name = key.strip().lower().replace("-", "_")
        name = SHORT.get(name, name)
        if not equals or not name:
            raise UserError(f"cannot read --what-if {text!r}", "it is not of the form setting=value",
                            "write --what-if seq=8192, or --what-if seq=8192,batch=4")  # fmt: skip
        if name not in Recipe.model_fields or name in NO_CHANGE:
            names = [n for n in (*Recipe.model_fields, *SHORT) if n not in NO_CHANGE]
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            known = name in Recipe.model_fields
            why = "it changes nothing in a plan" if known else "it is not a setting of a recipe"
            fix = f"did you mean {close[0]}?" if close else "name a setting, for example seq_len, batch, method or gpu"
            raise UserError(f"cannot ask what if {key.strip()!r}", why, fix)
        is_open = Recipe.model_fields[name].default is None and value.strip().lower() in OPEN_WORDS
        changes[name] = None if is_open else value.strip()
    return changes


def changed(recipe: Recipe, changes: dict[str, Any], source: str = "--what-if") -> Recipe:
    """A recipe with other settings. Unlike `Recipe.with_` it keeps which settings the person set.

    Raises:
        UserError: an impossible value, or settings that contradict each other.
    """
    given = {name: getattr(recipe, name) for name in recipe.model_fields_set}
    return recipes.build(given | changes, source)


def ask(recipe: Recipe, questions: Iterable[str], machine: Machine | None = None) -> list[WhatIf]:
    """A plan for each question (see `parse`), on the same machine unless it asks for another.

    Raises:
        UserError: a question that is none. What cannot be planned is an answer, not an error.
    """
    answers = []
    for changes in [parse(question) for question in questions]:
        wanted = changed(recipe, changes)
        here = machine if not {"gpu", "ram"} & changes.keys() else None
        try:
            result = make.make_plan(wanted, here, detailed=True)
            answers.append(WhatIf(changes, result))
        except UserError as error:
            answers.append(WhatIf(changes, None, ": ".join(filter(None, (error.what, error.why)))))
    return answers


# ---- limits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limit:
    """The most of one thing that still fits, the rest being as it is. `plan` is the plan there; None: not even the
    least of it fits. `value` is tokens, rows or a model's name; `is_end`: the search ended there, more may fit."""

    what: str
    value: int | str | None
    plan: Plan | None
    peak_bytes: int | None
    is_end: bool = False

    def as_dict(self) -> dict[str, Any]:
        plan = self.plan.with_(predicted={}, reasons=()).as_dict() if self.plan else None
        return {"what": self.what, "value": self.value, "peak_bytes": self.peak_bytes, "is_end": self.is_end,
                "plan": plan}  # fmt: skip


def limits(recipe: Recipe, machine: Machine | None = None) -> list[Limit]:
    """Longest record, largest micro-batch and largest model of the catalog for this job's card.

    The longest record is as far as memory goes: positions that the model has not learned need `--rope-scaling`.

    Raises:
        UserError: as `make_plan`.
    """
    context = open_context(recipe, machine)
    return [_longest(context), _most_rows(context), _largest_model(context)]


def _fitting(context: PlanContext, changes: dict[str, Any], config: Any = None) -> ladder.Candidate | None:
    """The best that fits under a change; None when nothing does."""
    return nofit.fits_with(context, changes, config=config)


Most = tuple[int, ladder.Candidate | None]


def _most(ask_for: Callable[[int], ladder.Candidate | None], step: int, end: int) -> Most:
    """The largest multiple of `step` up to `end` that fits: doubled until it does not, then halved in between. Memory
    grows with what is asked for."""
    low, best, high = 0, None, step
    while high <= end:
        found = ask_for(high)
        if found is None:
            break
        low, best, high = high, found, 2 * high
    if best is None or high > end:
        return low, best
    while high - low > max(step, low // 32 // step * step):
        middle = (low + high) // 2 // step * step
        found = ask_for(middle)
        if found is None:
            high = middle
        else:
            low, best = middle, found
    return low, best


def _limit(what: str, value: int, found: ladder.Candidate | None, end: int) -> Limit:
    if found is None:
        return Limit(what, None, None, None)
    return Limit(what, value, found.plan, found.peak_bytes, value >= end)


def _longest(context: PlanContext) -> Limit:
    end = MOST_TOKENS
    if not getattr(context.config, "rope_parameters", None):  # learned positions end where they end
        end = min(end, positions.num_positions(context.config) or end)
    tokens, found = _most(lambda n: _fitting(context, {"seq_len": n}), TOKENS_STEP, end)
    return _limit("seq_len", tokens, found, end)


def _most_rows(context: PlanContext) -> Limit:
    rows, found = _most(
        lambda n: _fitting(context, {"micro_batch": n, "batch": max(n, context.recipe.batch)}), 1, MOST_ROWS
    )
    return _limit("micro_batch", rows, found, MOST_ROWS)


def _largest_model(context: PlanContext) -> Limit:
    """Of the models whose steps ship as traces: others would have to be traced first, which takes minutes."""
    own = _fitting(context, {})
    shapes = sorted((s for s in catalog.all_models() if not s.moe), key=lambda s: s.params_total)
    known = [(s, c) for s in shapes if (c := shipped.catalog_config(s.id)) is not None]
    low, best, name, high = 0, None, None, len(known)
    while low < high:
        middle = (low + high) // 2
        shape, config = known[middle]
        if own is not None and not _ships(own.plan, config):
            del known[middle]
            high -= 1
            continue
        found = _fitting(context, {"model": shape.id}, config)
        if found is None:
            high = middle
        else:
            low, best, name = middle + 1, found, shape.id
    if best is None:
        return Limit("model", None, None, None)
    return Limit("model", name, best.plan.with_(model=str(name)), best.peak_bytes, low == len(known))


def _ships(plan: Plan, config: Any) -> bool:
    """Whether a plan like this, all of it on the card, of another model of the catalog needs no trace."""
    plain = {name: Plan.__dataclass_fields__[name].default for name in OFF_CARD}
    places = [plan.with_(embedding_place=place, **plain) for place in ("host", "device")]
    return any(shipped.find(config, one) is not None for one in places)
