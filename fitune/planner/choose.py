"""Which candidate is taken: the drafts of a recipe in their order, a search in each, and places outside the card."""

from __future__ import annotations

import functools
from dataclasses import replace

from fitune.errors import UserError
from fitune.memory import known
from fitune.plan import Adapter, Plan
from fitune.planner import in_host, ladder, placement, sharing
from fitune.planner.context import PlanContext
from fitune.planner.target import Target
from fitune.recipe import QUANTISED_FORMATS

PACKING_GAIN = 1.1  # packing is chosen when padding would cost at least this factor in tokens
DEFAULT_LR = {"full": 2e-5, "lora": 2e-4}

Tried = list[tuple[Plan, ladder.Candidate]]
"""Base formats that do not fit on the card (as drafts), each with the smallest candidate of those that are there as a
whole."""


def choose(context: PlanContext, formats: list[str]) -> tuple[list[ladder.Candidate], Tried]:
    """The candidates that fit, the chosen one first and then by their time (none where nothing fits), and the formats
    whose weights cannot all stay on the card.

    A quantised base comes after a wide one: where that one's weights fit, it is not looked at; where they only fit
    streamed, it is taken if it is faster by more than 5 %.
    """
    tried: Tried = []
    found: list[ladder.Candidate] = []
    for base_format in formats:
        draft = draft_of(context, base_format)
        resident = search(context, draft)
        fitting = resident.fitting(context.limit_bytes)
        found += fitting + _placed(context, draft, fitting)
        if fitting:
            break
        tried.append((draft, resident.smallest()))
    # Not for the many offers to whom nothing fits, nor where not even a context has room.
    if not found and context.replays and not context.is_simple and context.limit_bytes > 0:
        found = _tight(context, [draft for draft, _ in tried])
        for draft, _ in tried:
            found += in_host.candidates(context, draft, search)
    return ladder.ordered(found), tried


def _tight(context: PlanContext, formats: list[Plan]) -> list[ladder.Candidate]:
    """Candidates with a tiled MLP, the head or the adapters' masters in host memory, of the first group of such drafts
    in which one fits. (Each has to be traced, which takes seconds: they are not looked at where another fits, nor a
    quantised base where a wide one fits that does not wait for the link.)"""
    has_mlp = any(linear.in_mlp for layer in context.decoder.layers for linear in layer.linears)
    chunk = context.recipe.loss_chunk or placement.head_chunk(context.config.hidden_size)
    formats = [draft for draft in formats if _has_ram(context, draft)]
    groups = [placement.tight_drafts(draft, context.row_width(draft), has_mlp, chunk) for draft in formats]
    for group in zip(*groups, strict=True):
        found: list[ladder.Candidate] = []
        for drafts in group:
            if found and context.step_time(ladder.ordered(found)[0].plan).bound != "link":
                break
            for placed in drafts:
                candidates = search(context, placed).fitting(context.limit_bytes)
                found += [s for c in candidates if (s := settled(context, c)) is not None]
        found += _most_resident(context, [c for c in found if c.draft.stream_from != "none"])
        if found:
            return found
    return []


def _has_ram(context: PlanContext, draft: Plan) -> bool:
    """Whether all weights and a row's inputs have room in RAM: the last rungs are not tried for a job that would have
    to stream from a disk."""
    plan = draft.with_(stream_from="pinned", resident_layers=0, offload_inputs=True, micro_batch=1,
                       recompute_layers=draft.num_layers)  # fmt: skip
    if plan.method != "lora" or plan.world_size > 1:
        return False
    width = context.row_width(plan)
    terms = placement.terms_of(context, plan, context.num_rows(plan))(1, width, plan.loss_chunk)
    placed = placement.settled(context, plan, terms, width)
    return placed is not None and placed.stream_from != "disk"


def least_of(context: PlanContext, tried: Tried) -> ladder.Candidate:
    """The candidate with the lowest peak of all formats, with what can wait outside the card there."""
    found = [least for _, least in tried]
    for draft, _ in () if context.is_simple else tried:
        for placed in sharing.drafts(draft, placement.drafts(draft), context.recipe):
            if placed.accumulation_order == "micro-batch-major" and placed.resident_layers in (0, None):
                least = settled(context, search(context, placed).smallest())
                found += [least] if least is not None else []
    return min(found, key=lambda c: c.peak_bytes)


def _placed(context: PlanContext, draft: Plan, resident: list[ladder.Candidate]) -> list[ladder.Candidate]:
    """Candidates with weights or layer inputs outside the card; none where the resident ones lose nothing, or the
    person wants it simple."""
    if context.is_simple:
        return []
    whole = context.num_rows(draft)
    if any(c.recompute_layers == 0 and c.micro_batch == whole for c in resident):
        return []
    found = []
    for placed in sharing.drafts(draft, placement.drafts(draft), context.recipe):
        candidates = search(context, placed).fitting(context.limit_bytes)
        found += [s for c in candidates if (s := settled(context, c)) is not None]
    return found + _most_resident(context, [c for c in found if c.draft.stream_from not in ("none", "shards")])


def settled(context: PlanContext, candidate: ladder.Candidate) -> ladder.Candidate | None:
    """The candidate where the host has room for it; None where it has none, or nothing of it is there."""
    plan = candidate.plan
    if plan.offload_inputs and plan.recompute_layers == 0:
        return None
    if plan.accumulation_order == "layer-major" and plan.micro_batch >= context.num_rows(plan):
        return None
    placed = placement.settled(context, plan, candidate.terms, context.row_width(plan))
    if placed is None or placed.stream_from == plan.stream_from:
        return candidate if placed is not None else None
    draft = candidate.draft.with_(stream_from=placed.stream_from)
    return replace(candidate, draft=draft, cost=context.step_time(placed).step_s)


def _most_resident(context: PlanContext, streams: list[ladder.Candidate]) -> list[ladder.Candidate]:
    return ladder.most_resident(streams, functools.partial(search, context), context.limit_bytes,
                                functools.partial(settled, context))  # fmt: skip


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


def draft_of(context: PlanContext, base_format: str) -> Plan:
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
            "its layers carry state across a row, count its tokens by themselves, or use their own attention",
            "use --no-packing",
        )
    optimizer = "adamw" if recipe.optimizer == "auto" else recipe.optimizer
    _check_optimizer(optimizer, target.device)
    tied = bool(getattr(context.config, "tie_word_embeddings", False))
    host_embedding = target.device == "cuda" and method == "lora" and not tied
    plan = Plan(
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
    return sharing.drafted(plan, context.layout, recipe)


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
    rows = context.num_rows(draft)
    return ladder.Search(
        draft=draft,
        terms_of=functools.cache(placement.terms_of(context, draft, rows)),
        seconds_of=lambda plan: context.step_time(plan).step_s,
        num_rows=rows,
        width=context.row_width(draft),
        chunk=draft.loss_chunk,
        fixed_chunk=recipe.loss_chunk is not None or draft.head_place == "host",
        micro_batch=recipe.micro_batch,
        recompute=fixed,
        chunk_token_bytes=ladder.MOST_BYTES_PER_LOGIT * (context.config.vocab_size + context.config.hidden_size),
    )
