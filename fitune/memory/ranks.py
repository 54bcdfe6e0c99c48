"""Peaks of one rank of several, from a trace of the rank's own step on `meta` at the model's full depth.

The engine, the sharding and the exchanges' buffers are those that run; a group of N ranks that exchanges nothing stands
for the others. Slower than `memory.trace` (a second or more for 32 layers), since every layer is run. What NCCL holds
outside torch's allocator is not in it: per communicator 4 MiB per channel and connection by default (NVIDIA/nccl#391),
channels by topology; 1.6 GB was reported (NVIDIA/nccl#864).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fitune.engine.engine import Engine
from fitune.engine.ring import Ring
from fitune.memory.dry import AbstractOptimizer, Rows
from fitune.memory.events import rounded
from fitune.memory.follow import Follower
from fitune.memory.held import device_tensors
from fitune.model.build import Built, add_adapter, build, fill, meta_weights
from fitune.parallel.world import Single
from fitune.plan import Plan


class Imagined(Single):
    """A group of `size` ranks of which this one is the `rank`th; the others have the same to say."""

    def __init__(self, size: int, rank: int = 0):
        self.size = self.local_size = size  # type: ignore[misc]
        self.rank = self.local_rank = rank  # type: ignore[misc]
        self.is_leader = rank == 0  # type: ignore[misc]

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


@dataclass(frozen=True)
class RankPeaks:
    """Bytes of tensors on one rank's device.

    Attributes:
        held: before the first step: weights or parts of them, buffers, adapters, masters.
        weights: of it the base's weights, whole or in parts, without ring buffers.
        state: optimizer state, from the first update on.
        first_step, step, eval: peaks.
    """

    held: int
    weights: int
    state: int
    first_step: int
    step: int
    eval: int


def trace_rank(config: Any, plan: Plan, rows: Sequence[Rows], rank: int = 0) -> RankPeaks:
    """Peaks of one of `plan.world_size` ranks, with these micro-batches of its own.

    Args:
        config: transformers configuration of the whole model.
        plan: what the rank obeys (`parallel`, `world_size` and where weights are, among others).
        rank: which of them; a pipeline's stages are not alike.
    """
    group = Imagined(plan.world_size, rank)
    built = build(config, plan, "meta")
    if plan.parallel == "fsdp2":
        from fitune.parallel.sharded import open_shards

        open_shards(built, plan, group)
    elif plan.parallel == "tp":
        from fitune.parallel.tensor import open_split

        open_split(built, plan, group)
    elif plan.parallel == "pp":
        from fitune.parallel.pipeline import open_stage

        open_stage(built, plan, group)
    fill(built, meta_weights(built), plan)
    if built.parts is not None:
        built.parts.finish()
    add_adapter(built, plan)
    engine = _engine(built, plan, group)
    there = _held(built, engine)
    held = sum(map(rounded, there))
    optimizer = AbstractOptimizer(plan.optimizer, _masters(engine), Follower("meta"))
    state = sum(rounded(s.num_bytes) for states in optimizer.states.values() for s in states)
    first = _step(engine, plan, rows, None)
    later = _step(engine, plan, rows, state)
    follower = _follower(built, engine)
    with follower:
        engine.evaluate([rows[0]])
    weights = held - sum(rounded(_size(p)) for p in engine.masters.parameters()) - _buffers(engine)
    return RankPeaks(held, weights, state, held + first, held + state + later, held + state + _peak(follower))


def _engine(built: Built, plan: Plan, group: Imagined) -> Engine:
    """The rank's engine; adafactor holds the place of the optimizer, since others refuse `meta`."""
    quiet = plan.with_(optimizer="adafactor")
    if plan.parallel == "fsdp2":
        from fitune.parallel.sharded_state import ShardedEngine

        return ShardedEngine(built, quiet, group)  # type: ignore[arg-type]
    if plan.parallel == "tp":
        from fitune.parallel.tensor_engine import TensorEngine

        return TensorEngine(built, quiet, group)  # type: ignore[arg-type]
    if plan.parallel == "pp":
        from fitune.parallel.pipeline import PipelineEngine

        return PipelineEngine(built, quiet, group)  # type: ignore[arg-type]
    if plan.parallel == "cp":
        from fitune.parallel.context import ContextEngine

        return ContextEngine(built, quiet, group)
    if plan.parallel == "none":
        return Engine(built, quiet)
    from fitune.parallel.replicated import Replicated

    return Engine(built, quiet, Replicated(group))


def _masters(engine: Engine) -> dict[str, torch.Tensor]:
    return {str(index): p for index, p in enumerate(engine.masters.parameters())}


def _step(engine: Engine, plan: Plan, rows: Sequence[Rows], state: int | None) -> int:
    """Peak of a step above what is held (and above the state, where it is there already)."""
    follower = _follower(engine.built, engine)
    optimizer = AbstractOptimizer(plan.optimizer, _masters(engine), follower)
    optimizer.made_before = state is not None
    engine.optimizer = optimizer  # type: ignore[assignment]
    engine.plan = plan
    with follower:
        engine.step(list(rows), step=0, lr=1.0)
    peak = _peak(follower)
    optimizer.made.clear()
    engine.abandon()
    return peak


def _follower(built: Built, engine: Engine) -> Follower:
    follower = Follower("meta")
    follower.ignore(_tensors(built, engine))
    return follower


def _tensors(built: Built, engine: Engine) -> list[torch.Tensor]:
    """Everything that is on the device between steps."""
    own = [tensor for name, tensor in device_tensors(built) if name not in built.provided]
    tensors = own + list(engine.masters.parameters())
    return tensors + _ring_buffers(engine) + list(_shards(built).values()) + _rows(engine)


def _shards(built: Built) -> dict[int, torch.Tensor]:
    parts: dict[int, torch.Tensor] = getattr(getattr(built.streamed, "backing", None), "parts", {})
    return parts


def _ring_buffers(engine: Engine) -> list[torch.Tensor]:
    ring: Any = engine.driver.weights
    rings = [ring, getattr(ring, "head_ring", None)]  # where layers are gathered, a head's tiles have their own
    return [buffer for each in rings if isinstance(each, Ring) for _, buffer in each.device_tensors()]


def _rows(engine: Engine) -> list[torch.Tensor]:
    """Rows of gradients, and whole rows of what is trained."""
    masters: Any = engine.masters
    whole = [unit.row for unit in getattr(masters, "units", []) if hasattr(unit, "row")]
    return whole + list(getattr(masters, "_spare", []))


def _held(built: Built, engine: Engine) -> list[int]:
    sizes = {}
    for tensor in _tensors(built, engine):
        storage = tensor.untyped_storage()
        if tensor.device.type == "meta":
            sizes[storage._cdata] = storage.nbytes()
    return list(sizes.values())


def _buffers(engine: Engine) -> int:
    return sum(rounded(t.untyped_storage().nbytes()) for t in _ring_buffers(engine) + _rows(engine))


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _peak(follower: Follower) -> int:
    """Most bytes of blocks that were alive at once."""
    now = highest = 0
    for event in follower.events:
        size = rounded(follower.blocks[abs(event) - 1].num_bytes)
        now += size if event > 0 else -size
        highest = max(highest, now)
    return highest
