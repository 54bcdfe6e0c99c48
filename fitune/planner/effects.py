"""What each technique saves in one job: the plan predicted again with and without it, and by its formula where the step
would have to be traced first or the technique is not in fitune."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fitune.errors import UserError
from fitune.memory import additive, known, shipped, trace_cache
from fitune.memory.phases import needed_bytes
from fitune.memory.shipped import CatalogConfig
from fitune.memory.variant import variant_of
from fitune.plan import Adapter, Plan
from fitune.planner import phases, placement, sharing
from fitune.planner.context import PlanContext
from fitune.planner.techniques_list import ALL, Technique
from fitune.recipe import QUANTISED_FORMATS

PREDICTED, FORMULA = "predicted", "formula"
USUAL_ADAPTER = Adapter(16, 32, 0.0, "none", ("all-linear",))
USUAL_GPUS = 2  # what sharding is shown for where a plan has one GPU
SCORE_BYTES, KEPT_SCORE_BYTES = 8, 2  # plain attention: fp32 scores and 16-bit copies at work; what the backward needs


@dataclass(frozen=True)
class Effect:
    """One technique in one job.

    Attributes:
        used: the plan has it. Then `saves_bytes` is what the plan would need more without it, else what it would need
            less with it; negative: it would make it worse; None: it cannot be told, or does not apply.
        basis: predicted | formula.
        num_gpus: what several GPUs' figures are for.
    """

    technique: Technique
    used: bool
    saves_bytes: int | None
    basis: str
    num_gpus: int | None = None

    def as_dict(self) -> dict[str, Any]:
        t = self.technique
        return {"technique": t.key, "name": t.name[0], "used": self.used, "saves_bytes": self.saves_bytes,
                "basis": self.basis, "num_gpus": self.num_gpus, "exact": t.exact, "setting": t.setting,
                "source": t.source[1]}  # fmt: skip


def effects(context: PlanContext, plan: Plan, *, used_only: bool = False) -> list[Effect]:
    """Every technique of the list under a plan: those it uses by what they save, then the others by what they would
    (with `used_only` not these, and sums of tensors in place of replays: in a fraction of a second). Of GPUs that are
    not alike, on the one with the least memory.

    Raises:
        UserError: as `phases.phases_of`.
    """
    job = _Job(context, plan.of_least(), used_only)
    found = [effect for technique in ALL if (effect := _effect(job, technique)) is not None]
    found = [effect for effect in found if effect.used or not used_only]
    return sorted(found, key=lambda e: (not e.used, -(e.saves_bytes or 0)))


def _effect(job: _Job, technique: Technique) -> Effect | None:
    used, saved = _RULES[technique.key](job)
    if saved is None and not used:
        return None
    several = technique.key in _SEVERAL
    basis = FORMULA if isinstance(saved, _ByFormula) else PREDICTED
    return Effect(technique, used, None if saved is None else int(saved), basis, job.num_gpus if several else None)


class _ByFormula(int):
    """Bytes that were not predicted."""


Answer = tuple[bool, int | None]


class _Job:
    """A plan with what formulas need of it, and predictions of plans beside it."""

    def __init__(self, context: PlanContext, plan: Plan, used_only: bool = False):
        self.context, self.plan, self.used_only = context, plan, used_only
        self.num_gpus = plan.world_size if plan.world_size > 1 else USUAL_GPUS

    @cached_property
    def prediction(self) -> Any:
        return phases.phases_of(self.context, self.plan, briefly=True)

    @cached_property
    def at_peak(self) -> dict[str, int]:
        """Owner to bytes on the device at the step's peak (a brief prediction does not tell them apart)."""
        return dict(phases.phases_of(self.context, self.plan).phase("step").device)

    @cached_property
    def terms(self) -> Any:
        return self.context.tracer(self.plan).terms(self.plan.micro_batch, self.width, self.plan.loss_chunk)

    @cached_property
    def width(self) -> int:
        return self.context.row_width(self.plan)

    @cached_property
    def owners(self) -> dict[str, int]:
        """Bytes of weights, adapters or masters, and optimizer on the device; gradients beside them."""
        return additive.resident(self.terms, self.plan) | {"gradients": self.terms.trained_bytes}

    @property
    def decoder(self) -> Any:
        return self.context.decoder

    @property
    def layer_params(self) -> int:
        """Of all decoder layers."""
        return sum(layer.params for layer in self.decoder.layers)

    @property
    def held_params(self) -> int:
        """Of the layers whose weights are on the device: all of them, or those that are not streamed and the ring's."""
        away = len(self.plan.streamed_layers())
        held = self.plan.num_layers - away + min(away, self.plan.ring_buffers)
        return self.layer_params * held // self.plan.num_layers

    def less(self, **changes: Any) -> int | None:
        """Bytes that the plan would need more with these changes; None where that is not known without a trace."""
        other = self.plan.with_(**changes)
        if not _is_known(self.context.config, self.plan, other):
            return None
        try:
            if self.used_only:
                return placement.highest_peak(self.context, other) - placement.highest_peak(self.context, self.plan)
            needs = needed_bytes(phases.phases_of(self.context, other, briefly=True).most)
        except UserError:
            return None
        return needs - needed_bytes(self.prediction.most)

    def either(self, used: bool, without: dict[str, Any], with_it: dict[str, Any] | None, formula: float) -> Answer:
        """Predicted in the direction that applies, else by the formula; `with_it` None: it does not apply."""
        if used:
            more = self.less(**without)
            return True, _ByFormula(formula) if more is None else more
        if with_it is None or self.used_only:
            return False, None
        more = self.less(**with_it)
        return False, _ByFormula(formula) if more is None else -more


