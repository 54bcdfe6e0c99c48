"""Recipe, model shape and machine in; one plan with its reasons out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.memory import known, shipped
from fitune.memory.constants import HEADROOM
from fitune.memory.variant import variant_of
from fitune.plan import Adapter, Plan, Reason
from fitune.planner import explain, ladder, nofit, placement, positions
from fitune.planner.result import PlanResult, predicted_dict
from fitune.planner.target import Target, choose_target
from fitune.recipe import QUANTISED_FORMATS, Recipe
from fitune.units import format_bytes, from_gib

if TYPE_CHECKING:
    from fitune.hardware import Machine
    from fitune.memory.phases import Prediction
    from fitune.speed import StepTime, Workload

REPLAY_MARGIN = 0.01
"""Share of the budget that a plan whose phases were replayed leaves free. On an H200 (torch 2.11, 2026-11-30) the
driver counted at most 0.8 % (p95) more than was replayed, over 67 configurations, and no run predicted below a cap
failed (`benchmarks/results/h200-matrix-2026-11-30.json`). Where a card's overheads are assumed, what they may be more
is left free too."""
MOST_REPLAYS = 5  # searches with a tighter limit after a replay was above it
PACKING_GAIN = 1.1  # packing is chosen when padding would cost at least this factor in tokens
DEFAULT_LR = {"full": 2e-5, "lora": 2e-4}


@dataclass(frozen=True)
class DataFacts:
    """What the data says. Without it a plan assumes every record to be `seq_len` long."""

    longest_tokens: int
    packing_gain: float
    most_step_tokens: int  # tokens of the largest step: a bound on what packed rows can hold together
    total_tokens: int | None = None  # of all records
    num_records: int | None = None  # that are trained on
    lengths: tuple[int, ...] = ()  # of these, or of a sample


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
    held_back: int = 0  # bytes by which replays were above what the search had taken for granted
    _decoder: Any = None

    @property
    def allowed_bytes(self) -> int:
        """What a replayed plan may need of the budget, as the driver counts it."""
        extra = self.target.overheads
        assumed = extra.slack_bytes[1] if extra.context.basis == "assumed" else 0
        return int(self.target.budget_bytes * (1 - REPLAY_MARGIN)) - assumed

    @property
    def limit_bytes(self) -> int:
        """What tensors may take: the budget less what stays free, context and workspaces."""
        extra = self.target.overheads
        room = self.allowed_bytes if self.replays else int(self.target.budget_bytes * (1 - HEADROOM))
        return room - extra.context_bytes - extra.workspace_bytes - self.held_back

    @property
    def decoder(self) -> Any:
        """The model's shape for `fitune.speed`, made once."""
        if self._decoder is None:
            from fitune.speed.shape import decoder_of

            self._decoder = decoder_of(getattr(self.config, "shape", self.config))
        return self._decoder

    def row_width(self, plan: Plan) -> int:
        """Tokens in the widest row that training will meet."""
        return row_width(self, plan)

    def step_time(self, plan: Plan, workload: Workload | None = None) -> StepTime:
        """Of a plan's step; without `workload` at rows as wide as the widest that training meets."""
        from fitune import speed

        rates = self.target.calibration.rates if self.target.calibration is not None else None
        workload = workload or speed.Workload(row_width(self, plan))
        return speed.predict(plan, self.decoder, machine=self.machine, calibration=rates, workload=workload)

    def tracer(self, plan: Plan) -> Any:
        """What gives the memory terms of a plan's variant (see `memory.known.tracer_for`), made once."""
        key = id(self.config), variant_of(plan), plan.optimizer
        if key not in self.tracers:
            self.tracers[key] = known.tracer_for(self.config, plan)
        return self.tracers[key]


Tried = list[tuple[Plan, ladder.Candidate]]
"""Base formats that do not fit on the card (as drafts), each with the smallest candidate of those that are there as a
whole."""


