"""Which cards of the catalog do a job, how fast and for how much money: one planned, all compared. See `advise`.

Cards alike in what a plan depends on (arithmetic, kernels, memory) share one plan, made for the one with the least
memory; speed is each card's own. Several cards share a step's records, each with all of the plan on it (data parallel);
where one cannot hold it, several of a kind are planned together (`planner.layouts`), as `fitune train` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fitune import plan as plans
from fitune.catalog import clouds, gpus
from fitune.catalog.clouds import PriceTable
from fitune.catalog.gpus import Gpu
from fitune.errors import UserError
from fitune.memory.constants import overheads
from fitune.memory.layouts import DATA_PARALLEL, with_nccl
from fitune.memory.shipped import CatalogConfig
from fitune.plan import Plan
from fitune.planner import costs, jobs, make, positions
from fitune.planner.context import config_of
from fitune.planner.costs import CardAdvice
from fitune.planner.jobs import Job
from fitune.planner.ladder import AS_FAST
from fitune.planner.target import capability, notes_on
from fitune.planner.ways import Layout
from fitune.planner.whatif import changed
from fitune.recipe import Recipe
from fitune.units import format_bytes, from_gib

if TYPE_CHECKING:
    from fitune.planner.result import PlanResult
    from fitune.speed import StepTime

NOT_SUPPORTED = ("Huawei",)  # needs torch_npu, which fitune does not use
OWNED_SETS = (1, 2, 4)  # cards of a set that people build themselves
SET_FROM_GB = 16.0  # consumer cards of this size and more are put together


@dataclass(frozen=True)
class Advice:
    """The answer to "which GPU": `cards` in the order of `costs.order`, those within the limits first.

    Attributes:
        too_small: cards on which nothing fits, the largest first.
        limits: {"max_cost", "max_hours"}, None where there is none.
        num_within: how many of `cards` are within the limits.
        left_out: names of cards that fitune does not run on.
        nearest_fits: where nothing fits anywhere: changes of the job that fit on the largest card.
    """

    recipe: Recipe
    job: Job
    prices: PriceTable
    cards: tuple[CardAdvice, ...]
    too_small: tuple[CardAdvice, ...]
    limits: dict[str, float | None]
    num_within: int
    notes: tuple[str, ...]
    nearest_fits: tuple[dict[str, Any], ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def within(self) -> tuple[CardAdvice, ...]:
        return self.cards[: self.num_within]

    @property
    def picks(self) -> dict[str, CardAdvice]:
        return costs.picks(self.within, self.limits.get("max_cost"))

    def as_dict(self) -> dict[str, Any]:
        """What `fitune gpus MODEL --data … --json` prints."""
        best = self.picks
        return {
            "model": self.recipe.model, "recipe": self.recipe.as_dict(), "job": self.job.as_dict(),
            "prices": {"name": self.prices.name, "date": self.prices.date, "currency": self.prices.currency},
            "limits": self.limits, "num_within_limits": self.num_within, "order": costs.ORDER,
            "picks": {name: {"gpu": card.gpu.id, "num_gpus": card.num_gpus} for name, card in best.items()},
            "cards": [card.as_dict() for card in self.cards],
            "too_small": [card.as_dict() for card in self.too_small],
            "nearest_fits": list(self.nearest_fits), "left_out": list(self.left_out), "notes": list(self.notes),
        }  # fmt: skip


def advise(
    recipe: Recipe,
    *,
    tokens: float | None = None,
    max_cost: float | None = None,
    max_hours: float | None = None,
    prices: PriceTable | None = None,
    among: Sequence[Gpu] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Advice:
    """Every card of the catalog for this job. Needs no network and no GPU for a model of the catalog.

    Args:
        recipe: its `gpu` and `devices` are not used.
        tokens: of one pass over the data, in place of reading it.
        max_cost: in the table's currency, for the whole run. max_hours: of the whole run.
        prices: another table than the catalog's.
        among: only these cards.
        tell: is told in a sentence where the answer will take long.

    Raises:
        UserError: unknown model, unreadable data, settings that contradict each other, a limit that is not positive.
    """
    from fitune.speed.shape import decoder_of

    for name, limit in (("--max-cost", max_cost), ("--max-hours", max_hours), ("--tokens", tokens)):
        if limit is not None and not 0 < limit < float("inf"):
            raise UserError(f"{name} {limit:g} is no limit" if name != "--tokens" else f"{name} {limit:g} is no job",
                            "it has to be more than 0", "give a positive number, or leave it out")  # fmt: skip
    prices = prices or clouds.catalog_table()
    recipe = changed(recipe, {"gpu": None, "devices": None, "nproc": None})
    notes: list[str] = []
    config = config_of(recipe, notes)
    seq_len, cut = positions.effective_seq_len(recipe, config)
    job = jobs.of(recipe, seq_len, tokens)
    notes += [note for note in (cut, positions.beyond_rotary(seq_len, config), *job.notes) if note]
    if tell is not None and not isinstance(config, CatalogConfig):
        tell("fitune has no traces of this model's step: they are made first, once, which takes minutes")
    cards = gpus.all_gpus() if among is None else tuple(among)
    made = _Plans(recipe, config, job, cards)
    decoder = decoder_of(config)
    rows = []
    for gpu in cards:
        if gpu.vendor in NOT_SUPPORTED:
            continue
        for count in _counts(gpu, prices):
            rows.append(_card(gpu, count, made.for_cards(gpu, count), job, decoder, prices))
    fitting = [row for row in rows if row.fits]
    left_out = tuple(gpu.name for gpu in cards if gpu.vendor in NOT_SUPPORTED)
    limits = {"max_cost": max_cost, "max_hours": max_hours}
    ordered, num_within = costs.order(fitting, max_cost, max_hours)
    small = sorted((r for r in rows if not r.fits and r.num_gpus == 1), key=lambda r: (-r.budget_bytes, r.gpu.name))
    return Advice(recipe, job, prices, tuple(ordered), tuple(small), limits, num_within,
                  tuple(dict.fromkeys(notes)), () if ordered else made.nearest_fits(), left_out)  # fmt: skip


def _counts(gpu: Gpu, prices: PriceTable) -> list[int]:
    """How many of a card are looked at together: one, as many as are offered, and the sets that people build."""
    counts = {1} | {offer.num_gpus for offer in prices.offers if offer.gpu_id == gpu.id}
    if kind(gpu) == "consumer" and gpu.marketing_gb >= SET_FROM_GB:
        counts |= set(OWNED_SETS)
    return sorted(counts)


def kind(gpu: Gpu) -> str:
    """consumer | laptop | workstation | data centre | board (memory shared with its processor)."""
    if gpu.memory_kind == "shared":
        return "board"
    if "laptop" in gpu.id:
        return "laptop"
    if gpu.id.startswith(("rtx-2", "rtx-3", "rtx-4", "rtx-5", "rx-")):
        return "consumer"
    return "workstation" if gpu.id.startswith(("rtx-", "radeon-pro")) else "data centre"


# ---- plans -----------------------------------------------------------------------------------------------------------


class _Plans:
    """A plan per class of cards, made when it is asked for, and none below a card on which nothing fits."""

    def __init__(self, recipe: Recipe, config: Any, job: Job, among: Sequence[Gpu]):
        self.recipe, self.config, self.job = recipe, config, job
        self._of: dict[str, PlanResult] = {}
        self._smallest: dict[str, Gpu] = {}
        self._together: dict[tuple[str, int], PlanResult] = {}
        refused: tuple[int, PlanResult] | None = None  # room, and what it is too small for
        for cards in _families(among):
            for smallest, members in cards:
                room = _room(smallest)
                small = refused is not None and room <= refused[0]
                result = refused[1] if small and refused is not None else self._plan(smallest)
                if not result.fits and not small:
                    refused = (room, result)  # smaller ones, also older ones, are refused with the same least need
                self._of |= {gpu.id: result for gpu in members}
                self._smallest |= {gpu.id: smallest for gpu in members}

    def _plan(self, gpu: Gpu, count: int = 1) -> PlanResult:
        from fitune import hardware

        recipe = self.recipe
        if recipe.precision == "auto" and gpu.bf16 and not _modern(gpu):
            recipe = changed(recipe, {"precision": "fp16"})
        ram = from_gib(recipe.ram) if recipe.ram else None
        machine = hardware.virtual(gpu, count, ram_bytes=ram)
        return make.make_plan(recipe, machine, config=self.config, data=self.job.facts)

    def for_cards(self, gpu: Gpu, count: int) -> PlanResult:
        """One card's plan, which each of several has with its share; where one has none, that of all together."""
        alone, smallest = self._of[gpu.id], self._smallest[gpu.id]
        # cut into as many parts as there are cards it needs this at least
        if alone.fits or count == 1 or alone.predicted["peak_allocated_bytes"] > count * smallest.usable_bytes:
            return alone
        if (smallest.id, count) not in self._together:
            self._together[smallest.id, count] = self._plan(smallest, count)
        return self._together[smallest.id, count]

    def nearest_fits(self) -> tuple[dict[str, Any], ...]:
        """Of the card with the most memory."""
        largest = max(self._of, key=lambda gpu_id: self._of[gpu_id].plan.budget_bytes or 0, default=None)
        return self._of[largest].nearest_fits if largest is not None else ()


