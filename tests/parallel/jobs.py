"""A small random model trained for a few steps, on one process or by a group: what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fitune.data.batches import step_batches
from fitune.engine.engine import Engine
from fitune.model.build import add_adapter, build, fill
from fitune.parallel.group import Group
from fitune.plan import Adapter, Plan
from fitune.train import ranks
from fitune.train.signals import StepGivenUp
from tests import tiny

STEPS = 10


@dataclass(frozen=True)
class Record:
    index: int
    input_ids: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.input_ids)


def records(count: int, seed: int = 0) -> list[Record]:
    return [Record(i, ids, labels) for i, (ids, labels) in enumerate(tiny.records(count, seed=seed))]


def plan_of(**changes: Any) -> Plan:
    adapter = Adapter(r=4, alpha=8, dropout=0.1, bias="none", targets=("all-linear",))
    return tiny.make_plan(**(dict(adapter=adapter, micro_batch=2, clip=0.5, lr=3e-3) | changes))


def make_built(plan: Plan, architecture: str = "llama", before_fill: Any = None) -> Any:
    source = tiny.reference(architecture)
    built = build(tiny.config_of(architecture), plan, "cpu")
    if before_fill is not None:
        before_fill(built)
    fill(built, source.state_dict().items(), plan)
    add_adapter(built, plan)
    return built


def batches_of(some: Sequence[Record], plan: Plan) -> list[Any]:
    if not some:
        return []
    return step_batches(some, micro_batch=plan.micro_batch, packing=plan.packing, seq_len=plan.seq_len, pad_id=0)


def train(engine: Engine, share: Any = lambda some: some, steps: int = STEPS, sizes: Sequence[int] = (5, 1)) -> Any:
    """Losses and gradient norms of some steps with `sizes` records in turn, and the trained weights."""
    plan, losses = engine.plan, []
    for step in range(steps):
        some = records(sizes[step % len(sizes)], seed=step)
        result = engine.step(batches_of(share(some), plan), step=step, lr=plan.lr)
        losses.append((result.loss, result.grad_norm, result.num_targets))
    return losses, {name: tensor.clone() for name, tensor in engine.trained_tensors().items()}


def on_one(plan: Plan, architecture: str = "llama", **arguments: Any) -> Any:
    torch.set_num_threads(1)
    return train(Engine(make_built(plan, architecture), plan), **arguments)


def assert_same(ours: Any, theirs: Any, first: float = 1e-5, later: float = 1e-4) -> None:
    """Losses within `first` on the first step and `later` on all (relative), norms within ten times that; the same
    weights."""
    (losses, weights), (expected, expected_weights) = ours, theirs
    for step, (mine, other) in enumerate(zip(losses, expected, strict=True)):
        assert mine[2] == other[2], "target tokens of the whole step"
        limit = first if step == 0 else later
        assert abs(mine[0] - other[0]) <= limit * abs(other[0]), (step, mine, other)
        assert abs(mine[1] - other[1]) <= 10 * limit * abs(other[1]), (step, mine, other)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        # not each element: where a gradient is all rounding, AdamW's update is its sign
        difference = (weights[name] - tensor).norm() / tensor.norm()
        assert difference <= 1e-3, (name, float(difference))


def step_given_up(engine: Engine, group: Group, plan: Plan, gives_up: Callable[[str, int], bool]) -> str:
    """A step that a rank gives up where `gives_up` says so of (part, index), as `fitune.train` has it; how it ended
    here: done, gave up or told."""
    agree = ranks.Agreement(group)

    def observe(part: str, index: int) -> None:
        if gives_up(part, index):
            raise StepGivenUp
        if part == "optimizer" and agree(None) == ranks.given_up():
            raise ranks.PeerGaveUp

    try:
        engine.step(batches_of(records(5), plan), step=0, lr=plan.lr, observe=observe)
    except ranks.PeerGaveUp:
        return "told"
    except StepGivenUp:
        engine.ranks.drain()
        agree(ranks.given_up())
        return "gave up"
    return "done"