def make_plan(
    recipe: Recipe,
    machine: Machine | None = None,
    *,
    config: Any = None,
    data: DataFacts | None = None,
    detailed: bool = False,
) -> PlanResult:
    """The plan for a recipe on a machine (this one, or the cards of `--gpu`).

    Args:
        config: the model's configuration when it is known already; otherwise it is looked up by name, without weights.
        data: lengths of the data when it has been read.
        detailed: also predict every phase of the chosen plan, event for event, with whose the bytes are.

    Raises:
        UserError: unknown model or card, contradictory or impossible settings.
    """
    notes: list[str] = []
    machine = machine or find_machine(recipe, notes)
    target = choose_target(recipe, machine)
    if machine.assumptions:
        notes.insert(0, machine.assumptions)
    notes += target.notes
    if config is None:
        config = config_of(recipe, notes)
    seq_len, cut = positions.effective_seq_len(recipe, config)
    longest = seq_len if data is None else min(seq_len, data.longest_tokens)
    notes += [note for note in (cut, positions.beyond_rotary(longest, config)) if note]
    notes += _budget_note(target, REPLAY_MARGIN if detailed else HEADROOM)
    context = PlanContext(recipe, target, config, seq_len, data, notes, machine=machine, replays=detailed)
    _, found, tried = choose(context, base_formats(context))
    prediction = None
    if detailed:
        found, tried, prediction = _replayed(context, found, tried)
    if found:
        result = _result(context, found[0], found[1:], tried, fits=True)
    else:
        least = _least(context, tried)
        others = [pair for pair in tried if pair[0].base_format != least.draft.base_format]
        result = _result(context, least, [], others, fits=False)
    if not detailed:
        return result
    from fitune.planner.predict import with_phases  # which makes plans itself

    return with_phases(context, result, prediction)


def choose(context: PlanContext, formats: list[str]) -> tuple[Plan, list[ladder.Candidate], Tried]:
    """The chosen candidate's draft; the candidates that fit, the chosen one first and then by their time (none where
    nothing fits); and the formats whose weights cannot all stay on the card.

    A quantised base comes after a wide one: where that one's weights fit, it is not looked at; where they only fit
    streamed, it is taken if it is faster by more than 5 %.
    """
    tried: Tried = []
    found: list[ladder.Candidate] = []
    for base_format in formats:
        draft = _draft(context, base_format)
        resident = search(context, draft)
        fitting = resident.fitting(context.limit_bytes)
        found += fitting + _placed(context, draft, fitting)
        if fitting:
            break
        tried.append((draft, resident.smallest()))
    found = ladder.ordered(found)
    return found[0].draft if found else draft, found, tried


def _least(context: PlanContext, tried: Tried) -> ladder.Candidate:
    """The candidate with the lowest peak of all formats, with what can wait outside the card there."""
    found = [least for _, least in tried]
    for draft, _ in tried:
        for placed in placement.drafts(draft):
            if placed.accumulation_order == "micro-batch-major" and placed.resident_layers in (0, None):
                settled = _settled(context, search(context, placed).smallest())
                found += [settled] if settled is not None else []
    return min(found, key=lambda c: c.peak_bytes)


def _placed(context: PlanContext, draft: Plan, resident: list[ladder.Candidate]) -> list[ladder.Candidate]:
    """Candidates with weights or layer inputs outside the card; none where the resident ones lose nothing."""
    whole = num_rows(context, draft)
    if any(c.recompute_layers == 0 and c.micro_batch == whole for c in resident):
        return []
    found = []
    for placed in placement.drafts(draft):
        candidates = search(context, placed).fitting(context.limit_bytes)
        found += [s for c in candidates if (s := _settled(context, c)) is not None]
    streamed = [c for c in found if c.draft.stream_from != "none"]
    if streamed:
        found += _most_resident(context, ladder.ordered(streamed)[0])
    return found


def _settled(context: PlanContext, candidate: ladder.Candidate) -> ladder.Candidate | None:
    """The candidate where the host has room for it; None where it has none, or nothing of it is there."""
    plan = candidate.plan
    if plan.offload_inputs and plan.recompute_layers == 0:
        return None
    if plan.accumulation_order == "layer-major" and plan.micro_batch >= num_rows(context, plan):
        return None
    width = row_width(context, plan)
    terms = search(context, candidate.draft).terms_of(plan.micro_batch, width, plan.loss_chunk)
    settled = placement.settled(context, plan, terms, width)
    if settled is None or settled.stream_from == plan.stream_from:
        return candidate if settled is not None else None
    draft = candidate.draft.with_(stream_from=settled.stream_from)
    return replace(candidate, draft=draft, cost=context.step_time(settled).step_s)


def _most_resident(context: PlanContext, candidate: ladder.Candidate) -> list[ladder.Candidate]:
    """The same with as many layers' weights on the card as fit: of streamed plans that differ in nothing else the one
    that copies least."""
    low, high = candidate.draft.resident_layers or 0, candidate.draft.num_layers
    best = None
    while high - low > 1:
        middle = (low + high) // 2
        draft = candidate.draft.with_(resident_layers=middle)
        made = search(context, draft)._candidate(
            candidate.micro_batch, candidate.recompute_layers, candidate.loss_chunk
        )
        if made.peak_bytes <= context.limit_bytes:
            low, best = middle, made
        else:
            high = middle
    settled = None if best is None else _settled(context, best)
    return [] if settled is None else [settled]


