"""Data parallel: every rank holds all trained weights, works on its share of a step's records, and gradients are added.

The mathematics is one process' own: the loss is weighted by the whole step's target tokens, and fp32 gradients are
summed in buckets before clipping. Each rank then makes the same update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

from fitune.engine.optimizers import Masters
from fitune.engine.ranks import Several
from fitune.model.build import Built
from fitune.parallel.exchange import all_reduce, broadcast
from fitune.parallel.world import Single

# A bucket is one exchange. Large enough that latency does not count (25 MiB is DistributedDataParallel's), and the only
# memory that the exchange takes.
BUCKET_BYTES = 32 * 2**20


class Sized(Protocol):
    def __len__(self) -> int: ...


S = TypeVar("S", bound=Sized)


def share_of(records: Sequence[S], rank: int, size: int, shares: Sequence[int] | None = None) -> list[S]:
    """A rank's records of a step, in the step's order: the longest first to whom has the least to do.

    Args:
        records: of the whole step; every rank gets the same answer for each rank. A rank may get none.
        shares: what each rank has of a whole step's records, which is also how fast it is: of so many records it gets
            just as many, of fewer (the last step, an evaluation) no more than in proportion, rounded up. None: all
            ranks are alike, and only tokens count.
    """
    speeds: Sequence[int] = shares or [1] * size
    most = [len(records)] * size if not shares else [-(-len(records) * own // sum(shares)) for own in shares]
    load, count = [0.0] * size, [0] * size
    owner: dict[int, int] = {}
    for i in sorted(range(len(records)), key=lambda i: (-len(records[i]), i)):
        free = [r for r in range(size) if count[r] < most[r]]
        owner[i] = min(free, key=lambda r: ((load[r] + len(records[i])) / speeds[r], r))
        load[owner[i]] += len(records[i])
        count[owner[i]] += 1
    return [record for i, record in enumerate(records) if owner[i] == rank]


class Replicated(Several):
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

    def prepare(self, loss: torch.Tensor, masters: Masters) -> tuple[torch.Tensor, torch.Tensor]:
        """(the loss and for which parameters there is a gradient, room for a bucket). A rank without a gradient that
        others may have takes part with zeros."""
        parameters = masters.parameters()
        device = parameters[0].device
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32, device=device)
        told = torch.cat([loss.detach().float().reshape(1).to(device), has])
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return told, room_for(parameters)

    def add_up(
        self, loss: torch.Tensor, masters: Masters, made: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:  # fmt: skip
        told, room = made
        parameters = masters.parameters()
        all_reduce(told)
        for p, count in zip(parameters, told[1:].tolist(), strict=True):
            if count == 0:
                p.grad = None
        sum_gradients([p for p in parameters if p.grad is not None], room)
        return told[0].to(loss.device, loss.dtype)


def room_for(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Room for the largest bucket of these or of some of them."""
    fit = sum(p.numel() for p in parameters if p.numel() * 4 <= BUCKET_BYTES)
    return torch.empty(min(fit, BUCKET_BYTES // 4), dtype=torch.float32, device=parameters[0].device)


def sum_gradients(parameters: Sequence[nn.Parameter], room: torch.Tensor) -> None:
    """Gradients of these become their sums over ranks, a bucket at a time; all ranks name the same ones.

    Args:
        room: of `room_for`. Nothing else is allocated: a rank without memory would leave the others waiting.
    """
    for bucket in _buckets(parameters):
        _sum_gradients(bucket, room)


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


def _sum_gradients(bucket: list[nn.Parameter], room: torch.Tensor) -> None:
    grads = [p.grad for p in bucket if p.grad is not None]
    assert len(grads) == len(bucket)
    if len(grads) == 1:  # a large one, in place
        all_reduce(grads[0])
        return
    sizes = [grad.numel() for grad in grads]
    flat = room[: sum(sizes)]
    parts = [part.view_as(grad) for part, grad in zip(flat.split(sizes), grads, strict=True)]
    torch._foreach_copy_(parts, grads)  # one launch for all of them: hundreds of adapters' took 7 % of a step
    all_reduce(flat)
    torch._foreach_copy_(grads, parts)
