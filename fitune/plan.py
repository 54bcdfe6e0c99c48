"""What was decided: one frozen object that training obeys, that can be read, compared, stored and replayed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
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
class Share:
    """What one of several GPUs that are not alike has of a step, and what it does otherwise than the plan says.

    Attributes:
        card, budget_bytes: as `Plan.device_name` and `Plan.budget_bytes`.
        records: of a whole step's batch; all of them where every GPU works on all records.
        needed_bytes, step_s: predicted for this GPU; None where a plan that was changed in mid-run has no prediction.
    """

    card: str
    budget_bytes: int | None
    records: int
    micro_batch: int
    recompute_layers: int
    needed_bytes: int | None = None
    step_s: float | None = None


OWN = ("micro_batch", "recompute_layers")  # what each GPU of a plan with shares has for itself


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
    attention: str  # flash | efficient | cpu | blockwise | native
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
    stream_from: str = "none"  # where frozen layers wait for their turn: none | pinned | pageable | disk | shards
    resident_layers: int | None = None  # with stream_from: layers whose weights stay on the device; None: all of them
    ring_buffers: int = 2  # device buffers, each of the largest streamed layer's size
    head_place: str = "device"  # device | host: a frozen head crosses the link in vocabulary tiles
    offload_inputs: bool = False  # saved inputs of recomputed layers wait in host memory
    optimizer_place: str = "device"  # device | host | streamed: masters and state; streamed: updated on the GPU
    mlp_tiles: int = 1  # pieces of tokens in which a recomputed layer's gated MLP runs
    offload_optimizer: str = "none"  # ZeRO: where DeepSpeed keeps optimizer state: none (the device) | cpu | nvme
    offload_params: str = "none"  # ZeRO 3: where DeepSpeed keeps the parts of parameters: none | cpu
    offload_folder: str | None = None  # on the disk that nvme means
    parallel: str = "none"  # several GPUs: none | ddp | streamed | fsdp2 | zero1 | zero2 | zero3 | tp | pp | cp
    world_size: int = 1  # processes, each with a GPU of its own
    shares: tuple[Share, ...] = ()  # GPUs that are not alike: what each has of a step, by rank; empty: all the same
    stages: tuple[int, ...] = ()  # pp: layers of each stage; empty: evenly cut
    predicted: dict[str, Any] = field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()
    version: int = PLAN_VERSION

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def masters_in_host(self) -> bool:
        """Whether all weights are trained and their masters are in host memory."""
        return self.method == "full" and self.optimizer_place != "device"

    @property
    def update_waits(self) -> bool:
        """Whether an update needs the norm of all gradients first."""
        return self.clip > 0 or self.loss_scaling

    def streamed_layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers whose frozen weights are streamed, evenly spread from layer 0 on.

        Spread, because a copy can hide behind the layers that compute between two streamed ones; the last layer is the
        last to be streamed, since it is needed twice in a row where forward turns into backward.
        """
        if self.stream_from == "none" or self.resident_layers is None:
            return ()
        count = max(0, self.num_layers - self.resident_layers)
        return tuple(j * self.num_layers // count for j in range(count))

    def of_rank(self, rank: int) -> Plan:
        """The plan as one rank obeys it: with what its share says in place of what holds for all. `batch` are its own
        records of a step."""
        if not self.shares:
            return self
        mine = self.shares[rank]
        return self.with_(device_name=mine.card, budget_bytes=mine.budget_bytes, batch=mine.records,
                          micro_batch=mine.micro_batch, recompute_layers=mine.recompute_layers, shares=())  # fmt: skip

    def of_least(self) -> Plan:
        """The plan as the rank with the least memory obeys it; the plan itself where all are alike."""
        budgets = [share.budget_bytes or 0 for share in self.shares]
        return self.of_rank(budgets.index(min(budgets))) if budgets else self

    def changed(self, changes: dict[str, Any], rank: int | None = None) -> Plan:
        """The plan with other settings on all ranks; those of `OWN` on one of them only where `rank` is given. Its own
        are those of the rank with the least memory. What was predicted for the shares that change is dropped."""
        own = {name: value for name, value in changes.items() if name in OWN} | dict(needed_bytes=None, step_s=None)
        shares = tuple(dataclasses.replace(share, **own) if rank in (None, i) else share
                       for i, share in enumerate(self.shares))  # fmt: skip
        made = self.with_(**(changes if rank is None else {}), shares=shares)
        least = made.of_least()
        return made.with_(**{name: getattr(least, name) for name in OWN})

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
        values["shares"] = tuple(Share(**share) for share in values.get("shares", ()))
        values["stages"] = tuple(values.get("stages", ()))
        plan = Plan(**values)
        why = wrong_shares(plan)
    except (TypeError, KeyError) as error:
        why = f"a field is missing or unknown: {error}"
    if why is not None:
        raise UserError("cannot use this plan", why, "make the plan again with `fitune plan`")
    return plan


def wrong_shares(plan: Plan) -> str | None:
    """Why the shares of a plan's GPUs cannot be, in a sentence; None where they can."""
    for name, parts in (("shares", plan.shares), ("stages", plan.stages)):
        if parts and len(parts) != plan.world_size:
            return f"it has {len(parts)} {name} for {plan.world_size} GPUs"
    records = [share.records for share in plan.shares]
    if records and sum(records) != plan.batch and set(records) != {plan.batch}:
        return f"its shares have {sum(records)} records, its batch {plan.batch}"
    if any(not 1 <= share.micro_batch <= share.records for share in plan.shares):
        return "a share's micro-batch is not within its records"
    if any(not 0 <= share.recompute_layers <= plan.num_layers for share in plan.shares):
        return f"a share recomputes more layers than the model's {plan.num_layers}"
    if plan.stages and (sum(plan.stages) != plan.num_layers or min(plan.stages) < 1):
        return f"its stages have {sum(plan.stages)} layers, the model {plan.num_layers}"
    return None


def from_json(text: str) -> Plan:
    """Inverse of `Plan.to_json`. Raises UserError when the text is not a plan."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            "cannot read the plan", f"it is not JSON ({error})", "make the plan again with `fitune plan`"
        ) from None
    if not isinstance(values, dict):
        raise UserError("cannot read the plan", "it is not a JSON object", "make the plan again with `fitune plan`")
    return from_dict(values)


def layers_of(num_layers: int, rank: int, size: int, stages: Sequence[int] = ()) -> range:
    """The layers of a pipeline's stage: as many as `stages` says; without it the first ones have one more where they
    cannot be shared out evenly."""
    if stages:
        first = sum(stages[:rank])
        return range(first, first + stages[rank])
    each, more = divmod(num_layers, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))
