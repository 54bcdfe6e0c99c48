"""DeepSpeed's configuration, derived from a plan. No torch and no DeepSpeed here: the run folder writes it too.

Sources: DeepSpeed documentation, "DeepSpeed Configuration JSON"; `deepspeed/runtime/zero/config.py` of 0.19.8.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fitune.plan import Plan

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
# Elements of gradients that are exchanged at once: 32 MiB in fp32, as in `fitune.parallel.replicated`.
REDUCE_BUCKET = 8 * 2**20
# Elements of parameters that are gathered at once after an update (stages 1 and 2).
GATHER_BUCKET = 64 * 2**20
# Elements of parameters that stage 3 gathers ahead of their use.
PREFETCH = 32 * 2**20
# Elements of masters on a disk that are in memory at once, or those of one parameter where it has more: 128 MiB.
SUB_GROUP = 32 * 2**20
# Of their size: a master's, a gradient's and two for AdamW's moments.
DISK_BUFFERS = 4
# What is smaller than this DeepSpeed leaves in host memory (`deepspeed/runtime/swap_tensor/utils.py`).
LEAST_ON_DISK_BYTES = 2**20


def stage_of(plan: Plan) -> int | None:
    """ZeRO's stage, None for a plan without DeepSpeed."""
    return STAGES.get(plan.parallel)


def low_precision(plan: Plan) -> str | None:
    """The 16-bit format of the parameters that DeepSpeed holds, None for fp32: adapters are fp32 unless they are
    sharded together with the base (stage 3)."""
    if plan.precision == "fp32" or (plan.method == "lora" and stage_of(plan) != 3):
        return None
    return plan.precision


def config_of(plan: Plan) -> dict[str, Any]:
    """What `deepspeed.initialize` is given.

    DeepSpeed shards, exchanges, clips and updates. The rest is fitune's: the loss of a micro-batch is weighted by the
    whole step's target tokens (no averaging over steps of accumulation), the learning rate is set before each update,
    and so is the loss scale of fp16.
    """
    stage = stage_of(plan)
    assert stage is not None, f"no DeepSpeed in {plan.parallel}"
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": REDUCE_BUCKET,
        "allgather_bucket_size": GATHER_BUCKET,
        "contiguous_gradients": True,
        "overlap_comm": False,
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": PREFETCH,
            "stage3_max_reuse_distance": 0,  # a layer's parameters go when it has run
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,  # it would replace torch.nn.functional.linear in the whole process
        }
    pin = plan.device == "cuda"
    for name, device in (("offload_optimizer", plan.offload_optimizer), ("offload_param", plan.offload_params)):
        if device != "none":
            zero[name] = {"device": device, "pin_memory": pin}
    if plan.offload_optimizer == "nvme":
        zero["sub_group_size"] = SUB_GROUP
        zero["offload_optimizer"] |= {"nvme_path": plan.offload_folder, "buffer_count": DISK_BUFFERS}
    half = low_precision(plan)
    return {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed's counts only; see `fitune.parallel.zero`
        "gradient_accumulation_steps": 1,
        "gradient_clipping": plan.clip,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": half == "bf16", "check_grad_overflow": True},
        "fp16": {"enabled": half == "fp16", "loss_scale": 1},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
    }


def sub_groups(sizes: Sequence[int]) -> list[int]:
    """Elements of the groups in which stage 3 updates what is on a disk.

    Args:
        sizes: of a rank's parts of the parameters, in their order.
    """
    if sum(sizes) <= SUB_GROUP:
        return [sum(sizes)]
    groups = [0]
    for size in sizes:
        if groups[-1] >= SUB_GROUP:
            groups.append(0)
        groups[-1] += size
    return groups


def config_json(plan: Plan) -> str | None:
    """`deepspeed.json` of a run; None where the plan has no DeepSpeed."""
    return json.dumps(config_of(plan), indent=2) + "\n" if stage_of(plan) is not None else None