def _replayed(
    context: PlanContext, found: list[ladder.Candidate], tried: Tried
) -> tuple[list[ladder.Candidate], Tried, Prediction | None]:
    """The same with a chosen candidate whose every phase stays within what is allowed on the allocator's model, and
    its prediction: where a replay is above it, the search is made again with less room by as much."""
    from fitune.memory.phases import needed_bytes
    from fitune.planner.predict import phases_of

    for _ in range(MOST_REPLAYS):
        if not found:
            break
        prediction = phases_of(context, found[0].plan)
        excess = needed_bytes(prediction.most) - context.allowed_bytes
        if excess <= 0:
            return found, tried, prediction
        # below this candidate's sum, which may itself be below the limit
        context.held_back += max(0, context.limit_bytes - found[0].peak_bytes) + excess
        _, found, tried = choose(context, base_formats(context))
    for _, least in sorted(tried, key=lambda pair: pair[1].peak_bytes):
        prediction = phases_of(context, least.plan)
        if needed_bytes(prediction.most) <= context.allowed_bytes:
            return [least], [pair for pair in tried if pair[1] is not least], prediction
    return [], tried, None


def _budget_note(target: Target, share: float) -> list[str]:
    """What of a card's memory is not for tensors; the sizes a plan shows are tensors and library workspaces."""
    if target.device != "cuda":
        return []
    extra = target.overheads
    return [
        f"besides what is shown the driver's context takes about {format_bytes(extra.context_bytes)} ({extra.source}), "
        f"and {share:.0%} of the budget stay free for the allocator"
    ]


def find_machine(recipe: Recipe, notes: list[str]) -> Machine:
    """This machine, or one with the cards of `--gpu`."""
    from fitune import hardware
    from fitune.catalog import gpus

    if recipe.gpu is None:
        return hardware.probe()
    cards = gpus.parse(recipe.gpu)
    for name, _, _ in (part.strip().partition(":") for part in recipe.gpu.split(",")):
        note = gpus.find(name)[1]
        if note:
            notes.append(note)
    if sum(count for _, count in cards) > 1:
        notes.append("this version plans for one GPU of those named")
    return hardware.virtual_mixed(cards, ram_bytes=from_gib(recipe.ram) if recipe.ram else None)


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


def base_formats(context: PlanContext) -> list[str]:
    """Formats to try, in order. Quantised ones only where asked for, or with `auto` after the wide one."""
    recipe, wide = context.recipe, wide_format(context)
    if recipe.base_format != "auto":
        return [recipe.base_format]
    return {"full": [wide], "lora": [wide], "qlora": ["nf4"], "auto": [wide, "nf4"]}[recipe.method]


def wide_format(context: PlanContext) -> str:
    return context.recipe.precision if context.recipe.precision != "auto" else auto_precision(context.target)


def auto_precision(target: Target) -> str:
    if target.bf16:
        return "bf16"
    return "fp32" if target.device == "cpu" else "fp16"


def _draft(context: PlanContext, base_format: str) -> Plan:
    """Everything but micro-batch, recomputation and chunk."""
    recipe, target = context.recipe, context.target
    method = "full" if recipe.method == "full" else "lora"
    precision = wide_format(context)
    if precision == "bf16" and target.device == "cuda" and not target.bf16:
        raise UserError(
            f"bf16 does not run on {target.name}",
            "this card has no bf16 arithmetic",
            "use --precision fp16 (with loss scaling), or auto",
        )
    if method == "full" and base_format in QUANTISED_FORMATS:
        raise UserError(
            "full fine-tuning needs a wide base", f"{base_format} weights cannot be trained", "use --method qlora"
        )
    if method == "full" and base_format != precision:
        raise UserError(
            f"full fine-tuning computes in the weights' own format, here {precision}",
            f"base_format is {base_format}",
            f"leave base_format at auto, or use --precision {base_format} too",
        )
    kernel, can_pack = attention_kernel(context, precision)
    adapter = None
    if method == "lora":
        targets = ("all-linear",) if recipe.lora_targets == "all-linear" else tuple(recipe.lora_targets)
        adapter = Adapter(
            recipe.lora_r, recipe.lora_alpha, recipe.lora_dropout, recipe.lora_bias, targets, recipe.rslora, recipe.dora
        )
    packing = (
        recipe.packing
        if recipe.packing is not None
        else (can_pack and context.data is not None and context.data.packing_gain >= PACKING_GAIN)
    )
    if packing and not can_pack:
        raise UserError(
            "this model cannot pack records",
            "its layers carry state across a row, or use their own attention",
            "use --no-packing",
        )
    optimizer = "adamw" if recipe.optimizer == "auto" else recipe.optimizer
    _check_optimizer(optimizer, target.device)
    tied = bool(getattr(context.config, "tie_word_embeddings", False))
    host_embedding = target.device == "cuda" and method == "lora" and not tied
    return Plan(
        model=recipe.model,
        num_layers=context.config.num_hidden_layers,
        method=method,
        base_format=base_format,
        double_quant=recipe.double_quant,
        adapter=adapter,
        device=target.device,
        device_name=target.name,
        precision=precision,
        loss_scaling=precision == "fp16",
        embedding_place="host" if host_embedding else "device",
        attention=kernel,
        seq_len=context.seq_len,
        batch=recipe.batch,
        micro_batch=1,
        accumulation_order="micro-batch-major",
        packing=packing,
        recompute_layers=0,
        loss_chunk=recipe.loss_chunk or ladder.default_chunk(context.config.vocab_size),
        optimizer=optimizer,
        lr=recipe.lr or DEFAULT_LR[method],
        schedule=recipe.schedule,
        warmup=recipe.warmup,
        weight_decay=recipe.weight_decay,
        clip=recipe.clip,
        seed=recipe.seed,
        budget_bytes=target.budget_bytes,
    )


