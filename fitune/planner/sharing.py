"""How several GPUs share one step, as a search for a plan sees it: what each of `planner.ways` changes in a draft and
in its terms, and which jobs it cannot do. Which one is taken is `planner.layouts`'."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fitune.memory import known
from fitune.memory import layouts as memory_layouts
from fitune.memory.layouts import Ends
from fitune.memory.policies import highest_peaks
from fitune.memory.replay import StepTerms
from fitune.parallel.world import FLAT_OPTIMIZERS
from fitune.parallel.zero_library import is_installed
from fitune.plan import Plan, Reason
from fitune.planner.ways import MISSING, PACKED, ZERO, Layout
from fitune.recipe import Recipe
from fitune.speed.together import is_cut_by_outputs

if TYPE_CHECKING:
    from fitune.planner.context import PlanContext
    from fitune.planner.ladder import TermsOf


def drafted(draft: Plan, layout: Layout, recipe: Recipe) -> Plan:
    """A draft for one GPU as each of a layout's ranks has it."""
    if layout.size == 1:
        return draft
    changes: dict[str, Any] = dict(parallel=layout.way, world_size=layout.size)
    if layout.way == "fsdp2":
        changes |= dict(stream_from="shards", resident_layers=0)
    elif layout.way == "streamed":
        pinned = "pinned" if draft.device == "cuda" else "pageable"
        changes |= dict(stream_from=pinned, resident_layers=0) if draft.method == "lora" else {}
    elif layout.way in ZERO:
        folder = recipe.offload_folder and os.path.abspath(os.path.expanduser(recipe.offload_folder))
        changes |= dict(offload_optimizer=recipe.offload_optimizer, offload_params=recipe.offload_params,
                        offload_folder=folder)  # fmt: skip
    return draft.with_(**changes)


def drafts(draft: Plan, others: Iterator[Plan], recipe: Recipe) -> Iterator[Plan]:
    """Of the drafts with something outside the card (`placement.drafts` of one GPU) those that a layout can have."""
    if draft.parallel in ("none", "cp"):
        yield from others
    elif draft.parallel == "fsdp2":
        yield draft.with_(offload_inputs=True)
        yield draft.with_(accumulation_order="layer-major")
        yield draft.with_(accumulation_order="layer-major", offload_inputs=True)
    elif draft.parallel in ("ddp", "streamed"):
        for other in others:
            streams = other.stream_from != "none"
            if recipe.parallel in ("auto", "streamed" if streams else "ddp"):
                yield other.with_(parallel="streamed" if streams else "ddp")


def of_rank(context: PlanContext, draft: Plan, num_rows: int, whole: TermsOf) -> TermsOf:
    """A rank's terms from those of the whole model on one card. Of a pipeline's stages the context's rank's, or the
    one that needs most."""
    if draft.world_size == 1:
        return whole
    ends = ends_of(context, draft)

    def terms(rows: int, columns: int, chunk: int) -> StepTerms:
        if draft.parallel == "cp":
            columns = -(-columns // draft.world_size)
        found, count = whole(rows, columns, chunk), -(-num_rows // rows)
        if draft.parallel != "pp":
            return memory_layouts.rank_terms(found, draft, ends, micro_batches=count)
        if context.rank is not None:
            return memory_layouts.rank_terms(found, draft, ends, micro_batches=count, stage=context.rank)
        first, last = (
            memory_layouts.rank_terms(found, draft, ends, micro_batches=count, stage=stage)
            for stage in (0, draft.world_size - 1)
        )
        needs = highest_peaks(first, count > 1), highest_peaks(last, count > 1)
        return first if needs[0][0] > needs[1][0] and needs[0][-1] > needs[1][-1] else last

    return terms


def ends_of(context: PlanContext, draft: Plan) -> Ends:
    """What is around the layers on the card."""
    config = context.config
    width = 4 if draft.precision == "fp32" else 2
    table = config.vocab_size * config.hidden_size * width
    tied = bool(getattr(config, "tie_word_embeddings", False))
    return Ends(
        embedding=table if draft.embedding_place == "device" or draft.parallel == "tp" else 0,
        head=0 if tied or draft.head_place == "host" else table,
        adapters_whole=_adapters_whole(context, draft),
    )


def _adapters_whole(context: PlanContext, draft: Plan) -> float:
    linears = [m for layer in context.decoder.layers for m in layer.linears]
    if draft.adapter is not None and "all-linear" not in draft.adapter.targets:
        linears = [m for m in linears if m.name in draft.adapter.targets]
    whole = sum(m.inputs if is_cut_by_outputs(m) else m.outputs for m in linears)
    return whole / max(1, sum(m.inputs + m.outputs for m in linears))


def refused(context: PlanContext, way: str, size: int) -> str | None:
    """Why a layout cannot do this job, in a sentence; None where it can."""
    recipe, config = context.recipe, context.config
    optimizer = "adamw" if recipe.optimizer == "auto" else recipe.optimizer
    full = recipe.method == "full"
    four_bit = recipe.method == "qlora" or recipe.base_format in ("nf4", "fp4", "int8")
    if way in ("fsdp2", "tp", *ZERO) and optimizer not in FLAT_OPTIMIZERS:
        return f"state of {optimizer} cannot be cut into parts: it belongs to whole matrices or blocks of them"
    at_hand = context.machine is not None and not context.machine.assumptions
    if way in ZERO and at_hand and not is_installed():
        return MISSING
    if way in ZERO and optimizer == "lion" and recipe.offload_optimizer != "none":
        return "DeepSpeed updates lion's state on the GPU only"
    if way == "cp" and not all(known.abilities(config)):
        return "its layers look from token to token elsewhere than in attention that can be given heads for tokens"
    if way == "streamed" and full:
        return "only frozen weights are streamed"
    if way == "zero3" and four_bit:
        return PACKED
    if way in ("tp", "pp", "zero3") and recipe.dora:
        return "DoRA's start needs the weights of every layer"
    if way == "pp" and full and getattr(config, "tie_word_embeddings", False):
        return "the head is the embedding: the first and the last GPU would train the same weights"
    if way == "pp" and config.num_hidden_layers < size:
        return f"the model has {config.num_hidden_layers} layers"
    heads = getattr(config, "num_attention_heads", size)
    if way == "tp" and heads % size:
        return f"{heads} heads cannot be shared by {size} GPUs"
    return None


def settled(plan: Plan, reasons: Sequence[Reason]) -> tuple[Plan, tuple[Reason, ...]]:
    """A chosen rank's plan with what its engine wants, and its reasons: tensor parallel cuts the embedding and has it
    on the card. (It is searched as it is traced, with the table where one GPU has it.)"""
    if plan.parallel != "tp":
        return plan, tuple(reasons)
    why = Reason("embedding", "device", "its vocabulary is cut: every GPU holds its part")
    return plan.with_(embedding_place="device"), tuple(why if r.decision == "embedding" else r for r in reasons)
