"""A fitune recipe as another tool would run it."""

from __future__ import annotations

from fitune.catalog.models import ModelShape
from fitune.errors import UserError
from fitune.memory.stacks.settings import Method, StackSettings, StackShape, parse_targets
from fitune.memory.stacks.shapes import from_catalog
from fitune.memory.stacks.tools import DEFAULTS, Defaults
from fitune.recipe import Recipe

# The recipe's optimizers by the names of the Trainer; adamw and its 8-bit form are the tool's own.
_OPTIMIZERS = {
    "paged_adamw": "paged_adamw_32bit", "paged_adamw8bit": "paged_adamw_8bit", "adafactor": "adafactor",
    "lion": "lion_32bit", "lion8bit": "lion_8bit", "sgd": "sgd",
}  # fmt: skip


def from_recipe(
    recipe: Recipe,
    shape: ModelShape | StackShape,
    stack: str,
    *,
    parallel: str | None = None,
    n_gpus: int | None = None,
    metric: str = "allocated",
    card_gib: float | None = None,
) -> StackSettings:
    """What ``stack`` would be told to run the recipe, with its own defaults for what the recipe leaves open.

    Left open, the micro-batch is the batch over the GPUs (without accumulation), the method LoRA, or QLoRA where a
    quantised base format is named. A recipe's partial recomputation has no equivalent elsewhere and counts as
    checkpointing everything. GPUs and how they share the work are the recipe's ``nproc`` and ``parallel`` unless said
    here (several GPUs without a way are DDP; layers streamed over several have no equivalent). Evaluation is a phase
    when the recipe evaluates.

    Raises:
        UserError: an unknown stack, a model that is not modelled, adapters on something that is no linear, DoRA.
    """
    d = defaults_of(stack)
    if recipe.dora:
        raise UserError(
            f"cannot predict DoRA with {stack}",
            "its memory in other tools is not modelled",
            "predict it with fitune (no --stack), or leave dora out",
        )
    method = _method(recipe)
    n_gpus = n_gpus or recipe.nproc or 1
    parallel = parallel or _parallel(recipe, stack, n_gpus)
    micro = recipe.micro_batch or max(1, recipe.batch // n_gpus)
    adapters = method != "full"
    names = recipe.lora_targets if isinstance(recipe.lora_targets, str) else ",".join(recipe.lora_targets)
    checkpointing = {"none": "no", "0": "no", "auto": d.checkpointing}.get(str(recipe.recompute), "yes")
    if checkpointing == "yes" and d.checkpointing == "unsloth":
        checkpointing = "unsloth"
    return StackSettings(
        shape if isinstance(shape, StackShape) else from_catalog(shape),
        method, _base_dtype(recipe, method, d),
        adapter_rank=recipe.lora_r if adapters else 0,
        adapter_targets=parse_targets(names) if adapters else (),
        adapter_dropout=recipe.lora_dropout if "lora_dropout" in recipe.model_fields_set else d.dropout,
        optimizer=_optimizer(recipe, method, d), checkpointing=checkpointing, attention=d.attention,
        loss="chunked" if recipe.loss_chunk and d.loss == "full_logits" else d.loss,
        packing=bool(recipe.packing), micro_batch=micro, seq_len=recipe.seq_len,
        grad_accum=max(1, recipe.batch // (micro * n_gpus)), parallel=parallel, n_gpus=n_gpus, metric=metric,
        evaluation=bool(recipe.eval_every or recipe.eval_data),
        eval_batch=d.eval_batch, card_gib=card_gib, torch_compile=d.torch_compile,
        kernels=d.kernels, rest_in_fp32=d.rest_in_fp32 and recipe.precision == "auto",
    )  # fmt: skip


def defaults_of(stack: str) -> Defaults:
    """The defaults of a stack.

    Raises:
        UserError: there is no such stack.
    """
    if stack not in DEFAULTS:
        raise UserError(f"there is no stack {stack!r}", "its memory is not modelled", f"one of: {', '.join(DEFAULTS)}")
    return DEFAULTS[stack]


def _method(recipe: Recipe) -> Method:
    quantised = recipe.base_format in ("nf4", "fp4", "int8") or recipe.method == "qlora"
    if recipe.method == "full":
        return "full"
    return ("qlora8" if recipe.base_format == "int8" else "qlora") if quantised else "lora"


def _parallel(recipe: Recipe, stack: str, n_gpus: int) -> str:
    if recipe.parallel == "streamed":
        raise UserError(
            f"cannot predict parallel = streamed with {stack}",
            "no other tool streams layers over several GPUs",
            "choose ddp or fsdp2, or leave --stack out",
        )
    if n_gpus == 1 or recipe.parallel == "none":
        return "single"
    return "ddp" if recipe.parallel == "auto" else recipe.parallel


def _base_dtype(recipe: Recipe, method: str, d: Defaults) -> str:
    if method in ("qlora", "qlora8"):
        name = "nf4" if recipe.base_format == "auto" else recipe.base_format
        return f"{name} (double quant)" if recipe.double_quant and name in ("nf4", "fp4") else name
    if recipe.base_format in ("bf16", "fp16", "fp32"):
        return recipe.base_format
    if recipe.precision in ("fp16", "fp32"):
        return recipe.precision
    return d.full_dtype if method == "full" else d.adapter_dtype


def _optimizer(recipe: Recipe, method: str, d: Defaults) -> str:
    if recipe.optimizer == "auto":
        return d.full_optimizer if method == "full" and d.full_optimizer else d.optimizer
    if recipe.optimizer == "adamw":
        return d.optimizer if "8bit" not in d.optimizer else "adamw_torch"
    return d.optimizer_8bit if recipe.optimizer == "adamw8bit" else _OPTIMIZERS[recipe.optimizer]