def _is_known(config: Any, plan: Plan, other: Plan) -> bool:
    """Whether nothing has to be traced to predict `other`."""
    if variant_of(plan) == variant_of(other):
        return True
    if isinstance(config, CatalogConfig) and shipped.find(config, other) is not None:
        return True
    return trace_cache.load(known.cache_key(config, other)) is not None


# ---- formats and adapters --------------------------------------------------------------------------------------------


def _half(name: str) -> Callable[[_Job], Answer]:
    """16-bit arithmetic: as much as all weights, activations and logits that are 16 bits wide now."""

    def rule(job: _Job) -> Answer:
        plan = job.plan
        if plan.precision != name:
            return False, None
        wide = (*_ACTIVATIONS, *(("weights",) if plan.base_format == name else ()))
        return True, _ByFormula(sum(size for owner, size in job.at_peak.items() if owner in wide))

    return rule


def _quantised(name: str, bits: float) -> Callable[[_Job], Answer]:
    def rule(job: _Job) -> Answer:
        plan = job.plan
        if plan.adapter is None:
            return False, None
        with_it = {"base_format": name, "double_quant": True} if plan.base_format not in QUANTISED_FORMATS else None
        return job.either(
            plan.base_format == name, {"base_format": plan.precision}, with_it, job.held_params * (2 - bits / 8)
        )

    return rule


def _double_quant(job: _Job) -> Answer:
    if job.plan.base_format not in ("nf4", "fp4"):
        return False, None
    saved = job.held_params * (4 / 64 - (1 + 4 / 256) / 64)
    return job.either(job.plan.double_quant, {"double_quant": False}, {"double_quant": True}, saved)


def _full(plan: Plan) -> dict[str, Any]:
    return {"method": "full", "adapter": None, "base_format": plan.precision, "embedding_place": "device",
            "stream_from": "none", "resident_layers": None, "head_place": "device"}  # fmt: skip


def _lora(job: _Job) -> Answer:
    plan = job.plan
    if plan.base_format in QUANTISED_FORMATS:
        return False, None
    with_it = {"method": "lora", "adapter": USUAL_ADAPTER} if plan.adapter is None else None
    return job.either(plan.adapter is not None, _full(plan), with_it, 16 * job.decoder.params)


def _qlora(job: _Job) -> Answer:
    plan = job.plan
    used = plan.adapter is not None and plan.base_format in QUANTISED_FORMATS
    adapter = plan.adapter or USUAL_ADAPTER
    with_it = {"method": "lora", "adapter": adapter, "base_format": "nf4", "double_quant": True}
    return job.either(used, _full(plan), with_it, (17.5 if plan.adapter is None or used else 1.5) * job.decoder.params)


