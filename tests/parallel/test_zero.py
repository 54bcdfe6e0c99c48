"""DeepSpeed's ZeRO against one process: the same training, state in parts."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fitune import recipe as recipes
from fitune.engine.engine import Engine
from fitune.errors import NotFinite, UserError
from fitune.parallel.group import Group
from fitune.parallel.replicated import share_of
from fitune.parallel.zero_config import config_of
from fitune.parallel.zero_library import check, load_deepspeed
from fitune.plan import Adapter, Plan
from fitune.train.ranks import as_parallel
from tests.parallel.jobs import assert_same, batches_of, make_built, on_one, plan_of, records, train
from tests.parallel.ranks import run_ranks
from tests.parallel.runs import train as train_run
from tests.parallel.test_agreement import fail_on
from tests.parallel.test_runs import assert_same_run, losses
from tests.parallel.zero_ranks import make, needs_deepspeed

FULL: dict[str, Any] = dict(method="full", adapter=None)


def stages(group: Group, plans: list[Plan]) -> list[Any]:
    """Ten steps with each plan, and the loss of an evaluation in which a rank has no rows."""
    results = []
    for plan in plans:
        engine = make(group, plan)
        trained = train(engine, lambda some: share_of(some, group.rank, group.size))
        share = share_of(records(3, seed=99), group.rank, group.size)
        results.append((trained, engine.evaluate(batches_of(share, plan))))
    return results


@needs_deepspeed
@pytest.mark.parametrize(
    ("size", "ways", "changes"),
    [
        (2, ("zero1", "zero2", "zero3"), dict(packing=True, recompute_layers=2)),
        (4, ("zero2", "zero3"), dict(**FULL, micro_batch=1)),
        (2, ("zero2",), dict(base_format="nf4")),
    ],
)
def test_as_one_process(size: int, ways: tuple[str, ...], changes: dict[str, Any]):
    alone = on_one(plan_of(**changes))
    engine = Engine(make_built(plan_of(**changes)), plan_of(**changes))
    train(engine)
    expected = engine.evaluate(batches_of(records(3, seed=99), plan_of(**changes)))
    results = run_ranks(size, stages, [plan_of(**changes, parallel=way, world_size=size) for way in ways])
    for number in range(len(ways)):
        assert_same(results[0][number][0], alone)
        sums = [result[number][1] for result in results]
        assert sum(count for _, count in sums) == expected[1]
        assert sum(loss for loss, _ in sums) == pytest.approx(expected[0], rel=1e-4)
