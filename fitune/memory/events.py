"""One step as a list of events: every block of memory that is born, and when it dies. Plain Python.

The list is what the step on `meta`, on the CPU and on a GPU have in common: it can be compared, drawn as a timeline,
and replayed on a model of an allocator.
"""

from __future__ import annotations

from dataclasses import dataclass

OWNERS = (
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "inputs",
    "saved",
    "logits",
    "workspace",
    "stream",
    "temporary",
)
"""Whose a block is. `inputs` are the micro-batch and what layers are called with: hidden states on their way, rotary
tables, the layer inputs that are saved for recomputation; `saved` are activations that live until a backward pass needs
them; `logits` include their gradient; `workspace` is the buffer for unpacked weights and fp32 logits; `stream` are ring
buffers of streamed weights; `temporary` is all else: what dies in the part of the step that made it, or right after."""


@dataclass(slots=True)
class Event:
    """A block is born (`num_bytes` > 0) or dies (the same number, negative). Never changed once it is made (not frozen:
    that makes it seven times slower to make, and a plan makes a million).

    Attributes:
        block: number of the block, unique among all of a list.
        num_bytes: as the program asked for it, before any allocator rounds it.
        owner: one of `OWNERS`.
        label: what a person would call it, such as "logits 2x4096x151936 fp32".
        part: the part of the step ("load", "embed", "stash", "forward", "tail", "backward", "optimizer", ...).
        layer: the decoder layer the part belongs to; -1 outside the layers.
    """

    block: int
    num_bytes: int
    owner: str
    label: str
    part: str
    layer: int


GRANULE = 512
"""torch's CUDA caching allocator rounds every block up to this (c10/cuda/CUDACachingAllocator.cpp)."""


def rounded(num_bytes: int, granule: int = GRANULE) -> int:
    """Bytes to whole granules, away from zero: a death (negative) is as large as its birth."""
    return -(-num_bytes // granule) * granule if num_bytes >= 0 else num_bytes // granule * granule
