"""What a prediction of RAM and disk needs to know of a model: sizes, and where its files are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.catalog import models as catalog
from fitune.memory import host
from fitune.memory.replay import StepTerms
from fitune.plan import Plan
from fitune.planner import placement

if TYPE_CHECKING:
    from fitune.planner.context import PlanContext

RANDOM = "random:"
_MOMENT_BYTES = {"adamw": 8.0, "lion": 4.0, "adamw8bit": 2 + 8 / 256, "lion8bit": 1 + 4 / 256}


def of(context: PlanContext, plan: Plan, terms: StepTerms, row_width: int) -> host.Facts:
    """The facts of a context's model under a plan, at rows of `row_width` tokens."""
    config, name = context.config, context.recipe.model.strip()
    if plan.optimizer_place != "device" and plan.adapter is not None:
        rows = context.num_rows(plan)
        terms = placement.terms_with_masters(context, plan, rows)(plan.micro_batch, row_width, plan.loss_chunk)
    in_host = context.tracer(placement.resident(plan)).in_host_sizes() if plan.masters_in_host else None
    shape = catalog.find(name.removeprefix(RANDOM))
    num_parameters = shape.params_total if shape is not None else _count(config)
    num_trained = num_parameters if plan.method == "full" else terms.trained_bytes // 4
    if in_host is not None:
        num_trained = in_host.num_trained
    width = host.WIDTHS.get(_stored_format(config), 2)
    compute = host.WIDTHS[plan.precision]
    linear = terms.largest_weight_bytes // compute
    return host.Facts(
        num_parameters=num_parameters,
        num_trained=num_trained,
        state_bytes=_state_bytes(terms, plan, num_trained) if in_host is None else in_host.state_bytes(plan.optimizer),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        largest_values=max(linear, config.vocab_size * config.hidden_size),
        largest_linear_values=linear,
        stored_width=width,
        download_bytes=_download(name, num_parameters * width),
        data_tokens=context.data.total_tokens if context.data is not None else None,
        keep_checkpoints=context.recipe.keep_checkpoints,
        platform=sys.platform,
        has_head=not getattr(config, "tie_word_embeddings", False),
        row_width=row_width,
        streamed_bytes=placement.streamed_bytes(terms, plan),
        makes_weights=name.startswith(RANDOM),
        stored_format=_stored_format(config),
        in_host=in_host,
        num_rows=context.num_rows(plan),
    )


def _count(config: Any) -> int:
    """Parameters of a model of this configuration, a tied head once."""
    import math

    from fitune.model.weights import meta_model, tensor_names

    return sum(math.prod(shape) for shape in tensor_names(meta_model(config)).values())


def _stored_format(config: Any) -> str:
    dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, "bf16")


def _state_bytes(terms: StepTerms, plan: Plan, num_trained: int) -> int:
    """Bytes of the optimizer's state. Of paged state the device holds only what is too small to page."""
    kind = plan.optimizer.removeprefix("paged_")
    if plan.optimizer != kind and kind in _MOMENT_BYTES:
        return int(num_trained * _MOMENT_BYTES[kind])
    return terms.state_bytes


def _download(name: str, file_bytes: int) -> int | None:
    """What is to be fetched before a run: nothing for files that are here and for seeded weights."""
    from fitune.model import bundled

    if name.startswith(RANDOM) or name.lower() == bundled.NAME or Path(name).expanduser().exists():
        return 0
    return None if name.count("/") != 1 and catalog.find(name) is None else file_bytes