# ---- activations -----------------------------------------------------------------------------------------------------


def _accumulation(job: _Job) -> Answer:
    plan = job.plan
    with_it = {"micro_batch": 1} if plan.batch > 1 else None
    return job.either(plan.micro_batch < plan.batch, {"micro_batch": plan.batch}, with_it, 0)


def _checkpointing(job: _Job) -> Answer:
    return job.either(job.plan.recompute_layers > 0, {"recompute_layers": 0},
                      {"recompute_layers": job.plan.num_layers}, 0)  # fmt: skip


def _flash(job: _Job) -> Answer:
    plan = job.plan
    if plan.attention not in ("flash", "efficient"):
        return False, None
    heads = max((layer.heads for layer in job.decoder.layers), default=0)
    scores = plan.micro_batch * heads * job.width**2
    kept = plan.num_layers - plan.recompute_layers
    return True, _ByFormula(SCORE_BYTES * scores + KEPT_SCORE_BYTES * scores * max(kept, 1))


def _chunked_loss(job: _Job) -> Answer:
    plan = job.plan
    tokens = plan.micro_batch * job.width
    formula = 8 * job.decoder.vocab * max(0, tokens - plan.loss_chunk)
    return job.either(plan.loss_chunk < tokens, {"loss_chunk": tokens}, None, formula)


def _mlp_tiles(job: _Job) -> Answer:
    plan = job.plan
    linears = [linear for layer in job.decoder.layers for linear in layer.linears if linear.in_mlp]
    inner = max((linear.outputs for linear in linears), default=0)
    tiles = plan.mlp_tiles if plan.mlp_tiles > 1 else 4
    formula = 6 * plan.micro_batch * job.width * inner * (1 - 1 / tiles)
    used = plan.mlp_tiles > 1
    return job.either(used, {"mlp_tiles": 1}, {"mlp_tiles": 4} if plan.recompute_layers else None, formula)


def _packing(job: _Job) -> Answer:
    return job.plan.packing, 0 if job.plan.packing else None


def _layer_major(job: _Job) -> Answer:
    used = job.plan.accumulation_order == "layer-major"
    return used, 0 if used else None


# ---- states and places -----------------------------------------------------------------------------------------------


def _optimizer(name: str, formula_bytes: float, only_from: tuple[str, ...] = ("adamw",)) -> Callable[[_Job], Answer]:
    """Another optimizer against AdamW on the device."""

    def rule(job: _Job) -> Answer:
        kind = job.plan.optimizer.removeprefix("paged_")
        trained = job.owners["gradients"] / 4
        with_it = {"optimizer": name} if job.plan.optimizer in only_from else None
        return job.either(kind == name, {"optimizer": "adamw"}, with_it, formula_bytes * trained)

    return rule


def _paged(job: _Job) -> Answer:
    plan = job.plan
    if plan.device != "cuda":
        return False, None
    used = plan.optimizer.startswith("paged_")
    plain = plan.optimizer.removeprefix("paged_")
    with_it = {"optimizer": f"paged_{plain}"} if plain in ("adamw", "adamw8bit") else None
    return job.either(used, {"optimizer": plain}, with_it, job.owners.get("optimizer", 0))


def _cpu_optimizer(job: _Job) -> Answer:
    if job.plan.optimizer_place != "device":
        trained = job.decoder.params if job.plan.method == "full" else job.owners["gradients"] // 4
        return True, _ByFormula(12 * trained)
    return False, _ByFormula(job.owners.get("optimizer", 0) + job.owners.get("masters", 0))


def _host_embedding(job: _Job) -> Answer:
    plan = job.plan
    used = plan.embedding_place == "host"
    table = 2 * job.decoder.vocab * job.decoder.hidden
    return job.either(used, {"embedding_place": "device"}, None, table)


def _offload(job: _Job) -> Answer:
    plan = job.plan
    if not plan.recompute_layers or plan.device != "cuda":
        return False, None
    saved = placement.input_bytes(plan, job.width, job.decoder.hidden)
    return job.either(plan.offload_inputs, {"offload_inputs": False}, {"offload_inputs": True}, saved)


