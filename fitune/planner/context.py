"""What a plan is made from: recipe, target, the model's configuration, what is known of the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fitune.memory import known, shipped
from fitune.memory.constants import HEADROOM
from fitune.memory.layouts import REPLICATED
from fitune.memory.variant import variant_of
from fitune.plan import Plan, Share
from fitune.planner import lengths, positions
from fitune.planner.lengths import DataFacts
from fitune.planner.target import Target, choose_target, notes_on
from fitune.planner.ways import ALONE, Layout
from fitune.recipe import Recipe
from fitune.units import from_gib

if TYPE_CHECKING:
    from fitune.hardware import Machine
    from fitune.speed import StepTime, Workload

Made = TypeVar("Made")
Load = Callable[[Plan], "tuple[Plan, Workload]"]
"""A plan as its mean step is, and what its rows hold."""
REPLAY_MARGIN = 0.01
"""Share of the budget that a plan whose phases were replayed leaves free. On an H200 (torch 2.11, 2026-11-30) the
driver counted at most 0.8 % (p95) more than was replayed, over 67 configurations, and no run predicted below a cap
failed (`benchmarks/results/h200-matrix-2026-11-30.json`). Where a card's overheads are assumed, what they may be more
is left free too."""

ADAPTER_SETTINGS = ("lora_r", "lora_alpha", "lora_dropout", "lora_bias", "lora_targets", "rslora")


@dataclass
class PlanContext:
    """Everything decisions are taken from."""

    recipe: Recipe
    target: Target
    config: Any  # configuration of the text model: transformers' own, or a catalog model's plain values
    seq_len: int  # the recipe's, within the positions the model has
    data: DataFacts | None = None
    notes: list[str] = field(default_factory=list)
    tracers: dict[tuple[int, str, str], Any] = field(default_factory=dict)
    machine: Machine | None = None
    replays: bool = False  # what is chosen is replayed on the allocator's model before it counts as fitting
    layout: Layout = ALONE  # how several GPUs share the step; `recipe.batch` is a rank's share then
    held_back: int = 0  # bytes by which replays were above what the search had taken for granted
    ram_wanted: list[tuple[int, Plan]] = field(default_factory=list)
    """RAM that plans need which fit on the card with masters in RAM."""
    targets: tuple[Target, ...] = ()  # cards of the layout's ranks; `target` stands for all of them
    whole: PlanContext | None = None  # of the job that the layout's ranks share
    rank: int | None = None  # the rank that this is a context of; None: any of them

    @property
    def is_simple(self) -> bool:
        """Nothing may wait outside the card (`effort`)."""
        return self.recipe.effort == "simple"

    @property
    def allowed_bytes(self) -> int:
        """What a replayed plan may need of the budget, as the driver counts it."""
        return int(self.target.budget_bytes * (1 - REPLAY_MARGIN)) - self._assumed_bytes

    @property
    def limit_bytes(self) -> int:
        """What tensors may take: the budget less what stays free, context and workspaces."""
        extra = self.target.overheads
        room = self.allowed_bytes if self.replays else int(self.target.budget_bytes * (1 - HEADROOM))
        return room - extra.context_bytes - extra.workspace_bytes - self.held_back

    def budget_for(self, tensor_bytes: int) -> int:
        """The budget in which so many bytes of tensors fit: the inverse of `limit_bytes`."""
        extra = self.target.overheads
        taken = tensor_bytes + extra.context_bytes + extra.workspace_bytes + self.held_back
        if not self.replays:
            return int(taken / (1 - HEADROOM)) + 1
        return int((taken + self._assumed_bytes) / (1 - REPLAY_MARGIN)) + 1

    @property
    def _assumed_bytes(self) -> int:
        """What overheads that are not measured may be more."""
        extra = self.target.overheads
        return extra.slack_bytes[1] if extra.context.basis == "assumed" else 0

    @cached_property
    def decoder(self) -> Any:
        """The model's shape for `fitune.speed`: one for all ranks, since it keeps what is counted."""
        from fitune.speed.shape import decoder_of

        return decoder_of(self.config) if self.whole is None else self.whole.decoder

    def changed(self, recipe: Recipe, *, target: Target | None = None, config: Any = None) -> PlanContext:
        """The same job and machine with other settings, on another card or of another model. Its plans are not
        replayed.

        Raises:
            UserError: records longer than the model can read.
        """
        config = self.config if config is None else config
        seq_len, _ = positions.effective_seq_len(recipe, config)
        return PlanContext(recipe, target or self.target, config, seq_len, self.data, tracers=self.tracers,
                           machine=self.machine, layout=self.layout)  # fmt: skip

    def of_rank(self, rank: int, records: int) -> PlanContext:
        """Of one rank: its own card with what all of them can compute, and its own records of a step."""
        if self.whole is None:
            return self
        target = replace(self.targets[rank], bf16=self.target.bf16, flash=self.target.flash,
                         num_ranks=self.target.num_ranks, ram_bytes=self.target.ram_bytes,
                         pinned_bytes=self.target.pinned_bytes)  # fmt: skip
        rows = None if self.recipe.micro_batch is None else min(self.recipe.micro_batch, records)
        return replace(self, recipe=self.recipe.with_(batch=records, micro_batch=rows), target=target, rank=rank,
                       data=self.whole.data_of(records))  # fmt: skip

    def data_of(self, records: int) -> DataFacts | None:
        """What the data says to a rank that has so many of a step's records."""
        if self.data is None:
            return None
        tokens = -(-self.data.most_step_tokens * records // self.recipe.batch)
        return replace(self.data, most_step_tokens=max(self.data.longest_tokens, tokens))

    def row_width(self, plan: Plan) -> int:
        """Tokens in the widest row that training will meet."""
        if self.data is None:
            return plan.seq_len
        return min(plan.seq_len, self.data.most_step_tokens if plan.packing else self.data.longest_tokens)

    def num_rows(self, plan: Plan) -> int:
        """Most rows of a step."""
        if plan.packing and self.data is not None:
            return max(1, min(plan.batch, -(-2 * self.data.most_step_tokens // plan.seq_len)))
        return plan.batch

    def step_time(self, plan: Plan, workload: Workload | None = None) -> StepTime:
        """Of a plan's step; without `workload` at rows as wide as the widest that training meets. Where ranks have
        shares of their own, of the slowest one with its share."""
        from fitune import speed

        if plan.shares and plan.parallel in REPLICATED:
            return max(self.rank_times(plan), key=lambda time: time.step_s)
        rates = self.target.calibration.rates if self.target.calibration is not None else None
        workload = workload or speed.Workload(self.row_width(plan))
        measured = {t.name: t.calibration.rates for t in self.targets if t.calibration is not None}
        return speed.predict(plan, self.decoder, machine=self.machine, calibration=rates, workload=workload,
                             together=self.layout.names, calibrations=measured if self.targets else None,
                             rank=self.rank)  # fmt: skip

    def rank_times(self, plan: Plan, load: Load | None = None) -> list[StepTime]:
        """Of each rank of a plan with shares: its own part of a step, with the tokens of the whole step.

        Args:
            load: a rank's plan as its mean step is, and what its rows hold; None: the widest rows.
        """
        shared = sum(share.records for share in plan.shares) if self.layout.shares_records else None

        def timed(context: PlanContext, own: Plan, share: Share) -> StepTime:
            time = context.step_time(*load(own)) if load is not None else context.step_time(own)
            times = 1.0 if shared is None else shared / share.records / plan.world_size
            return replace(time, tokens=time.tokens * times)

        return self.of_ranks(plan, timed)

    def of_ranks(self, plan: Plan, make: Callable[[PlanContext, Plan, Share], Made]) -> list[Made]:
        """What `make` gives of each rank of a plan with shares: of its context, its plan and its share. Of ranks that
        are alike it is asked once."""
        made: dict[tuple[Share, int | None], Made] = {}
        keys = [(share, rank if plan.parallel == "pp" else None)  # stages differ
                for rank, share in enumerate(plan.shares)]  # fmt: skip
        for rank, key in enumerate(keys):
            if key not in made:
                made[key] = make(self.of_rank(rank, key[0].records), plan.of_rank(rank), key[0])
        return [made[key] for key in keys]

    def tracer(self, plan: Plan) -> Any:
        """What gives the memory terms of a plan's variant (see `memory.known.tracer_for`), made once."""
        key = id(self.config), variant_of(plan), plan.optimizer
        if key not in self.tracers:
            self.tracers[key] = known.tracer_for(self.config, plan)
        return self.tracers[key]


def open_context(
    recipe: Recipe,
    machine: Machine | None = None,
    *,
    config: Any = None,
    data: DataFacts | None = None,
    reads_data: bool = False,
    replays: bool = False,
    notes: Sequence[str] = (),
) -> PlanContext:
    """Budget and model of a recipe on a machine (this one, or the cards of `--gpu`).

    Args:
        config: the model's configuration when it is known already; otherwise it is looked up by name, without weights.
        data: lengths of the data when it has been read; `reads_data`: they are read here.
        notes: what `find_machine` said of the machine.

    Raises:
        UserError: unknown model or card, a device that is not there, data that cannot be used.
    """
    notes = list(notes)
    machine = machine or find_machine(recipe, notes)
    target = choose_target(recipe, machine)
    if machine.assumptions:
        notes.insert(0, machine.assumptions)
    notes += target.notes
    if config is None:
        config = config_of(recipe, notes)
    seq_len, cut = positions.effective_seq_len(recipe, config)
    unread = None
    if reads_data:
        data, unread = lengths.read(recipe, seq_len)
    longest = seq_len if data is None else min(seq_len, data.longest_tokens)
    notes += [note for note in (cut, positions.beyond_rotary(longest, config), unread, _unused(recipe)) if note]
    return PlanContext(recipe, target, config, seq_len, data, notes, machine=machine, replays=replays)


def _unused(recipe: Recipe) -> str | None:
    """A sentence on settings of adapters in a job that has none. (No error: a recipe file may be tried with another
    method on the command line.)"""
    fields = type(recipe).model_fields
    named = [f"--{n.replace('_', '-')}" for n in ADAPTER_SETTINGS if getattr(recipe, n) != fields[n].default]
    if recipe.method != "full" or not named:
        return None
    return f"{', '.join(named)}: without effect, since full fine-tuning trains every weight and has no adapters"


def find_machine(recipe: Recipe, notes: list[str]) -> Machine:
    """This machine, or one with the cards of `--gpu`."""
    from fitune import hardware
    from fitune.catalog import gpus

    if recipe.gpu is None:
        return hardware.probe()
    cards, said = gpus.parse_with_notes(recipe.gpu)
    notes += said
    notes += dict.fromkeys(note for gpu, _ in cards for note in notes_on(gpu))
    machine = hardware.virtual_mixed(cards, ram_bytes=from_gib(recipe.ram) if recipe.ram else None)
    return hardware.under_wsl(machine) if recipe.wsl else machine


def config_of(recipe: Recipe, notes: list[str]) -> Any:
    """The configuration of the recipe's model, found without its weights."""
    found = _of_catalog(recipe, notes)
    if found is not None:
        return found
    from fitune.model.build import with_rope_scaling
    from fitune.model.source import resolve

    source = resolve(recipe.model, hub=recipe.hub, trust_remote_code=recipe.trust_remote_code, weights=False)
    notes += source.notes
    return with_rope_scaling(source.config, recipe.rope_scaling)


def _of_catalog(recipe: Recipe, notes: list[str]) -> shipped.CatalogConfig | None:
    """What `resolve` would find in the catalog, without importing transformers; None for everything else."""
    from fitune.model import source

    name = recipe.model.strip()
    is_random = name.startswith(source.RANDOM)
    inner = name.removeprefix(source.RANDOM).strip()
    path = Path(inner).expanduser()
    if recipe.rope_scaling or path.suffix.lower() == ".gguf" or path.exists():
        return None
    found = shipped.catalog_config(inner)
    if found is not None:
        notes += [found.shape.training_note] if found.shape.training_note else []
        notes += [source.random_note(seed=0)] if is_random else []
    return found
