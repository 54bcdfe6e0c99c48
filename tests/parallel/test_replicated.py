"""Data parallel against one process: the same losses, norms and weights, however the records are shared out."""

from __future__ import annotations

from typing import Any

import pytest

from fitune.engine.engine import Engine
from fitune.parallel.group import Group
from fitune.parallel.replicated import Replicated, share_of
from fitune.plan import Plan
from tests.parallel.jobs import assert_same, make_built, on_one, plan_of, records, train
from tests.parallel.ranks import run_ranks


def replicated(group: Group, plan: Plan) -> Any:
    engine = Engine(make_built(plan), plan, Replicated(group))
    return train(engine, lambda some: share_of(some, group.rank, group.size))


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, dict(accumulation_order="layer-major")),  # the second step has one record: the other rank has none
        (4, dict(packing=True)),
        (2, dict(method="full", adapter=None)),
    ],
)
def test_as_one_process(size: int, changes: dict[str, Any]):
    plan = plan_of(**changes)
    alone = on_one(plan)
    for ours in run_ranks(size, replicated, plan):
        assert_same(ours, alone)


def test_every_record_has_one_owner_and_the_work_is_even():
    some = records(9)
    shares = [share_of(some, rank, 4) for rank in range(4)]
    assert sorted(r.index for share in shares for r in share) == list(range(9))
    tokens = [sum(map(len, share)) for share in shares]
    assert max(tokens) - min(tokens) <= max(map(len, some))
    assert share_of(some[:1], 0, 2) == some[:1] and share_of(some[:1], 1, 2) == []


def test_a_card_of_twice_the_speed_gets_twice_the_work():
    some = records(60)
    slow, fast = (sum(map(len, share_of(some, rank, 2, [1.0, 2.0]))) for rank in range(2))
    assert 1.8 < fast / slow < 2.2
