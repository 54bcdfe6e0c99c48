"""How several GPUs work together on a job: every way that is accepted is searched, the planner's rule takes one.

A way's candidates are those of one rank (`sharing`), found by the search for one card; their times are of the same
step, so that they compare with each other and with one GPU alone. The rule is the ladder's: the fastest that fits,
within 5 % the lowest rung; what the person named (`--parallel`) is the only way that is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fitune import plan as plans
from fitune.errors import UserError
from fitune.memory.constants import HEADROOM
from fitune.memory.phases import Prediction, needed_bytes
from fitune.parallel.world import SAME_RECORDS
from fitune.plan import Plan, Reason
from fitune.planner import choose, finish, ladder, mixed, sharing, ways
from fitune.planner.context import REPLAY_MARGIN, PlanContext
from fitune.planner.phases import phases_of, rank_phases, times_of, together, with_phases
from fitune.planner.result import PlanResult
from fitune.planner.target import Target, choose_target
from fitune.planner.ways import ALL_RECORDS, Layout
from fitune.recipe import LAYOUTS, QUANTISED_FORMATS, Recipe
from fitune.units import format_bytes

if TYPE_CHECKING:
    from fitune.hardware import Device, Machine
    from fitune.planner.choose import Tried

MOST_CHECKS = 3  # chosen plans of one way that the allocator's replay may refuse before the others are left
ANY = "any"  # the effort that accepts every way


@dataclass(frozen=True)
class Ranks:
    """Processes that have been started already, each with a GPU of its own.

    Attributes:
        cards: theirs, by rank; none: all have one like this process' own.
    """

    size: int
    per_node: int
    cards: tuple[Device, ...] = ()


@dataclass
class Outcome:
    """What became of one way.

    Attributes:
        refused: why it cannot do the job at all.
        accepted: the planner may take it (`--effort`).
    """

    way: str
    context: PlanContext
    found: list[ladder.Candidate]
    tried: Tried
    refused: str | None = None
    accepted: bool = True

    @property
    def size(self) -> int:
        return self.context.layout.size


# ---- the cards -------------------------------------------------------------------------------------------------------


def targets_of(recipe: Recipe, machine: Machine, ranks: Ranks | None = None) -> tuple[Target, ...]:
    """The cards (or, for started processes, what each of them has) that share a job; one or none: it is not shared.
    On the CPU only as many processes as are asked for share it.

    Raises:
        UserError: a GPU that is not there, or more processes than GPUs or records.
    """
    if ranks is not None:
        own = choose_target(recipe, machine)
        each = [choose_target(recipe, replace(machine, devices=(card,))) for card in ranks.cards]
        return tuple(each or [own] * ranks.size)
    if recipe.parallel == "none" or recipe.nproc == 1:
        return ()
    wanted = [part.strip() for part in (recipe.devices or "").split(",") if part.strip()]
    if recipe.nproc is not None:
        check_records(recipe, recipe.nproc)
    if wanted == ["cpu"] or not machine.devices:
        return (choose_target(recipe, machine),) * (recipe.nproc or 0)
    indices = wanted or [str(device.index) for device in machine.devices]
    if recipe.nproc is not None:
        if recipe.nproc > len(indices):
            more = f", or plan for more cards: --gpu {recipe.nproc}xNAME" if machine.assumptions else ""
            raise UserError(f"cannot use {recipe.nproc} GPUs", f"{len(indices)} are there",
                            f"use --nproc {len(indices)}{more}")  # fmt: skip
        indices = indices[: recipe.nproc]
    return tuple(choose_target(recipe.with_(devices=index, nproc=None), machine) for index in indices)


def check_records(recipe: Recipe, size: int) -> None:
    """Raises UserError where a step has not a record for each of so many processes."""
    if recipe.batch < size and recipe.parallel not in SAME_RECORDS:
        raise UserError(f"{size} processes cannot share a batch of {recipe.batch}",
                        "each needs at least one record of a step",
                        f"use --nproc {recipe.batch}, or a larger --batch")  # fmt: skip


def _worst(targets: Sequence[Target], layout: Layout) -> Target:
    """One rank's card that stands for all: the least memory, and only what all of them can compute."""
    least = min(targets, key=lambda target: target.budget_bytes)
    on_cpu = least.device == "cpu"  # one memory for all processes of a machine
    return replace(
        least,
        budget_bytes=least.budget_bytes // (layout.per_node if on_cpu else 1),
        name=targets[0].name,
        bf16=all(t.bf16 for t in targets),
        flash=all(t.flash for t in targets),
        num_ranks=layout.size,
        ram_bytes=min(t.ram_bytes for t in targets),
        pinned_bytes=min(t.pinned_bytes for t in targets),
        notes=(),
    )


