"""Recipe, model shape and machine in; one plan with its reasons out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.memory import known, shipped
from fitune.memory.constants import HEADROOM
from fitune.memory.variant import variant_of
from fitune.plan import Adapter, Plan, Reason
from fitune.planner import explain, ladder, nofit, positions
from fitune.planner.result import PlanResult, predicted_dict
from fitune.planner.target import Target, choose_target
from fitune.recipe import QUANTISED_FORMATS, Recipe
from fitune.units import format_bytes, from_gib

if TYPE_CHECKING:
    from fitune.hardware import Machine

PACKING_GAIN = 1.1  # packing is chosen when padding would cost at least this factor in tokens
DEFAULT_LR = {"full": 2e-5, "lora": 2e-4}


@dataclass(frozen=True)
class DataFacts:
    """What the data says. Without it a plan assumes every record to be `seq_len` long."""

    longest_tokens: int
    packing_gain: float
    most_step_tokens: int  # tokens of the largest step: a bound on what packed rows can hold together
    total_tokens: int | None = None  # of all records


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

    @property
    def limit_bytes(self) -> int:
        """What tensors and workspaces may take: the budget less headroom and what lies outside torch's allocator."""
        extra = self.target.overheads
        return int(self.target.budget_bytes * (1 - HEADROOM)) - extra.context_bytes - extra.workspace_bytes

    def tracer(self, plan: Plan) -> Any:
        """What gives the memory terms of a plan's variant (see `memory.known.tracer_for`), made once."""
        key = id(self.config), variant_of(plan), plan.optimizer
        if key not in self.tracers:
            self.tracers[key] = known.tracer_for(self.config, plan)
        return self.tracers[key]


Tried = list[tuple[Plan, ladder.Candidate]]
"""Base formats that do not fit (as drafts), each with the smallest candidate there is."""


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
    notes += _budget_note(target)
    context = PlanContext(recipe, target, config, seq_len, data, notes)
    draft, found, tried = choose(context, base_formats(context))
    if found:
        result = _result(context, draft, found[0], [(draft, c) for c in found[1:]], tried, fits=True)
    else:
        draft, least = min(tried, key=lambda pair: pair[1].peak_bytes)
        result = _result(context, draft, least, [], [pair for pair in tried if pair[0] is not draft], fits=False)
    if not detailed:
        return result
    from fitune.planner.predict import with_phases  # which makes plans itself

    return with_phases(context, result)


def choose(context: PlanContext, formats: list[str]) -> tuple[Plan, list[ladder.Candidate], Tried]:
    """The first format that fits, its candidates from the cheapest on (none where no format fits), and the formats
    that were rejected before it."""
    tried: Tried = []
    for base_format in formats:
        draft = _draft(context, base_format)
        made = search(context, draft)
        found = sorted(made.fitting(context.limit_bytes), key=lambda c: (c.cost, -c.micro_batch))
        if found:
            return draft, found, tried
        tried.append((draft, made.smallest()))
    return draft, [], tried


def _budget_note(target: Target) -> list[str]:
    """What of a card's memory is not for tensors; the sizes a plan shows are tensors and library workspaces."""
    if target.device != "cuda":
        return []
    extra = target.overheads
    return [
        f"besides what is shown the driver's context takes about {format_bytes(extra.context_bytes)} ({extra.source}), "
        f"and {HEADROOM:.0%} of the budget stay free for the allocator"
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
    return ladder.Search(
        terms_of=context.tracer(draft).terms,
        num_rows=num_rows(context, draft),
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


def _finished(context: PlanContext, draft: Plan, chosen: ladder.Candidate) -> Plan:
    extra = context.target.overheads
    return draft.with_(
        micro_batch=chosen.micro_batch,
        recompute_layers=chosen.recompute_layers,
        loss_chunk=chosen.loss_chunk,
        predicted=predicted_dict(chosen.peaks, extra.workspace_bytes),
    )


def _result(
    context: PlanContext,
    draft: Plan,
    chosen: ladder.Candidate,
    others: list[tuple[Plan, ladder.Candidate]],
    rejected: Tried,
    *,
    fits: bool,
) -> PlanResult:
    plan = _finished(context, draft, chosen)
    reasons: tuple[Reason, ...] = explain.reasons(context, plan, rejected, fits=fits)
    plan = plan.with_(reasons=reasons)
    alternatives = []
    for other_draft, candidate in others[:3]:
        other = _finished(context, other_draft, candidate)
        alternatives.append({"plan": other.with_(predicted={}).as_dict(), "predicted": other.predicted})
    nearest = () if fits else nofit.nearest_fits(context, draft, chosen)
    return PlanResult(fits, plan, plan.predicted, reasons, tuple(alternatives), tuple(nearest), tuple(context.notes))
