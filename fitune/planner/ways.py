"""Ways for several GPUs to share one step (`Plan.parallel`): what they are called, and what each rank has of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fitune.memory.layouts import DATA_PARALLEL
from fitune.parallel.world import SAME_RECORDS

ZERO = ("zero1", "zero2", "zero3")
ALL_RECORDS = ("none", *SAME_RECORDS)  # every rank works on all records of a step
PACKED = "DeepSpeed cannot shard packed weights"
INSTALL = 'pip install "fitune[deepspeed]"'
MISSING = f"DeepSpeed is not installed here: {INSTALL}"
REPLAYED = ("none", "ddp", "streamed")  # a rank's step is that of one GPU, which is known event for event

MEANING = {
    "none": "one GPU alone",
    "ddp": "every GPU holds the weights and works on its share of the records",
    "streamed": "all GPUs of a machine stream the same copy of the weights from its RAM",
    "fsdp2": "every GPU holds its part of each layer's weights; a layer is put together when it runs",
    "zero1": "every GPU holds the weights and its part of the optimizer's state (DeepSpeed)",
    "zero2": "every GPU holds the weights, and its part of the gradients and of the optimizer's state (DeepSpeed)",
    "zero3": "every GPU holds its part of weights, gradients and optimizer's state (DeepSpeed)",
    "tp": "every GPU holds a part of each layer's heads and widths, and works on all records",
    "pp": "every GPU holds a range of the layers; micro-batches pass from one to the next",
    "cp": "every GPU works on a slice of each row's tokens; only attention sees all of them",
}


@dataclass(frozen=True)
class Layout:
    """A way of `MEANING` on `size` GPUs. ddp and streamed are one way here: a draft of ddp streams where that is
    better, unless the person named one of them.

    Attributes:
        names: of the cards, one for each rank.
        per_node: ranks on one machine, which share its RAM.
        batch: records of a whole step; a rank's drafts have its own share.
    """

    way: str = "none"
    size: int = 1
    names: tuple[str, ...] = ()
    per_node: int = 1
    batch: int | None = None

    @property
    def shares_records(self) -> bool:
        return self.way in DATA_PARALLEL

    def share(self, batch: int) -> int:
        """The most records of a step that a rank has."""
        return -(-batch // self.size) if self.shares_records else batch


ALONE = Layout()


def named(way: str, size: int, device: str = "cuda") -> str:
    """`ddp on 2 GPUs`; on the CPU processes share it."""
    return way if way == "none" else f"{way} on {size} {'processes' if device == 'cpu' else 'GPUs'}"


def alike(names: Sequence[str]) -> bool:
    return len(set(names)) <= 1