def _families(among: Sequence[Gpu]) -> list[list[tuple[Gpu, list[Gpu]]]]:
    """Cards by what a plan's arithmetic depends on, the largest cards first; in each the classes of memory from the
    largest on, as (the card with the least of it, all of them)."""
    families: dict[bool, dict[tuple[int, bool], list[Gpu]]] = {}
    for gpu in among:
        if gpu.vendor not in NOT_SUPPORTED:
            sizes = families.setdefault(_modern(gpu), {})
            sizes.setdefault((round(gpu.marketing_gb), gpu.memory_kind == "gddr_ecc"), []).append(gpu)
    found = []
    for sizes in families.values():
        classes = [(min(cards, key=_room), cards) for cards in sizes.values()]
        found.append(sorted(classes, key=lambda c: -_room(c[0])))
    return sorted(found, key=lambda classes: -_room(classes[0][0]))


def _modern(gpu: Gpu) -> bool:
    """bf16 and flash attention. A card with bf16 alone is planned in fp16, as one without either."""
    return gpu.bf16 and gpu.flash_attention


def _room(gpu: Gpu) -> int:
    """What tensors may take there."""
    extra = overheads("cuda", capability(gpu))
    return gpu.usable_bytes - extra.context_bytes - extra.workspace_bytes


# ---- one row ---------------------------------------------------------------------------------------------------------


