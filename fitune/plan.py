"""What was decided: one frozen object that training obeys, that can be read, compared, stored and replayed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from fitune.errors import UserError

PLAN_VERSION = 1


@dataclass(frozen=True)
class Reason:
    """Why a decision was taken. `exact`: same mathematics as the plain way; otherwise an approximation, named so."""

    decision: str
    value: str
    why: str
    exact: bool = True


@dataclass(frozen=True)
class Adapter:
    """LoRA as peft defines it (https://arxiv.org/abs/2106.09685); `targets` are module names' last parts."""

    r: int
    alpha: float
    dropout: float
    bias: str
    targets: tuple[str, ...]
    rslora: bool = False
    dora: bool = False

    @property
    def scaling(self) -> float:
        return self.alpha / (self.r**0.5 if self.rslora else self.r)


@dataclass(frozen=True)
class Plan:
    """Everything decided before training. Bytes are integers; `None` means "not decided by this version"."""

    model: str
    num_layers: int
    method: str  # full | lora
    base_format: str  # fp32 | bf16 | fp16 | int8 | nf4 | fp4
    double_quant: bool
    adapter: Adapter | None
    device: str  # cpu | cuda
    device_name: str
    precision: str  # compute dtype: bf16 | fp16 | fp32
    loss_scaling: bool  # fp16 only
    embedding_place: str  # device | host
    attention: str  # flash | sdpa | blockwise | native
    seq_len: int
    batch: int
    micro_batch: int
    accumulation_order: str  # micro-batch-major | layer-major
    packing: bool
    recompute_layers: int  # the first n layers recompute; the last num_layers - n keep their activations
    loss_chunk: int
    optimizer: str
    lr: float
    schedule: str
    warmup: float
    weight_decay: float
    clip: float
    seed: int
    budget_bytes: int | None  # device memory the plan may use, as the driver counts it
    predicted: dict[str, Any] = field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()
    version: int = PLAN_VERSION

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n"

    def with_(self, **changes: Any) -> Plan:
        return dataclasses.replace(self, **changes)


def from_dict(values: dict[str, Any]) -> Plan:
    """The plan that `as_dict` wrote.

    Raises:
        UserError: another version, or a missing or unknown field.
    """
    version = values.get("version")
    if version != PLAN_VERSION:
        raise UserError(
            "cannot use this plan",
            f"it has version {version}, this fitune reads version {PLAN_VERSION}",
            "make the plan again with `fitune plan`",
        )
    values = dict(values)
    try:
        if values["adapter"] is not None:
            adapter = dict(values["adapter"])
            values["adapter"] = Adapter(**(adapter | {"targets": tuple(adapter["targets"])}))
        values["reasons"] = tuple(Reason(**reason) for reason in values["reasons"])
        return Plan(**values)
    except (TypeError, KeyError) as error:
        raise UserError(
            "cannot use this plan", f"a field is missing or unknown: {error}", "make the plan again with `fitune plan`"
        ) from None


def from_json(text: str) -> Plan:
    """Inverse of `Plan.to_json`. Raises UserError when the text is not a plan."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            "cannot read the plan", f"it is not JSON ({error})", "make the plan again with `fitune plan`"
        ) from None
    if not isinstance(values, dict):
        raise UserError("cannot read the plan", "it is not a JSON object", "make the plan again with `fitune plan`")
    return from_dict(values)
