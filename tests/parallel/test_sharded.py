"""Fully sharded data parallel against one process: the same training, 1/N of the bytes on each rank."""

from __future__ import annotations

from typing import Any

import pytest

from fitune.engine.engine import Engine
from fitune.parallel.group import Group
from fitune.parallel.replicated import share_of
from fitune.parallel.sharded import ShardBacking, open_shards
from fitune.parallel.sharded_state import ShardedEngine
from fitune.plan import Plan
from tests.parallel.jobs import assert_same, batches_of, make_built, on_one, plan_of, records, train
from tests.parallel.ranks import run_ranks

SHARDED = dict(parallel="fsdp2", stream_from="shards", resident_layers=0)


def make(group: Group, plan: Plan) -> ShardedEngine:
    return ShardedEngine(make_built(plan, before_fill=lambda built: open_shards(built, plan, group)), plan, group)


def sharded(group: Group, plan: Plan) -> Any:
    engine = make(group, plan)
    result = train(engine, lambda some: share_of(some, group.rank, group.size))
    held_out = records(3, seed=99)
    loss = engine.evaluate(batches_of(share_of(held_out, group.rank, group.size), plan))
    backing = engine.built.streamed.backing
    assert isinstance(backing, ShardBacking)
    held = sum(part.numel() for part in backing.parts.values())
    whole = engine.built.streamed.total_bytes
    return result, loss, held, whole


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, dict(base_format="nf4", packing=True)),
        (4, dict(recompute_layers=2, accumulation_order="layer-major")),  # a ring buffer that is kept over the turn
        (3, dict(method="full", adapter=None, micro_batch=1)),  # three ranks do not divide a layer evenly
    ],
)
def test_as_one_process(size: int, changes: dict[str, Any]):
    alone = on_one(plan_of(**changes))
    results = run_ranks(size, sharded, plan_of(**changes, **SHARDED))
    assert_same(results[0][0], alone)
    assert all(losses == results[0][0][0] for (losses, _), *_ in results), "every rank knows the same loss"
    assert sum(held for *_, held, _ in results) <= 1.05 * results[0][3]
    plan = plan_of(**changes)
    engine = Engine(make_built(plan), plan)
    train(engine)
    expected = engine.evaluate(batches_of(records(3, seed=99), plan))
    total = sum(loss for _, (loss, _), *_ in results), sum(count for _, (_, count), *_ in results)
    assert total[1] == expected[1] and total[0] == pytest.approx(expected[0], rel=1e-4)
