"""What one rank holds under DeepSpeed's ZeRO, in closed forms. Plain Python; the shares are bytes.

With P trained elements, N ranks, c bytes per element that the layers compute with (2, or 4 in fp32), F bytes of frozen
weights and s of optimizer state (sources: https://arxiv.org/abs/1910.02054, section 5; `runtime/zero/stage_1_and_2.py`,
`runtime/zero/stage3.py` and `runtime/bf16_optimizer.py` of DeepSpeed 0.19.8; `fitune.parallel.zero_config`):

| what | zero1 | zero2 | zero3 |
| --- | --- | --- | --- |
| weights | c P + F | c P + F | (c P + F) / N |
| fp32 masters | 4 P / N | 4 P / N | 4 P / N |
| optimizer state | s / N | s / N | s / N |
| gradients, fp32 | 4 P, and 2 P in 16 bit | 4 P / N | 4 P / N |
| of them in the update (zero1: in bf16 all) | 4 P / N | 4 P / N | 4 P / N |
| their flat copy in the update | 4 P / N | 4 P / N | 4 P / N |
| bucket of gradients | 32 MiB (zero2 in 16 bit: half) | | 32 MiB |
| gathered weights | - | - | one unit and c times 32 Mi elements ahead of it |

With the optimizer in host memory, masters, state and gradients (zero1: their flat copy) are there. With it on a disk
masters, state and, for an update, gradients are in files of the rank; in host memory are the gradients and four buffers
of the largest group of parameters that is updated at once: 32 Mi elements, and at most one unit's part more.

DeepSpeed keeps a master beside each fp32 weight too, and stage 3 its gradients' tensor and bucket between steps. Left
out: parts are rounded up (to 2 N elements in all, for stage 3 to N elements per tensor), the rest of a gradient that
ends in another rank's part (kept whole), a gradient larger than the bucket (it is exchanged by itself), and NCCL. A
test holds these forms to the tensors of 2 and 4 real ranks: weights, masters, state, all that lasts and all that is
there before the update within 1 %, gradients within 2 %; not the flat copy, the gathered weights or what is offloaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from fitune.parallel.zero_config import (
    DISK_BUFFERS,
    PREFETCH,
    REDUCE_BUCKET,
    SUB_GROUP,
    low_precision,
    stage_of,
)
from fitune.plan import Plan

_FP32 = 4  # bytes


@dataclass(frozen=True)
class ZeroBytes:
    """Bytes of one rank, on its device.

    Attributes:
        weights: or its parts of them, between steps.
        masters: fp32, of its part of what is trained.
        state: the optimizer's, from the first update on.
        gradients: at the end of the last backward pass.
        copied: gradients in one flat tensor, while they are applied.
        bucket: while gradients are exchanged.
        gathered: weights put together for their use, at most.
        lasting: of gradients and bucket what is there between steps too.
        applied: of gradients and bucket what is there in the update.
        host: of all of these what is in host memory and not on the device; not in the others.
        buffers: in host memory, which groups of masters on a disk pass through.
        disk: in files.
    """

    weights: int
    masters: int
    state: int
    gradients: int
    copied: int
    bucket: int
    gathered: int
    lasting: int
    applied: int
    host: int
    buffers: int = 0
    disk: int = 0

    @property
    def held(self) -> int:
        """Between steps, after the first."""
        return self.weights + self.masters + self.state + self.lasting

    @property
    def backward(self) -> int:
        """At the end of a step's backward passes, without activations."""
        return self.weights + self.masters + self.state + self.gradients + self.bucket + self.gathered

    @property
    def update(self) -> int:
        """In the update."""
        return self.held - self.lasting + self.applied + self.copied


def zero_bytes(plan: Plan, *, trained: int, frozen_bytes: int, state_bytes: int, unit: int) -> ZeroBytes:
    """The shares of one of `plan.world_size` ranks (`plan.parallel`: zero1, zero2 or zero3).

    Args:
        trained: elements.
        frozen_bytes: of weights on the device that are not trained.
        state_bytes: of the optimizer on one GPU.
        unit: elements that are gathered together, of the largest layer (or of the model's ends).
    """
    stage, half, ranks = stage_of(plan), low_precision(plan) is not None, plan.world_size
    assert stage is not None, f"no ZeRO in {plan.parallel}"
    width = 2 if half else _FP32
    part = -(-trained // ranks)
    weights = width * trained + frozen_bytes
    gradients = _FP32 * trained + (2 * trained if half else 0) if stage == 1 else _FP32 * part
    bucket = REDUCE_BUCKET * (2 if half and stage == 2 else _FP32)
    cuts_at_the_end = stage == 1 and plan.offload_optimizer == "none" and not _has_buffers(plan)
    found = ZeroBytes(
        weights=-(-weights // ranks) if stage == 3 else weights,
        masters=_FP32 * part,
        state=-(-state_bytes // ranks),
        gradients=gradients,
        copied=_FP32 * part,
        bucket=bucket,
        gathered=width * (unit + min(unit, PREFETCH)) if stage == 3 else 0,
        lasting=gradients + bucket if stage == 3 else _FP32 * trained if stage == 1 and _has_buffers(plan) else 0,
        applied=gradients + bucket if stage == 3 else _FP32 * part if cuts_at_the_end else gradients,
        host=0,
    )
    return _offloaded(found, plan, -(-unit // ranks))


def _has_buffers(plan: Plan) -> bool:
    """Stage 1 in bf16 is another optimizer of DeepSpeed's, which keeps the gradients' fp32 buffers."""
    return low_precision(plan) == "bf16" and plan.offload_optimizer == "none"


def _offloaded(found: ZeroBytes, plan: Plan, unit: int) -> ZeroBytes:
    """With the optimizer its masters, state and gradients' sums leave the device; with parameters their parts do.

    Args:
        unit: elements of the rank's part of the largest parameter, at least.
    """
    moved: dict[str, int] = {}
    if plan.offload_optimizer != "none":
        moved |= dict(masters=found.masters, state=found.state, copied=found.copied)
        if plan.parallel != "zero1":
            moved["gradients"] = found.gradients
    if plan.offload_params != "none":
        moved["weights"] = found.weights
    values = {name: 0 if name in moved else value for name, value in vars(found).items()}
    if "gradients" in moved:
        values["applied"] = values["lasting"] = found.bucket if plan.parallel == "zero3" else 0
    copied = moved.pop("copied", 0)  # the gradients themselves, on the host
    if plan.offload_optimizer == "nvme":
        files = moved.pop("masters") + moved.pop("state")
        group = min(found.masters // _FP32, SUB_GROUP + unit)
        values |= dict(disk=files + moved["gradients"], buffers=DISK_BUFFERS * _FP32 * group)
    return ZeroBytes(**(values | dict(host=sum(moved.values()) + (copied if plan.parallel == "zero1" else 0))))