def notes_of(context: PlanContext, targets: Sequence[Target]) -> list[str]:
    """What was assumed of the links, and what cards that are not alike mean."""
    names = [target.name for target in targets]
    notes = []
    if context.machine is not None and targets[0].device == "cuda":
        from fitune.speed import links

        own = {device.name: device.link_bytes_per_s for device in context.machine.devices}
        notes.append(links.links_of(names, [own.get(name) for name in names]).sentence)
    least, most = (f(targets, key=lambda t: t.budget_bytes) for f in (min, max))
    if ways.alike(names) and most.budget_bytes > least.budget_bytes:
        notes.append(f"the GPU with the least room sets the memory: {format_bytes(least.budget_bytes)}")
    return notes


# ---- every way -------------------------------------------------------------------------------------------------------


def ways_of(recipe: Recipe, *, fixed: bool) -> dict[str, bool]:
    """The ways to look at, in the order of the ladder, and whether each may be taken. ddp's search streams too.
    `fixed`: how many processes there are is decided."""
    if recipe.parallel != "auto":
        return {recipe.parallel: True}
    accepted = LAYOUTS[recipe.effort]
    return {way: way in accepted for way in LAYOUTS[ANY] if way != "streamed" and not (way == "none" and fixed)}


def _context(base: PlanContext, targets: Sequence[Target], way: str, per_node: int | None) -> PlanContext:
    """A rank's context: its share of a step's records, its card, what it shares of the machine."""
    recipe, count = base.recipe, len(targets)
    if way == "none":  # the card that one process takes by itself
        best = targets[0] if recipe.devices else max(targets, key=lambda target: target.budget_bytes)
        return _alike(base, recipe, best, Layout(batch=recipe.batch))
    size = count if way in ALL_RECORDS or per_node is not None else min(count, recipe.batch)
    layout = Layout(way, size, tuple(t.name for t in targets[:size]), per_node or size, recipe.batch)
    share = layout.share(recipe.batch)
    micro_batch = None if recipe.micro_batch is None else min(recipe.micro_batch, share)
    made = _alike(base, recipe.with_(batch=share, micro_batch=micro_batch), _worst(targets[:size], layout), layout)
    made.targets, made.whole = tuple(targets[:size]), base
    if base.data is not None and layout.shares_records:
        tokens = max(base.data.longest_tokens, -(-base.data.most_step_tokens // size))
        made.data = replace(base.data, most_step_tokens=tokens)
    return made


def _alike(base: PlanContext, recipe: Recipe, target: Target, layout: Layout) -> PlanContext:
    return PlanContext(recipe, target, base.config, base.seq_len, base.data, [], base.tracers, base.machine,
                       layout=layout)  # fmt: skip


def outcome(base: PlanContext, targets: Sequence[Target], way: str, per_node: int | None = None) -> Outcome:
    """The search of one way.

    Raises:
        UserError: settings that contradict each other.
    """
    context = _context(base, targets, way, per_node)
    why = sharing.refused(context, way, context.layout.size) if context.layout.size > 1 else None
    if context.layout.size == 1 and way != "none":
        why = "a step has one record"
    if why is not None:
        return Outcome(way, context, [], [], why)
    return Outcome(way, context, *_searched(context))


def _searched(context: PlanContext) -> tuple[list[ladder.Candidate], Tried]:
    way = context.layout.way
    formats = [f for f in choose.base_formats(context) if way != "zero3" or f not in QUANTISED_FORMATS]
    found, tried = choose.choose(context, formats)
    return mixed.searched(context, found, tried), tried


def plan_together(
    base: PlanContext, targets: Sequence[Target], *, ranks: Ranks | None = None, detailed: bool = False
) -> PlanResult:  # fmt: skip
    """The plan for several GPUs; `base`: the whole job's context.

    Raises:
        UserError: the way that was asked for cannot do this job.
    """
    recipe = base.recipe
    per_node = recipe.nproc if ranks is None else ranks.per_node
    outcomes = [
        replace(outcome(base, targets, way, per_node), accepted=accepted)
        for way, accepted in ways_of(recipe, fixed=per_node is not None).items()
    ]  # fmt: skip
    if all(o.refused for o in outcomes):
        first = outcomes[0]
        raise UserError(f"--parallel {first.way} cannot do this job", first.refused or "", "use --parallel auto")
    chosen, predictions = _chosen(outcomes, detailed)
    base.notes += notes_of(base, targets)
    if chosen is None:
        return _no_fit(base, outcomes, detailed)
    replayed = detailed and chosen[1].draft.parallel in ways.REPLAYED
    base.notes += finish.budget_note(chosen[0].context.target, REPLAY_MARGIN if replayed else HEADROOM)
    found, candidate = chosen
    if candidate.draft.parallel in ways.ZERO and base.machine is not None and base.machine.assumptions:
        base.notes.append(f"ZeRO runs in DeepSpeed, which has to be installed there: {ways.INSTALL}")
    if found.size < len(targets):
        base.notes.append(f"{found.size} of {len(targets)} GPUs in use: more would not be faster")
    rows = table(outcomes, candidate, recipe)
    others = [c for c in found.found if c is not candidate]
    result = finish.result(found.context, candidate, others, found.tried, fits=True)
    plan = mixed.with_shares(found.context, result.plan)
    result = replace(result, plan=plan)
    if detailed:
        one = together(found.context, predictions, plan) if plan.shares else predictions[0]
        timed = tuple(_timed(found.context, entry) for entry in result.alternatives)
        result = replace(with_phases(found.context, result, one), alternatives=timed)
    needed = [needed_bytes(prediction.most) for prediction in predictions]
    result = replace(result, plan=mixed.predicted(found.context, result.plan, needed))
    rows = _with_prediction(rows, result)
    return _whole(base, found, result, rows)


def _timed(context: PlanContext, entry: dict[str, Any]) -> dict[str, Any]:
    """An alternative with the time of its step; its plan has a rank's batch still, shares are of the whole one."""
    own = entry["plan"]["batch"]
    plan = plans.from_dict(entry["plan"] | {"batch": context.layout.batch or own}).with_(batch=own)
    return entry | {"predicted": entry["predicted"] | times_of(context, mixed.with_shares(context, plan))}


def _chosen(
    outcomes: list[Outcome], detailed: bool
) -> tuple[tuple[Outcome, ladder.Candidate] | None, list[Prediction]]:
    """(way and candidate, its predictions where they were made: one, or each rank's where they have shares of their
    own). One that the allocator's replay refuses on any card is searched again with less room."""
    checks: Counter[str] = Counter()
    while True:
        left = [o for o in outcomes if o.accepted and checks[o.way] < MOST_CHECKS]
        owner = {id(c): o for o in left for c in o.found}
        ordered = ladder.ordered([c for o in left for c in o.found])
        if not ordered:
            return None, []
        best = ordered[0]
        found = owner[id(best)]
        if not detailed:
            return (found, best), []
        context = found.context
        plan = mixed.with_shares(context, best.plan)
        made = rank_phases(context, plan) if plan.shares else [phases_of(context, plan)]
        owns = [context.of_rank(rank, share.records) for rank, share in enumerate(plan.shares)] or [context]
        excess = max(needed_bytes(p.most) - own.allowed_bytes for p, own in zip(made, owns, strict=True))
        replayed = best.draft.parallel in ways.REPLAYED  # sums keep to a lower limit, which the search has met
        if not replayed or excess <= 0:
            return (found, best), made
        # as for one GPU: this way once more, with as much less room as the replay needs more
        checks[found.way] += 1
        context.held_back += max(0, context.limit_bytes - best.peak_bytes) + excess
        found.found, found.tried = _searched(context)


def _no_fit(base: PlanContext, outcomes: list[Outcome], detailed: bool) -> PlanResult:
    """The way that needs least, with what would fit."""
    leasts = [(_least(o), o) for o in outcomes if o.accepted and o.refused is None]
    least, found = min(leasts, key=lambda pair: pair[0].peak_bytes - pair[1].context.limit_bytes)
    base.notes += finish.budget_note(found.context.target, HEADROOM)
    others = [pair for pair in found.tried if pair[0].base_format != least.draft.base_format]
    result = finish.result(found.context, least, [], others, fits=False)
    if detailed:
        result = with_phases(found.context, result)
    more = [_more_effort(o) for o in outcomes if o.found and not o.accepted]
    result = replace(result, nearest_fits=(*more, *result.nearest_fits))
    return _whole(base, found, result, table(outcomes, None, base.recipe))


def _least(found: Outcome) -> ladder.Candidate:
    """With the lowest peak; of those that the search found, where the allocator's replay refused them all."""
    if found.tried:
        return choose.least_of(found.context, found.tried)
    return min(found.found, key=lambda candidate: candidate.peak_bytes)


def _more_effort(found: Outcome) -> dict[str, Any]:
    """A way that fits and was not accepted."""
    best = ladder.ordered(found.found)[0]
    return {"change": f"more effort: {ways.named(found.way, found.size, best.draft.device)} (--parallel {found.way})",
            "setting": {"parallel": found.way}, "needs_bytes": best.peak_bytes}  # fmt: skip


def _whole(base: PlanContext, found: Outcome, result: PlanResult, rows: list[dict[str, Any]]) -> PlanResult:
    """A rank's result as that of the job: the whole step's records, and the reason for the way."""
    layout = found.context.layout
    way = ways.named(result.plan.parallel, layout.size, result.plan.device)
    reason = Reason("parallel", way, _why(rows, result.plan))
    share = mixed.reasons(found.context, result.plan) or _share_reason(layout, base.recipe.batch, result.plan.device)
    told = mixed.each_told(result.plan, result.reasons)
    plan, reasons = sharing.settled(result.plan, (*told, reason, *share))
    plan = plan.with_(batch=base.recipe.batch, reasons=reasons, predicted=result.predicted)
    alternatives = tuple(
        entry | {"plan": entry["plan"] | {"batch": base.recipe.batch}} for entry in result.alternatives
    )  # fmt: skip
    return replace(result, plan=plan, reasons=reasons, alternatives=alternatives, layouts=tuple(rows),
                   notes=tuple(base.notes))  # fmt: skip


def _share_reason(layout: Layout, batch: int, device: str) -> list[Reason]:
    if layout.size == 1 or not layout.shares_records:
        return []
    most = layout.share(batch)
    why = f"what each of {layout.size} GPUs has of a step at most"
    if device == "cpu":
        why = f"what each of {layout.size} processes has of a step at most"
    return [Reason("share", f"{most} of {batch} records", why)]


# ---- why not the others ----------------------------------------------------------------------------------------------


def table(outcomes: Sequence[Outcome], chosen: ladder.Candidate | None, recipe: Recipe) -> list[dict[str, Any]]:
    """A row for each way: layout, GPUs, whether it fits, bytes per card and node, time, and why it was not taken."""
    rows = []
    for found in outcomes:
        context = found.context
        by_way: dict[str, ladder.Candidate] = {}
        for candidate in ladder.ordered(found.found):
            by_way.setdefault(candidate.draft.parallel, candidate)
        if chosen is not None and any(c is chosen for c in found.found):
            by_way[chosen.draft.parallel] = chosen
        for way, candidate in by_way.items():
            row = _row(context, way, candidate, chosen)
            if not found.accepted:
                row["why"] = f"more than --effort {recipe.effort} accepts" + (f"; {row['why']}" if chosen else "")
            rows.append(row)
        if found.way not in by_way:
            rows.append(_rejected(found))
    return sorted(rows, key=lambda row: not row["chosen"])


_EMPTY: dict[str, Any] = dict.fromkeys(
    ("layout", "num_gpus", "needed_bytes", "budget_bytes", "host_bytes", "step_s", "tokens_per_s", "exchange_s",
     "base_format", "cards", "why")
) | {"fits": False, "chosen": False}  # fmt: skip


def _row(
    context: PlanContext, way: str, candidate: ladder.Candidate, chosen: ladder.Candidate | None
) -> dict[str, Any]:  # fmt: skip
    plan, target = candidate.plan, context.target
    time = context.step_time(plan)
    extra = target.overheads
    return _EMPTY | {
        "layout": way, "num_gpus": context.layout.size, "cards": _cards(context), "fits": True,
        "chosen": candidate is chosen,
        "needed_bytes": candidate.peak_bytes + extra.context_bytes + extra.workspace_bytes,
        "budget_bytes": target.budget_bytes, "base_format": plan.base_format,
        "step_s": time.step_s if time.basis != "unknown" else None,
        "tokens_per_s": time.tokens_per_s if time.basis != "unknown" else None,
        "exchange_s": time.parts.get("exchange", 0.0),
        "why": ways.MEANING[way] if candidate is chosen or chosen is None else _against(candidate, chosen),
    }  # fmt: skip


def _cards(context: PlanContext) -> list[str]:
    return list(context.layout.names or (context.target.name,))


def _against(other: ladder.Candidate, chosen: ladder.Candidate) -> str:
    share = round(100 * (other.cost / chosen.cost - 1))
    if share > 0:
        return f"{share} % slower"
    how = "as fast" if share == 0 else f"only {-share} % faster"
    return f"{how}, and further up the ladder"


def _rejected(found: Outcome) -> dict[str, Any]:
    row = _EMPTY | {"layout": found.way, "num_gpus": found.size, "cards": _cards(found.context)}
    row |= {"budget_bytes": found.context.target.budget_bytes}
    if found.refused is not None or not found.tried:
        return row | {"why": found.refused or "only streamed"}
    extra = found.context.target.overheads
    if found.way == "ddp":  # what streams has a row of its own, or no room either
        least = min((c for _, c in found.tried), key=lambda c: c.peak_bytes)
    else:
        least = choose.least_of(found.context, found.tried)
    needed = least.peak_bytes + extra.context_bytes + extra.workspace_bytes
    budget = found.context.target.budget_bytes
    room = format_bytes(int(budget * (1 - HEADROOM)))
    why = f"{least.draft.base_format} needs at least {format_bytes(needed)} on each card, {room} of " + \
          f"{format_bytes(budget)} may be used"  # fmt: skip
    return row | {"needed_bytes": needed, "base_format": least.draft.base_format, "why": why}


def _with_prediction(rows: list[dict[str, Any]], result: PlanResult) -> list[dict[str, Any]]:
    """The chosen row with what the phases give."""
    known = result.predicted
    changes = {"host_bytes": known.get("host_bytes")}
    if known.get("device_bytes") is not None:
        changes["needed_bytes"] = known["device_bytes"]
    return [row | changes if row["chosen"] else row for row in rows]


def _why(rows: Sequence[dict[str, Any]], plan: Plan) -> str:
    """What the way is, and the nearest rival's fault."""
    sentences = [ways.MEANING[plan.parallel]]
    for row in rows if any(row["chosen"] for row in rows) else ():  # where nothing fits each row says what it needs
        if row["layout"] in ("none", "ddp", "streamed", "fsdp2") and not row["chosen"] and row["why"]:
            sentences.append(f"{row['layout']}: {row['why']}")
    return "; ".join(sentences)
