"""Data parallel: every rank holds all trained weights, works on its share of a step's records, and gradients are added.

The mathematics is one process' own: the loss is weighted by the whole step's target tokens, and fp32 gradients are
summed in buckets before clipping. Each rank then makes the same update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from fitune.engine.optimizers import Masters
from fitune.engine.ranks import Alone
from fitune.model.build import Built
from fitune.parallel.exchange import all_reduce, broadcast
from fitune.parallel.world import Single

# A bucket is one exchange. Large enough that latency does not count (25 MiB is DistributedDataParallel's), and the only
# memory that the exchange takes.
BUCKET_BYTES = 32 * 2**20


class Sized(Protocol):
    def __len__(self) -> int: ...


S = TypeVar("S", bound=Sized)


def share_of(records: Sequence[S], rank: int, size: int, speeds: Sequence[float] | None = None) -> list[S]:
    """A rank's records of a step, in the step's order: the longest first to whom has the least to do.

    Args:
        records: of the whole step; every rank gets the same answer for each rank. A rank may get none.
        speeds: relative speed of each rank's card; None: all alike.
    """
    speeds = speeds or [1.0] * size
    load = [0.0] * size
    owner: dict[int, int] = {}
    for i in sorted(range(len(records)), key=lambda i: (-len(records[i]), i)):
        owner[i] = min(range(size), key=lambda r: ((load[r] + len(records[i])) / speeds[r], r))
        load[owner[i]] += len(records[i])
    return [record for i, record in enumerate(records) if owner[i] == rank]


class Replicated(Alone):
    """The engine's view of the other ranks in data parallel."""

    def __init__(self, group: Single):
        self.group = group

    def masters(self, built: Built, trainable: dict[str, nn.Parameter]) -> Masters:
        """Every rank starts from the first one's values (they come from the same seed and files: it costs little)."""
        made = Masters(trainable)
        with torch.no_grad():
            for _, master in made.pairs.values():
                broadcast(master.data)
        made.publish()
        return made

    def totals(self, num_tokens: int, num_targets: int, num_passes: int) -> tuple[int, int, int]:
        tokens, targets = self.group.sums([num_tokens, num_targets])
        return int(tokens), int(targets), num_passes

    def add_up(self, loss: torch.Tensor, masters: Masters) -> torch.Tensor:
        parameters = masters.parameters()
        device = parameters[0].device
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32, device=device)
        both = torch.cat([loss.detach().float().reshape(1).to(device), has])
        all_reduce(both)
        used = both[1:].tolist()
        sum_gradients([p for p, count in zip(parameters, used, strict=True) if count > 0])
        return both[0].to(loss.device, loss.dtype)


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Gradients of these become their sums over ranks, a bucket at a time; all ranks name the same ones."""
    for bucket in _buckets(parameters):
        _sum_gradients(bucket)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.numel() * 4 > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * 4
    if bucket:
        yield bucket


def _sum_gradients(bucket: list[nn.Parameter]) -> None:
    """Gradients of these become their sums over ranks; a rank without one takes part with zeros."""
    if len(bucket) == 1:  # a large one, in place
        (parameter,) = bucket
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        all_reduce(parameter.grad)
        return
    flat = torch.zeros(sum(p.numel() for p in bucket), dtype=torch.float32, device=bucket[0].device)
    parts: list[tuple[Any, torch.Tensor]] = []
    start = 0
    for parameter in bucket:
        part = flat[start : start + parameter.numel()].view_as(parameter)
        if parameter.grad is not None:
            part.copy_(parameter.grad)
        parts.append((parameter, part))
        start += parameter.numel()
    all_reduce(flat)
    for parameter, part in parts:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(part)