def _card(gpu: Gpu, count: int, result: PlanResult, job: Job, decoder: Any, prices: PriceTable) -> CardAdvice:
    budget = gpu.usable_bytes
    needed = _needed(result.predicted, gpu)
    used = min(count, result.plan.batch)
    offers = [offer for offer in prices.offers if (offer.gpu_id, offer.num_gpus) == (gpu.id, count)]
    if not result.fits:
        return CardAdvice(gpu, count, used, None, needed, budget, None, None)
    if result.plan.world_size > 1:  # planned together: of its cards each has this
        used = result.plan.world_size
    plan, step, needed = _quickest(result, gpu, used, job, decoder)
    ram = ram_bytes(plan, decoder)
    offers = [offer for offer in offers if offer.host_ram_gib is None or from_gib(offer.host_ram_gib) >= ram]
    hours = job_hours(step, job)
    rentals = costs.rentals(offers, hours)
    price = buy_price(gpu, count) if prices.currency == "USD" else None
    even = costs.break_even_hours(price, [r for r in rentals if r.per_hour])
    return CardAdvice(gpu, count, used, plan, needed, budget, step, hours, rentals, price, even,
                      card_notes(gpu, count, used, ram))  # fmt: skip


def _needed(predicted: dict[str, Any], gpu: Gpu, num_used: int = 1) -> int:
    """Tensors and workspaces at the highest peak, the driver's context, and with several cards NCCL's buffers. (The
    bucket in which they exchange gradients is there after the peak, when activations have gone.)"""
    extra = overheads("cuda", capability(gpu))
    extra = with_nccl(extra) if num_used > 1 else extra
    return int(predicted["peak_allocated_bytes"]) + extra.context_bytes


