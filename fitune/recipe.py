"""What is wanted: one strict YAML file or the same options on the command line.

Every setting is declared once, here: the command line's options and help, `docs/recipe.md` and the validation
come from these fields. ``None`` means "derive it": the planner decides and says why.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fitune.errors import UserError
from fitune.units import parse_size

Method = Literal["auto", "full", "lora", "qlora"]
BaseFormat = Literal["auto", "fp32", "bf16", "fp16", "int8", "nf4", "fp4"]
Precision = Literal["auto", "bf16", "fp16", "fp32"]
OptimizerName = Literal[
    "auto", "adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit", "adafactor", "lion", "lion8bit", "sgd"
]
Schedule = Literal["cosine", "linear", "constant"]
Parallel = Literal["auto", "none", "ddp", "streamed", "fsdp2", "zero1", "zero2", "zero3", "tp", "pp", "cp"]
OffloadOptimizer = Literal["none", "cpu", "nvme"]
OffloadParams = Literal["none", "cpu"]
Effort = Literal["simple", "usual", "any"]
LAYOUTS: dict[str, tuple[str, ...]] = {
    "simple": ("none", "ddp"),
    "usual": ("none", "ddp", "streamed", "fsdp2"),
    "any": ("none", "ddp", "streamed", "fsdp2", "zero1", "zero2", "zero3", "tp", "cp", "pp"),
}
"""Ways for several GPUs that a plan may choose by itself, by the effort that is accepted."""
WHERE = ("devices", "nproc", "parallel", "lang")
"""Settings that a resumed run may be given anew."""
OFFLOADS = {"offload_optimizer": ("zero1", "zero2", "zero3"), "offload_params": ("zero3",)}
"""Settings of DeepSpeed's offload, and the ways that have them."""
QUANTISED_FORMATS = ("int8", "nf4", "fp4")


def setting(default: Any, group: str, help: str, **kwargs: Any) -> Any:
    """A recipe field with its group (a heading in help and documentation) and its one-line description."""
    return Field(default, description=help, json_schema_extra={"group": group}, **kwargs)


