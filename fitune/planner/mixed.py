"""GPUs that are not alike: what each has of a step by its speed, within its own memory.

Where ranks work apart from each other until their gradients are added (`ddp`, `streamed`), each has its own number of
records, micro-batch and recomputed layers: all are to be ready at the same time. A pipeline's stages have layers by
speed and memory. In the other ways all GPUs meet in every layer, and their parts stay equal: the slowest sets the pace,
the least memory the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fitune.memory.layouts import DATA_PARALLEL, REPLICATED
from fitune.plan import Plan, Reason, Share
from fitune.planner import choose, placement, ways
from fitune.planner.context import PlanContext
from fitune.planner.ladder import Candidate

MOST_DRAFTS = 5  # with equal shares the fastest ones, which are searched again with shares by speed
_WORSE = {"none": 0, "shards": 0, "pinned": 1, "pageable": 2, "disk": 3}  # places of streamed weights


def is_mixed(context: PlanContext) -> bool:
    return not ways.alike([target.name for target in context.targets])


def searched(context: PlanContext, found: list[Candidate], tried: choose.Tried) -> list[Candidate]:
    """Of what a search with equal parts has found on the least of the cards, what it is with parts by speed."""
    if not is_mixed(context):
        return found
    if context.layout.way == "pp":
        return _of_pipeline(context, found, tried) or found
    return _by_speed(context, found) or found if context.layout.way in REPLICATED else found


def by_weight(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in whole parts, at least one each, as near to the weights as can be (largest remainders)."""
    free = total - len(weights)
    exact = [max(0.0, total * weight / sum(weights) - 1) for weight in weights]
    exact = [free * part / (sum(exact) or 1.0) for part in exact]
    parts = [int(part) for part in exact]
    for i in sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))[: free - sum(parts)]:
        parts[i] += 1
    return [1 + part for part in parts]


# ---- ranks that work apart ------------------------------------------------------------------------------------------


def _by_speed(context: PlanContext, found: list[Candidate]) -> list[Candidate]:
    best: list[Candidate] = []  # of each draft
    for candidate in sorted(found, key=lambda c: c.cost):
        if all(candidate.draft != other.draft for other in best):
            best.append(candidate)
    tried = best[:MOST_DRAFTS] + [c for c in best[MOST_DRAFTS:] if c.draft.stream_from == "none"][:1]
    made = [_Balance(context, candidate).candidate() for candidate in tried]
    return [candidate for candidate in made if candidate is not None]