def _streaming(job: _Job) -> Answer:
    plan = job.plan
    if plan.adapter is None or plan.device != "cuda" or plan.num_layers < 3:
        return False, None
    used = plan.stream_from != "none"
    if used:
        away = max(0, len(plan.streamed_layers()) - plan.ring_buffers)
        layers = job.layer_params * (0.52 if plan.base_format in ("nf4", "fp4") else 2)
    else:  # what could go: all that is there but the ends and two buffers
        away = plan.num_layers - 2
        layers = job.owners["weights"] - 2 * job.decoder.vocab * job.decoder.hidden
    without = {"stream_from": "none", "resident_layers": None, "head_place": "device"}
    with_it = {"stream_from": "pinned", "resident_layers": 0}
    return job.either(used, without, with_it, max(0, layers) * away / plan.num_layers)


# ---- several GPUs ----------------------------------------------------------------------------------------------------


def _data_parallel(job: _Job) -> Answer:
    used = job.plan.parallel in ("ddp", "streamed")
    return used, _ByFormula(0) if used else None


def _sharded(way: str, *owners: str) -> Callable[[_Job], Answer]:
    """What each of n GPUs does not hold when these owners' bytes are cut among them; nothing where this way of
    `Plan.parallel` cannot do the job."""

    def rule(job: _Job) -> Answer:
        used = job.plan.parallel == way
        packed = way == "zero3" and job.plan.base_format in QUANTISED_FORMATS  # chosen by the plan, not asked for
        if not used and (packed or sharing.refused(job.context, way, job.num_gpus)):
            return False, None
        return used, _ByFormula(sum(job.owners.get(owner, 0) for owner in owners) * (1 - 1 / job.num_gpus))

    return rule


def _context_parallel(job: _Job) -> Answer:
    """What other GPUs hold of a row's activations: of one GPU's, or of a plan's that is cut already."""
    used = job.plan.parallel == "cp"
    if not used and (job.used_only or sharing.refused(job.context, "cp", job.num_gpus)):
        return False, None
    held = sum(job.at_peak.get(owner, 0) for owner in _ACTIVATIONS)
    return used, _ByFormula(held * (job.num_gpus - 1) if used else held * (1 - 1 / job.num_gpus))


_ACTIVATIONS = ("inputs", "saved", "logits", "temporary")
_STATE = ("optimizer", "masters")
_EVERYTHING = ("weights", "gradients", *_STATE)
_SEVERAL = ("data_parallel", "zero1", "zero2", "zero3", "fsdp", "tensor_parallel", "pipeline_parallel",
            "context_parallel")  # fmt: skip
_RULES: dict[str, Callable[[_Job], Answer]] = {
    "bf16": _half("bf16"), "fp16": _half("fp16"),
    "int8": _quantised("int8", 8), "nf4": _quantised("nf4", 4.13), "fp4": _quantised("fp4", 4.13),
    "double_quant": _double_quant, "lora": _lora, "qlora": _qlora,
    "accumulation": _accumulation, "layer_major": _layer_major, "checkpointing": _checkpointing,
    "flash_attention": _flash, "chunked_loss": _chunked_loss, "mlp_tiles": _mlp_tiles, "packing": _packing,
    "adam8bit": _optimizer("adamw8bit", 6), "paged_optimizer": _paged, "cpu_optimizer": _cpu_optimizer,
    "adafactor": _optimizer("adafactor", 8), "lion": _optimizer("lion", 4), "host_embedding": _host_embedding,
    "offload": _offload, "streaming": _streaming,
    "data_parallel": _data_parallel, "zero1": _sharded("zero1", *_STATE),
    "zero2": _sharded("zero2", "gradients", *_STATE), "zero3": _sharded("zero3", *_EVERYTHING),
    "fsdp": _sharded("fsdp2", *_EVERYTHING), "tensor_parallel": _sharded("tp", *_EVERYTHING),
    "pipeline_parallel": _sharded("pp", *_EVERYTHING), "context_parallel": _context_parallel,
}  # fmt: skip
