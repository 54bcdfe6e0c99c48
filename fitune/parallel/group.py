"""The processes of a run as a group: small things are exchanged on the CPU (gloo), tensors where they are (NCCL)."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fitune.errors import UserError
from fitune.parallel.start import as_seen_by, as_told, open_store
from fitune.parallel.world import Single, World

T = TypeVar("T")
# A peer that ended is noticed at once (its connections close); this is for one that hangs. Longer than the longest
# thing that one rank does while the others wait: writing the checkpoint of a large model.
TIMEOUT_S = 1800.0


class Group(Single):
    """The processes of a run; one object per process, made by all of them together.

    Args:
        device: kind of device that tensors are on, cpu or cuda.
        store: that of `fitune.parallel.start.meet`; None: the processes have not met.

    Raises:
        RuntimeError, UserError: the others did not come within `timeout_s`.
    """

    def __init__(self, world: World, device: str, timeout_s: float = TIMEOUT_S, store: dist.Store | None = None):
        self.world = world
        self.rank, self.size = world.rank, world.size  # type: ignore[misc]
        self.local_rank, self.local_size = world.local_rank, world.local_size  # type: ignore[misc]
        self.is_leader = world.rank == 0  # type: ignore[misc]
        self.elastic = world.elastic  # type: ignore[misc]
        store = store if store is not None else open_store(world, timeout_s)
        self._words = dist.PrefixStore("words", store)
        timeout = datetime.timedelta(seconds=timeout_s)
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=world.rank, world_size=world.size,
                                timeout=timeout)  # fmt: skip
        self._timeout = timeout
        self.control = dist.new_group(backend="gloo", timeout=timeout)

    def apart(self) -> Group:
        other = copy.copy(self)
        other.control = dist.new_group(backend="gloo", timeout=self._timeout)
        return other

    def share(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        if self.local_rank != 0:
            self.barrier()
        try:
            yield
        finally:  # also when it failed: the others find the same, or are ended by who started them
            if self.local_rank == 0:
                self.barrier()

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self._reduced([int(flag)], dist.ReduceOp.MAX)[0])

    def of_node(self, value: T) -> T:
        return self.gather(value)[self.rank - self.local_rank]

    def sums(self, values: Sequence[float]) -> list[float]:
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], how: Any) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, how, group=self.control)
        found: list[float] = tensor.tolist()
        return found

    def leave_word(self, problem: UserError) -> None:
        with suppress(RuntimeError):  # who holds the store is gone
            self._words.set(str(self.rank), json.dumps(as_told(problem)))

    def last_word(self) -> UserError | None:
        with suppress(RuntimeError):
            for rank in range(self.size):
                if self._words.check([str(rank)]):
                    return as_seen_by(self.rank)(*json.loads(self._words.get(str(rank))))
        return None

    def close(self) -> None:
        dist.destroy_process_group()