class _Balance:
    """Shares of a step under one draft.

    Args:
        like: its fastest candidate with equal shares; its loss chunk is everyone's.
    """

    def __init__(self, context: PlanContext, like: Candidate):
        self.context, self.like = context, like
        names = [(target.name, target.budget_bytes) for target in context.targets]
        self.kinds = [names.index(name) for name in names]  # the first rank with the same card stands for all
        self.total = context.layout.batch or context.recipe.batch
        self._found: dict[tuple[int, int], list[Candidate]] = {}
        self._times: dict[tuple[int, int], float] = {}

    def candidate(self) -> Candidate | None:
        equal = self.total // len(self.kinds)
        alone = [self._seconds(kind, max(1, equal), self.like) for kind in self.kinds]
        records = by_weight(self.total, [1 / seconds for seconds in alone])
        for _ in range(2):  # what fits depends on the share
            if not all(self._options(kind, count) for kind, count in zip(self.kinds, records, strict=True)):
                return None
            before, records = records, self._balanced(records)
            self._times = {}
            if records == before:
                break
        chosen = []
        for kind, count in zip(self.kinds, records, strict=True):
            options = self._options(kind, count)
            if not options:
                return None
            chosen.append(min(options, key=lambda c: (c.cost, c.recompute_layers, -c.micro_batch)))
        return self._together(records, chosen)

    def _together(self, records: list[int], chosen: list[Candidate]) -> Candidate:
        context = self.context
        shares = tuple(
            Share(target.name, target.budget_bytes, count, own.micro_batch, own.recompute_layers)
            for target, count, own in zip(context.targets, records, chosen, strict=True)
        )
        least = chosen[least_of(context)]
        draft = self.like.draft.with_(shares=shares, batch=least.draft.batch)
        made = replace(least, draft=draft)
        return replace(made, cost=context.step_time(made.plan).step_s)

    def _options(self, kind: int, count: int) -> list[Candidate]:
        """What fits on a card with so many records."""
        if (kind, count) not in self._found:
            own = self.context.of_rank(kind, count)
            draft = self.like.draft.with_(batch=count, loss_chunk=self.like.loss_chunk)
            search = replace(choose.search(own, draft), fixed_chunk=True)
            self._found[kind, count] = [c for c in search.fitting(own.limit_bytes) if self._has_room(own, c)]
        return self._found[kind, count]

    def _has_room(self, own: PlanContext, candidate: Candidate) -> bool:
        settled = choose.settled(own, candidate)
        return settled is not None and _WORSE[settled.draft.stream_from] <= _WORSE[candidate.draft.stream_from]

    def _balanced(self, records: list[int]) -> list[int]:
        """One record after the other goes from the slowest rank to where it makes the step shortest."""
        options = {kind: self._options(kind, count) for kind, count in zip(self.kinds, records, strict=True)}

        def seconds(counts: Sequence[int]) -> list[float]:
            return [self._fastest(kind, count, options[kind]) for kind, count in zip(self.kinds, counts, strict=True)]

        while True:
            now = seconds(records)
            slowest = max(range(len(now)), key=now.__getitem__)
            moves = []
            for other in {kind: rank for rank, kind in enumerate(self.kinds)}.values():
                if records[slowest] > 1 and self.kinds[other] != self.kinds[slowest]:
                    moved = list(records)
                    moved[slowest], moved[other] = moved[slowest] - 1, moved[other] + 1
                    moves.append((sorted(seconds(moved), reverse=True), moved))
            if not moves or min(moves)[0] >= sorted(now, reverse=True):
                return records
            records = min(moves)[1]

    def _fastest(self, kind: int, count: int, options: Sequence[Candidate]) -> float:
        if (kind, count) not in self._times:
            self._times[kind, count] = min(self._seconds(kind, count, option) for option in options)
        return self._times[kind, count]

    def _seconds(self, kind: int, count: int, option: Candidate) -> float:
        plan = option.plan.with_(batch=count, micro_batch=min(option.micro_batch, count))
        return self.context.of_rank(kind, count).step_time(plan).step_s


# ---- stages ---------------------------------------------------------------------------------------------------------


def _of_pipeline(context: PlanContext, found: list[Candidate], tried: choose.Tried) -> list[Candidate]:
    """Cuts by speed, by memory and between the two; each stage has to fit on its own card."""
    drafts: list[Plan] = []
    for draft in (*(draft for draft, _ in tried), *(candidate.draft for candidate in found)):
        if draft not in drafts:
            drafts.append(draft)
    made: list[Candidate] = []
    for draft in drafts:
        cuts = {tuple(by_weight(draft.num_layers, weights)) for weights in _weights(context, draft)}
        made += [c for stages in sorted(cuts) for c in _of_cut(context, draft.with_(stages=stages))]
    return made


def _weights(context: PlanContext, draft: Plan) -> list[list[float]]:
    count = len(context.targets)
    plan = draft.with_(parallel="none", world_size=1, micro_batch=1)
    owns = [context.of_rank(rank, draft.batch) for rank in range(count)]
    speeds = [
        1 / replace(own, layout=ways.ALONE, targets=()).step_time(plan.with_(device_name=own.target.name)).step_s
        for own in owns
    ]
    memory = [float(max(1, own.limit_bytes)) for own in owns]
    fast, large = ([value / sum(values) for value in values] for values in (speeds, memory))
    between = [(a + b) / 2 for a, b in zip(fast, large, strict=True)]
    return [[1.0] * count, fast, between, large]