class Recipe(BaseModel):
    """What the person asked for. Frozen, unknown keys are errors, sizes are GiB, counts are whole numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, validate_default=False)

    model: str = setting(
        "smollm2", "Model", "Model id, folder, GGUF file, short name, or random:MODEL for seeded weights."
    )
    hub: Literal["huggingface", "modelscope"] = setting(
        "huggingface", "Model", "Where a model or dataset id is looked up."
    )
    trust_remote_code: bool = setting(False, "Model", "Run Python code shipped with the model. Off unless you ask.")
    rope_scaling: dict[str, Any] | None = setting(
        None, "Model", "Position scaling for longer sequences, e.g. type=yarn,factor=4."
    )

    data: str | None = setting(None, "Data", "Data file, dataset id, or demo (the bundled set).")
    eval_data: str | None = setting(
        None, "Data", "Validation file or dataset id; otherwise a share of the data is held out."
    )
    eval_share: float | None = setting(
        None, "Data", "Share of the records held out for validation (0 to 0.5).", ge=0, le=0.5
    )
    columns: dict[str, str] | None = setting(None, "Data", "Column names, e.g. prompt=question,response=answer.")
    loss_on: Literal["responses", "all"] = setting("responses", "Data", "Which tokens the loss counts.")
    seq_len: int = setting(2048, "Data", "Longest record in tokens; longer ones are truncated and counted.", ge=8)
    packing: bool | None = setting(None, "Data", "Fill rows with whole records (exact: no attention across records).")

    method: Method = setting("auto", "Method", "auto is LoRA on the 16-bit base, then on a quantised base.")
    base_format: BaseFormat = setting("auto", "Method", "Format of the frozen base weights.")
    double_quant: bool = setting(True, "Method", "Quantise the block scales of nf4 and fp4 too.")
    lora_r: int = setting(16, "Method", "LoRA rank.", ge=1, le=4096)
    lora_alpha: float = setting(32, "Method", "LoRA alpha: the update is scaled by alpha / r.", gt=0)
    lora_dropout: float = setting(0.0, "Method", "Dropout on the adapters' input.", ge=0, lt=1)
    lora_bias: Literal["none", "all", "lora_only"] = setting("none", "Method", "Which bias terms are trained.")
    lora_targets: list[str] | Literal["all-linear"] = setting(
        "all-linear", "Method", "Adapted layers: all-linear, or names such as q_proj,v_proj; experts: fused experts."
    )
    rslora: bool = setting(False, "Method", "Scale by alpha / sqrt(r) (rank-stabilised LoRA).")
    dora: bool = setting(False, "Method", "Weight-decomposed LoRA (DoRA).")

    batch: int = setting(8, "Training", "Records per optimizer step over all GPUs; never changed by the planner.", ge=1)
    micro_batch: int | None = setting(None, "Training", "Rows per forward pass; the rest is accumulated.", ge=1)
    epochs: float | None = setting(None, "Training", "Passes over the data (default 1 when steps is not given).", gt=0)
    steps: int | None = setting(None, "Training", "Optimizer steps; overrides epochs.", ge=1)
    lr: float | None = setting(None, "Training", "Peak learning rate (default 2e-4 for adapters, 2e-5 for full).", gt=0)
    schedule: Schedule = setting("cosine", "Training", "Learning-rate schedule after the warm-up.")
    warmup: float = setting(0.03, "Training", "Warm-up: a share of the steps below 1, or a number of steps.", ge=0)
    weight_decay: float = setting(0.0, "Training", "Decoupled weight decay.", ge=0)
    clip: float = setting(1.0, "Training", "Gradient norm limit; 0 turns clipping off.", ge=0)
    seed: int = setting(0, "Training", "Seed of data order, adapters' start and dropout.", ge=0, lt=2**31)
    precision: Precision = setting("auto", "Training", "Arithmetic of the forward and backward pass.")
    optimizer: OptimizerName = setting("auto", "Training", "Optimizer (auto: adamw).")
    recompute: int | Literal["auto", "none", "all"] = setting(
        "auto",
        "Training",
        "Layers whose activations are recomputed (activation checkpointing): auto, none, all or a number.",
    )
    loss_chunk: int | None = setting(
        None, "Training", "Tokens whose logits exist at once (chunked cross-entropy).", ge=1
    )

    gpu: str | None = setting(None, "Hardware", "Plan for a card you need not have: rtx3080, 'A100 80GB', h200.")
    wsl: bool = setting(
        False, "Hardware", "With --gpu: under Windows' WSL, which sees half of the RAM and pins little."
    )
    devices: str | None = setting(None, "Hardware", "Which devices to use: cpu, or GPUs' indices (0,1).")
    nproc: int | None = setting(None, "Hardware", "Processes, each with a GPU (default: the plan's; CPU: one).", ge=1)
    parallel: Parallel = setting("auto", "Hardware", "How several GPUs share the work: auto, none (one GPU) or a way.")
    effort: Effort = setting(
        "usual",
        "Hardware",
        "Complexity you accept: simple (all on the GPU, or DDP), usual (also streaming, offload, FSDP2), "
        "any (also DeepSpeed, tensor and pipeline parallel).",
    )
    offload_optimizer: OffloadOptimizer = setting(
        "none", "Hardware", "ZeRO: cpu keeps optimizer state in host memory; nvme (zero3) on a local disk."
    )
    offload_params: OffloadParams = setting(
        "none", "Hardware", "ZeRO 3: cpu keeps the parts of weights in host memory."
    )
    offload_folder: str | None = setting(None, "Hardware", "Folder on the disk that --offload-optimizer nvme uses.")
    vram: float | None = setting(None, "Hardware", "Cap on GPU memory in GiB.", gt=0)
    ram: float | None = setting(None, "Hardware", "Cap on host memory in GiB.", gt=0)

    save_every: int | None = setting(None, "Run", "Steps between checkpoints (default: ten per run).", ge=1)
    eval_every: int | None = setting(None, "Run", "Steps between evaluations (default: four per run).", ge=1)
    keep_checkpoints: int = setting(2, "Run", "How many of the newest checkpoints stay on disk.", ge=1)
    on_nan: Literal["stop", "skip"] = setting(
        "stop", "Run", "A step whose loss or gradient is not a number: stop and name its records, or leave it out."
    )
    log_to: list[Literal["tensorboard", "wandb"]] = setting([], "Run", "Also log to tensorboard, wandb.")
    lang: Literal["en", "zh"] | None = setting(None, "Run", "Language of the report (default: the system's).")
    out: str | None = setting(None, "Run", "Run folder (default ./runs/<date>-<model>).")

    @field_validator("vram", "ram", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return parse_size(value) / 1024**3 if isinstance(value, str) else value

    @field_validator("lora_targets", "log_to", mode="before")
    @classmethod
    def _comma_list(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "all-linear":
            return [part.strip() for part in value.split(",") if part.strip()]
        return value

    @field_validator("columns", "rope_scaling", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if not pairs or any(not sep or not key.strip() or not val.strip() for key, sep, val in pairs):
            raise ValueError(f"{value!r} is not of the form name=value,name=value")
        return {key.strip(): _number(val.strip()) for key, _, val in pairs}

    @field_validator("offload_params", mode="before")
    @classmethod
    def _not_on_disk(cls, value: Any) -> Any:
        if value == "nvme":
            raise ValueError(
                "weights stay off the disk in this version: DeepSpeed (0.19) by itself empties their folder for each "
                "one that is cut while it is read, and fails where more are under way than it has buffers"
            )
        return value

    @field_validator("recompute", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        if isinstance(value, str) and value.lstrip("-").isdigit():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value < 0:
            raise ValueError("the number of recomputed layers cannot be negative")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.method == "full" and self.base_format in QUANTISED_FORMATS:
            raise ValueError(
                f"full fine-tuning trains every weight, so base_format {self.base_format} cannot be used; "
                "use method qlora, or base_format auto"
            )
        if self.method == "qlora" and self.base_format in ("fp32", "bf16", "fp16"):
            raise ValueError(
                f"qlora means a quantised base, so base_format {self.base_format} contradicts it; "
                "use method lora, or base_format nf4"
            )
        if self.method == "full" and self.dora:
            raise ValueError("dora is a kind of adapter; it needs method lora or qlora")
        self._check_offload()
        if self.wsl and self.gpu is None:
            raise ValueError("wsl says what to assume beside gpu; on this machine it is found out; leave it out")
        if self.effort == "simple" and self.parallel not in ("auto", *LAYOUTS["simple"]):
            raise ValueError(
                f"parallel {self.parallel} is more than effort simple accepts, which is one GPU or ddp; "
                "leave one of the two out"
            )
        if self.parallel == "none" and (self.nproc or 1) > 1:
            raise ValueError(f"parallel none is one process, and nproc is {self.nproc}; leave one of the two out")
        if self.lora_targets != "all-linear" and not self.lora_targets:
            raise ValueError("lora_targets is empty; name at least one layer, or all-linear")
        if self.micro_batch is not None and self.micro_batch > self.batch:
            raise ValueError(f"micro_batch {self.micro_batch} is larger than batch {self.batch}; make it smaller")
        return self

    def _check_offload(self) -> None:
        for name, ways in OFFLOADS.items():
            if getattr(self, name) != "none" and self.parallel not in ways:
                raise ValueError(f"{name} is DeepSpeed's; use parallel {' or '.join(ways)} with it")
        if self.offload_optimizer != "nvme":
            if self.offload_folder is not None:
                raise ValueError("offload_folder is for offload_optimizer nvme; leave it out, or use both")
            return
        if self.parallel != "zero3":
            raise ValueError(f"parallel {self.parallel} has no offload_optimizer nvme; use cpu, or parallel zero3")
        if self.method != "full":
            raise ValueError(
                "offload_optimizer nvme is for method full: adapters have 12 bytes of masters and state for each of "
                "few weights; use method full, or offload_optimizer cpu"
            )
        if self.offload_folder is None:
            raise ValueError("offload_optimizer nvme needs a folder on that disk; name one with offload_folder")

    def with_(self, **changes: Any) -> Recipe:
        """A changed copy, validated again. What was left at its default is not taken for the person's wish; offload
        that another `parallel` does not have is left out."""
        kept = self.model_dump(exclude_unset=True)
        if "parallel" in changes:
            kept = {name: value for name, value in kept.items() if self._has_offload(name, changes["parallel"])}
        return build(kept | changes)

    def _has_offload(self, name: str, way: str) -> bool:
        """Whether a way of working together has this setting, where it is one of offload."""
        on_disk = self.offload_optimizer == "nvme" and name in ("offload_optimizer", "offload_folder")
        return way in (("zero3",) if on_disk else OFFLOADS.get(name, (way,)))

    def num_steps(self, num_records: int) -> int:
        """Optimizer steps of a whole run over so many records. An epoch's last step may have fewer of them; a step that
        `epochs` ends in is made whole."""
        per_epoch = -(-num_records // self.batch)
        return self.steps or max(1, math.ceil((self.epochs or 1) * per_epoch))

    def as_dict(self) -> dict[str, Any]:
        """Only what differs from the defaults, in the order of the fields."""
        return {k: v for k, v in self.model_dump().items() if k == "model" or v != type(self).model_fields[k].default}

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


def build(values: dict[str, Any], source: str = "the recipe") -> Recipe:
    """A recipe from plain values.

    Raises:
        UserError: an unknown key (with the nearest valid name) or an impossible value.
    """
    values = {str(key).replace("-", "_"): value for key, value in values.items()}
    for key in values:
        if key not in Recipe.model_fields:
            close = difflib.get_close_matches(key, Recipe.model_fields, n=1, cutoff=0.5)
            fix = f"did you mean {close[0]}?" if close else "see `fitune train --help` for the settings there are"
            raise UserError(f"unknown setting {key!r} in {source}", "it is not a setting of a recipe", fix)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        why = first["msg"].removeprefix("Value error, ")
        fix = _allowed(name) if name else ""
        if not name and "; " in why:  # settings that contradict each other: the sentence ends with what to do
            why, _, fix = why.rpartition("; ")
        shown = (
            f"{name} = {values.get(name)!r} in {source}" if name else f"settings that contradict each other in {source}"
        )
        raise UserError(f"cannot use {shown}", why, fix) from None


def _allowed(name: str) -> str:
    field = Recipe.model_fields.get(name)
    if field is None:
        return ""
    choices = [str(c) for c in getattr(field.annotation, "__args__", ()) if isinstance(c, str)]
    return f"one of: {', '.join(choices)}" if choices else f"give another value: {field.description}"


def load(path: Path) -> dict[str, Any]:
    """The plain values of a recipe file, so that command-line options can override them before validation.

    Raises:
        UserError: missing, unreadable, not UTF-8, not YAML, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"no recipe at {path}", "the file does not exist", "check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"cannot read recipe {path}", f"it is not UTF-8 text (byte {error.start})", "save it as UTF-8"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot read recipe {path}", str(error.strerror or error), "check the path and its permissions"
        ) from None
    try:
        values = yaml.safe_load(text)
    except RecursionError:
        raise UserError(f"cannot read recipe {path}", "it is nested too deeply", "a recipe is a flat list") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(
            f"cannot read recipe {path}",
            f"{where}{getattr(error, 'problem', None) or error}",
            "a recipe is YAML, one `setting: value` a line",
        ) from None
    if not isinstance(values, dict):
        raise UserError(
            f"cannot read recipe {path}",
            "it is not a list of `setting: value` lines",
            "start with `model: smollm2` and `data: demo`",
        )
    return values