def _quickest(result: PlanResult, gpu: Gpu, used: int, job: Job, decoder: Any) -> tuple[Plan, StepTime, int]:
    """Of the plans that fit on all cards of a class the one that is quickest on this card, its time, and what it needs;
    as quick within 5 % is the planner's own choice."""
    others = [(plans.from_dict(entry["plan"]), entry["predicted"]) for entry in result.alternatives]
    found = []
    for plan, predicted in ((result.plan, result.predicted), *others):
        mine = share(plan, used).with_(device_name=gpu.name, budget_bytes=gpu.usable_bytes)
        found.append((mine, step_time(mine, gpu, used, job, decoder), _needed(predicted, gpu, used)))
    best = min(found, key=lambda entry: entry[1].step_s)
    return found[0] if found[0][1].step_s <= AS_FAST * best[1].step_s else best


def ram_bytes(plan: Plan, decoder: Any) -> int:
    """What frozen weights take of the machine's RAM while they are streamed; 0 where they are not. All cards of a
    machine stream the same copy. The process itself takes some GiB more."""
    from fitune.speed.layer_work import BASE_BYTES

    if plan.stream_from in ("none", "disk"):
        return 0
    share = len(plan.streamed_layers()) / plan.num_layers
    return int(sum(layer.params for layer in decoder.layers) * BASE_BYTES[plan.base_format] * share)


def share(plan: Plan, num_used: int) -> Plan:
    """One card's plan as each of several has it: its share of a step's records. One of several cards together has it
    already, but for the records."""
    if num_used == 1:
        return plan
    if plan.world_size > 1:
        return plan.with_(batch=Layout(plan.parallel, plan.world_size).share(plan.batch))
    rows, way = -(-plan.batch // num_used), "ddp" if plan.stream_from == "none" else "streamed"
    return plan.with_(batch=rows, micro_batch=min(plan.micro_batch, rows), parallel=way, world_size=num_used)


def step_time(plan: Plan, gpu: Gpu, num_used: int, job: Job, decoder: Any) -> StepTime:
    """Of the whole step, exchanges between cards included (`fitune.speed.together`). `tokens` are all cards'."""
    from fitune import speed

    mean_plan, workload = job.workload(plan)
    step = speed.predict(mean_plan, decoder, gpu.name, workload=workload)
    ranks = num_used if plan.parallel in DATA_PARALLEL else 1
    return replace(step, tokens=step.tokens / ranks * job.batch / plan.batch)


def job_hours(step: StepTime, job: Job) -> tuple[float, float, float]:
    """(low, expected, high) of steps and evaluations, with the error of the number of tokens."""
    from fitune import speed

    time = speed.job_time(step, job.steps, num_evals=job.num_evals, eval_tokens=job.eval_tokens)
    return time.low_s * job.error[0] / 3600, time.seconds / 3600, time.high_s * job.error[1] / 3600


def buy_price(gpu: Gpu, count: int) -> float | None:
    """Of cards that are sold one by one: what they cost when they came out."""
    if kind(gpu) in ("laptop", "board") or gpu.launch_price_usd is None:
        return None
    return gpu.launch_price_usd * count


def card_notes(gpu: Gpu, count: int, used: int, ram: int = 0) -> tuple[str, ...]:
    """What a person should know before choosing this card."""
    notes = list(notes_on(gpu))
    if not _modern(gpu):
        notes.append("fp16 with loss scaling")
    if ram:
        notes.append(f"streamed weights: about {format_bytes(ram)} of RAM")
    if used < count:
        notes.append(f"{count - used} of {count} cards stay idle: a step has {used} records")
    return tuple(notes)