def _of_cut(context: PlanContext, draft: Plan) -> list[Candidate]:
    """Of every micro-batch the fewest recomputed layers with which all stages fit, at the first loss chunk with which
    any do."""
    owns = [context.of_rank(rank, draft.batch) for rank in range(draft.world_size)]
    searches = [choose.search(own, draft) for own in owns]
    least, made = least_of(context), []
    for rows in searches[0].sizes():
        for chunk in searches[0].chunks():
            needs = [search.needs(rows, chunk) for search in searches]
            each = list(zip(needs, owns, strict=True))
            fewest = next((n for n in needs[0] if all(need[n] <= own.limit_bytes for need, own in each)), None)
            if fewest is not None:
                candidate = searches[least].candidate(rows, fewest, chunk)
                made.append(replace(candidate, cost=context.step_time(candidate.plan).step_s))
                break
        else:
            break  # memory grows with the rows
    return made


# ---- what a plan says of them ---------------------------------------------------------------------------------------


def least_of(context: PlanContext) -> int:
    """The rank whose card has the least room."""
    return min(range(len(context.targets)), key=lambda rank: context.targets[rank].budget_bytes)


def with_shares(context: PlanContext, plan: Plan) -> Plan:
    """A plan for cards that are not alike with what each of them has; equal parts where it says nothing else."""
    if not is_mixed(context) or plan.shares:
        return plan
    total, count = context.layout.batch or plan.batch, len(context.targets)
    records = by_weight(total, [1.0] * count) if plan.parallel in DATA_PARALLEL else [total] * count
    return plan.with_(shares=tuple(
        Share(target.name, target.budget_bytes, own, min(plan.micro_batch, own), plan.recompute_layers)
        for target, own in zip(context.targets, records, strict=True)
    ))  # fmt: skip


def predicted(context: PlanContext, plan: Plan, needed: Sequence[int] | None = None) -> Plan:
    """The plan with what each card needs (as it was replayed, else by sums of tensors), and its part of a step."""
    if not plan.shares:
        return plan
    needed = needed or [_needed(context, plan, rank) for rank in range(len(plan.shares))]
    times = [time.step_s if time.basis != "unknown" else None for time in context.rank_times(plan)]
    return plan.with_(shares=tuple(
        replace(share, needed_bytes=size, step_s=time)
        for share, size, time in zip(plan.shares, needed, times, strict=True)
    ))  # fmt: skip


def _needed(context: PlanContext, plan: Plan, rank: int) -> int:
    own = context.of_rank(rank, plan.shares[rank].records)
    overheads = own.target.overheads
    return placement.highest_peak(own, plan.of_rank(rank)) + overheads.context_bytes + overheads.workspace_bytes


def reasons(context: PlanContext, plan: Plan) -> list[Reason]:
    """What each of cards that are not alike has, and why."""
    if not plan.shares:
        return []
    pace = max(plan.shares, key=lambda share: share.step_s or 0.0).card
    if plan.stages:
        return [Reason("stages", " + ".join(map(str, plan.stages)) + " layers", "by speed and memory of each GPU")]
    if plan.parallel in REPLICATED:
        value = " + ".join(str(share.records) for share in plan.shares)
        why = "by the speed of each GPU: all are ready at about the same time"
        unknown = dict.fromkeys(share.card for share in plan.shares if share.step_s is None)
        if unknown:
            why = f"by a speed that is assumed: nothing is known of {' and '.join(unknown)}"
        return [Reason("share", f"{value} of {sum(s.records for s in plan.shares)} records", why)]
    name = plan.shares[least_of(context)].card
    return [Reason("share", "equal", f"the GPUs meet in every layer: {pace} sets the pace, {name} the memory")]


def each_told(plan: Plan, told: Sequence[Reason]) -> tuple[Reason, ...]:
    """The reasons with what every GPU does where they differ; a micro-batch also where it is of other records."""
    values: dict[str, list[tuple[int, ...]]] = {
        "micro-batch": [(share.micro_batch, share.records) for share in plan.shares],
        "recomputation": [(share.recompute_layers,) for share in plan.shares],
    }
    differ = {decision: f"{' + '.join(str(own) for own, *_ in each)} (by GPU)" for decision, each in values.items()
              if len(set(each)) > 1}  # fmt: skip
    return tuple(replace(reason, value=differ.get(reason.decision, reason.value)) for reason in told)
