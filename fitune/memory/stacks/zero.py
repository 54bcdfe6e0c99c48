"""DeepSpeed ZeRO under the Trainer: its own mixed precision, partitions and buckets.

Sources: arXiv 1910.02054; DeepSpeed documentation, "DeepSpeed Configuration JSON", zero_optimization: the defaults
``reduce_bucket_size`` and ``allgather_bucket_size`` 5e8 elements and ``stage3_max_live_parameters`` 1e9; the Trainer's
``auto`` (transformers ``integrations/deepspeed.py``): stage 3's reduce bucket hidden², prefetch bucket 0.9 hidden².
The engine casts the whole model to bf16 (no autocast) and keeps an fp32 copy of what is trained beside the two moments.

Left out: fp16's loss scaling, communication overlap (doubles the buckets), parameters below the persistence threshold
(kept whole: norms and biases, well under 1 %).
"""

from __future__ import annotations

from fitune.memory.stacks.prediction import Term
from fitune.memory.stacks.settings import StackSettings
from fitune.memory.stacks.sharding import share

BUCKET_ELEMENTS = 5e8
MAX_LIVE_ELEMENTS = 1e9
# fp32 master copy and two fp32 moments of each trained element.
MASTER_AND_MOMENTS_BYTES = 12.0


def is_zero(s: StackSettings) -> bool:
    """Whether DeepSpeed runs the step."""
    return s.parallel in ("zero1", "zero2", "zero3")


def optimizer_terms(s: StackSettings, trained: int) -> tuple[list[Term], float]:
    """Partition of fp32 master weights and moments, and the bytes of the fp32 gradients made for the update."""
    if "optimizer" in s.offload:
        return [Term("optimizer", "fp32 master weights and moments", 0)], 0.0
    part = share(s).optimizer
    states = MASTER_AND_MOMENTS_BYTES * trained * part
    return [Term("optimizer", "fp32 master weights and moments", states)], 4.0 * trained * part


def buckets(s: StackSettings, trained: int) -> Term:
    """16-bit buffers of communication: the reduce and the all-gather bucket (the second is used after the update, but
    both stay cached), or stage 3's reduce and prefetch buckets of about hidden² each."""
    if s.parallel == "zero3":
        return Term("workspace", "reduce and prefetch buckets", 2.0 * 1.9 * s.shape.hidden**2)
    name = "reduce bucket of 5e8 elements, or all that is trained"
    return Term("workspace", name, 2.0 * min(BUCKET_ELEMENTS, trained))


def live_bytes(s: StackSettings, element: float) -> float:
    """Gathered weights alive at a time in stage 3: up to ``stage3_max_live_parameters``, kept because they are needed
    again soon."""
    return element * min(MAX_LIVE_ELEMENTS, float(s.shape.linear_params))