def _check_optimizer(optimizer: str, device: str) -> None:
    """Raises UserError when this optimizer does not run on this kind of device. Only paged state can be such a one
    (a test holds this to the engine, which needs torch)."""
    if optimizer.startswith("paged_") and device != "cuda":
        from fitune.engine.optimizers import require_device

        require_device(optimizer, device)


def attention_kernel(context: PlanContext, precision: str) -> tuple[str, bool]:
    """(kernel, whether packed rows are possible)."""
    uses_interface, can_pack = known.abilities(context.config)
    if not uses_interface:
        return "native", False
    if context.target.device == "cpu":
        return "cpu", can_pack
    return ("flash" if context.target.flash and precision in ("bf16", "fp16") else "efficient"), can_pack


def search(context: PlanContext, draft: Plan) -> ladder.Search:
    """The ladder for a draft.

    Raises:
        UserError: more layers are to be recomputed than there are.
    """
    recipe = context.recipe
    words = {"auto": None, "none": 0, "all": draft.num_layers}
    fixed = words[recipe.recompute] if isinstance(recipe.recompute, str) else recipe.recompute
    if fixed is not None and fixed > draft.num_layers:
        raise UserError(f"cannot recompute {fixed} layers", f"the model has {draft.num_layers}", "use --recompute all")
    rows = num_rows(context, draft)
    return ladder.Search(
        draft=draft,
        terms_of=placement.terms_of(context, draft, rows),
        seconds_of=lambda plan: context.step_time(plan).step_s,
        num_rows=rows,
        width=row_width(context, draft),
        chunk=draft.loss_chunk,
        fixed_chunk=recipe.loss_chunk is not None,
        micro_batch=recipe.micro_batch,
        recompute=fixed,
    )


def row_width(context: PlanContext, draft: Plan) -> int:
    """Tokens in the widest row that training will meet."""
    if context.data is None:
        return draft.seq_len
    if draft.packing:
        return min(draft.seq_len, context.data.most_step_tokens)
    return min(draft.seq_len, context.data.longest_tokens)


def num_rows(context: PlanContext, draft: Plan) -> int:
    """Most rows of a step."""
    if draft.packing and context.data is not None:
        return max(1, min(draft.batch, -(-2 * context.data.most_step_tokens // draft.seq_len)))
    return draft.batch


def _finished(context: PlanContext, chosen: ladder.Candidate) -> Plan:
    """A candidate's plan with its prediction: replayed where the context asks for it, else sums of tensors."""
    if not context.replays:
        return chosen.plan.with_(predicted=predicted_dict(chosen.peaks, context.target.overheads.workspace_bytes))
    from fitune.planner.predict import phases_of, predicted_of

    return chosen.plan.with_(predicted=predicted_of(context, phases_of(context, chosen.plan, briefly=True)))


def _result(
    context: PlanContext, chosen: ladder.Candidate, others: list[ladder.Candidate], rejected: Tried, *, fits: bool
) -> PlanResult:
    plan = chosen.plan.with_(predicted=predicted_dict(chosen.peaks, context.target.overheads.workspace_bytes))
    reasons: tuple[Reason, ...] = explain.reasons(context, chosen, rejected, others, fits=fits)
    plan = plan.with_(reasons=reasons)
    alternatives = []
    for candidate in ladder.alternatives(chosen, others):
        other = _finished(context, candidate)
        if (other.predicted.get("device_bytes") or 0) <= context.target.budget_bytes:
            alternatives.append({"plan": other.with_(predicted={}).as_dict(), "predicted": other.predicted})
    nearest = () if fits else nofit.nearest_fits(context, chosen.draft, chosen)
    return PlanResult(fits, plan, plan.predicted, reasons, tuple(alternatives), tuple(nearest), tuple(context.notes))
