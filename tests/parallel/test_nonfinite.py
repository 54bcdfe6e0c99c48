"""A record that gives no number is found by every rank, also by those that never see its loss."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fitune.parallel.group import Group
from fitune.parallel.setup import finish_host_together, make_engine, open_host_together
from fitune.plan import Plan
from fitune.train.nonfinite import broken_records
from tests.parallel.jobs import Record, batches_of, make_built, plan_of, records
from tests.parallel.ranks import run_ranks

POISON = 7  # a token whose embedding is not a number


class Counted(Record):
    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.labels[1:] != -100))


def step_records() -> list[Counted]:
    """Three, of which the second one has the token before its last one: its other losses are numbers."""
    clean = [np.where(record.input_ids == POISON, POISON + 1, record.input_ids) for record in records(3)]
    clean[1][-2] = POISON
    return [Counted(**dataclasses.asdict(r) | dict(input_ids=ids)) for r, ids in zip(records(3), clean, strict=True)]


def broken(group: Group, plan: Plan) -> list[int]:
    built = make_built(plan, before_fill=lambda made: open_host_together(made, plan, group, None))
    finish_host_together(built, plan, group)
    engine = make_engine(built, plan, group)
    weight: Any = built.model.get_input_embeddings().weight  # type: ignore[operator]
    if weight.device.type != "meta":  # another stage's
        with torch.no_grad():
            weight[POISON] = torch.nan
    active: Any = SimpleNamespace(group=group, batches=lambda some: batches_of(some, plan))
    return [record.index for record in broken_records(active, engine, step_records())]  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["ddp", "pp", "cp"])
def test_all_ranks_name_the_record(way: str):
    assert run_ranks(2, broken, plan_of(parallel=way, world_size=2)) == [[1], [1]]
