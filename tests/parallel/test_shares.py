"""Ranks with unequal shares of a step: the training of one process, whatever each of them has."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fitune.engine.engine import Engine
from fitune.parallel.group import Group
from fitune.parallel.pipeline import PipelineEngine, open_stage
from fitune.parallel.replicated import Replicated, share_of
from fitune.plan import Plan, Share
from tests.parallel.jobs import assert_same, batches_of, make_built, on_one, plan_of, records, train
from tests.parallel.ranks import run_ranks
from tests.parallel.runs import assert_same_run, losses
from tests.parallel.runs import train as train_run
from tests.parallel.test_agreement import fail_on
from tests.train.tiny_run import of_kind

FULL: dict[str, Any] = dict(method="full", adapter=None)


def shares_of(*parts: tuple[int, int, int]) -> tuple[Share, ...]:
    """Of (records, micro-batch, recomputed layers) for each rank."""
    return tuple(Share("CPU", None, *part) for part in parts)


def unequal(group: Group, plan: Plan) -> Any:
    """Losses and weights; tokens and micro-batches of each step, and a held-out loss."""
    own = plan.of_rank(group.rank)
    engine, told = Engine(make_built(own), own, Replicated(group)), []
    parts = [share.records for share in plan.shares]

    def share(some: Any) -> Any:
        mine = share_of(some, group.rank, group.size, parts)
        told.append((len(mine), len(batches_of(mine, own))))
        return mine

    result = train(engine, share, sizes=(plan.batch, 2))
    held_out = share_of(records(3, seed=99), group.rank, group.size, parts)
    return result, told, engine.evaluate(batches_of(held_out, own))


@pytest.mark.parametrize(
    ("shares", "changes"),
    [
        (shares_of((3, 2, 0), (1, 1, 2)), dict(packing=True)),
        (shares_of((6, 2, 1), (2, 1, 0)), {}),  # three micro-batches and two
        (shares_of((6, 3, 0), (2, 2, 1)), FULL),
        (shares_of((4, 2, 0), (2, 1, 2), (2, 2, 1)), dict(accumulation_order="layer-major")),
    ],
)
def test_as_one_process(shares: tuple[Share, ...], changes: dict[str, Any]):
    batch = sum(share.records for share in shares)
    plan = plan_of(batch=batch, **changes)
    results = run_ranks(len(shares), unequal, plan.with_(world_size=len(shares), parallel="ddp", shares=shares))
    for (ours, told, _), share in zip(results, shares, strict=True):
        assert_same(ours, on_one(plan, sizes=(batch, 2)))
        assert told[0][0] == share.records, "of a whole step just its share"
        if not plan.packing:
            assert told[0][1] == -(-share.records // share.micro_batch)
    engine = Engine(make_built(plan), plan)
    train(engine, sizes=(batch, 2))
    expected = engine.evaluate(batches_of(records(3, seed=99), plan))
    total, count = (sum(column) for column in zip(*(held_out for *_, held_out in results), strict=True))
    assert count == expected[1] and total == pytest.approx(expected[0], rel=1e-4)


def test_no_rank_has_more_than_its_share():
    some = records(16)
    for count, most in ((16, (12, 3, 1)), (5, (4, 1, 1)), (1, (1, 1, 1))):
        shares = [share_of(some[:count], rank, 3, (12, 3, 1)) for rank in range(3)]
        assert sorted(r.index for share in shares for r in share) == list(range(count)), "each record has one owner"
        assert all(len(share) <= limit for share, limit in zip(shares, most, strict=True))
        assert all([r.index for r in share] == sorted(r.index for r in share) for share in shares)
    long = ["x" * 100, *["y"] * 7]
    assert [len(share_of(long, rank, 2, (6, 2))) for rank in range(2)] == [6, 2], "however long one of them is"


# ---- whole runs ------------------------------------------------------------------------------------------------------


def planned_with(shares: tuple[Share, ...], then: Any, rank: int) -> None:
    """In the processes of a run: the planner answers with these shares."""
    from fitune.train import ranks

    real = ranks.plan_for

    def plan_for(session: Any, group: Any) -> Any:
        found = real(session, group)
        return replace(found, plan=found.plan.with_(shares=shares))

    ranks.plan_for = plan_for
    if then is not None:
        then(rank)


def watched(folder: Path, rank: int) -> None:
    """In the processes of a run: what each rank's steps and evaluations were given, a line each."""
    for method in ("step", "evaluate"):
        setattr(Engine, method, _watching(getattr(Engine, method), folder / f"{method}-{rank}.jsonl"))


def _watching(real: Any, path: Path) -> Any:
    def wrapper(self: Any, host_batches: Any, **options: Any) -> Any:
        if self.built.device.type != "meta":
            records = sum(len(row) for batch in host_batches for row in batch.doc_lengths)
            rows = max((len(batch.input_ids) for batch in host_batches), default=0)
            with path.open("a") as file:
                file.write(json.dumps([records, rows, self.plan.recompute_layers]) + "\n")
        return real(self, host_batches, **options)

    return wrapper


def seen(folder: Path, method: str, rank: int) -> list[list[int]]:
    return [json.loads(line) for line in (folder / f"{method}-{rank}.jsonl").read_text().splitlines()]


def test_only_the_rank_whose_memory_ran_out_changes(job: Any, alone: Path, tmp_path: Path):
    shares = tuple(replace(share, needed_bytes=1 << 30, step_s=0.5) for share in shares_of((3, 3, 0), (2, 2, 0)))
    failing = functools.partial(fail_on, 1, "run_layer", 9)  # in a step
    run = tmp_path / "run"
    results = train_run(2, job(run), prepare=functools.partial(planned_with, shares, failing))
    assert [r[:2] for r in results] == [("done", 0)] * 2
    assert_same_run(run, alone)
    (told,) = of_kind(run, "replan")
    assert told["change"] == "GPU 1 (CPU): micro-batch 2 -> 1"
    after = json.loads((run / "plan.1.json").read_text())
    assert [s["micro_batch"] for s in after["shares"]] == [3, 1]
    assert [s["records"] for s in after["shares"]] == [3, 2]
    predicted = [(s["needed_bytes"], s["step_s"]) for s in after["shares"]]
    assert predicted == [(1 << 30, 0.5), (None, None)], "what was predicted of another setting holds no more"


def test_a_run_goes_on_with_other_shares_and_by_one_process(job: Any, alone: Path, tmp_path: Path):
    run, before = tmp_path / "run", 2
    prepare = functools.partial(planned_with, shares_of((4, 2, 0), (1, 1, 1)), functools.partial(watched, tmp_path))
    train_run(2, job(run, steps=2), prepare=prepare)
    assert seen(tmp_path, "step", 0) == [[4, 2, 0]] * 2 and seen(tmp_path, "step", 1) == [[1, 1, 1]] * 2
    held_out = [sum(records for records, *_ in seen(tmp_path, "evaluate", rank)) for rank in (0, 1)]
    assert held_out[0] > 2 * held_out[1] > 0, "evaluations are shared out too"
    for size, steps, shares in ((2, 3, shares_of((2, 2, 1), (3, 1, 0))), (2, 4, ()), (1, 6, None)):
        text = (run / "recipe.yaml").read_text().replace(f"steps: {before}", f"steps: {steps}")
        before = steps
        (run / "recipe.yaml").write_text(text)
        kept = [line for line in (run / "events.jsonl").read_text().splitlines(True) if '"end"' not in line]
        (run / "events.jsonl").write_text("".join(kept))
        if shares is not None:
            plan = json.loads((run / "plan.json").read_text()) | {"shares": [asdict(share) for share in shares]}
            (run / "plan.json").write_text(json.dumps(plan))
        assert train_run(size, job(run, steps=steps), resume=str(run))[0][0] == "done"
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
    assert [e["change"].partition(":")[0] for e in of_kind(run, "replan")] == ["2 x CPU -> 1 x CPU"]


# ---- a pipeline ------------------------------------------------------------------------------------------------------


def staged(group: Group, plan: Plan) -> Any:
    built = make_built(plan, before_fill=lambda made: open_stage(made, plan, group))
    engine = PipelineEngine(built, plan, group)
    return train(engine, steps=4), list(engine.own)


def test_stages_that_are_not_alike():
    plan = plan_of(parallel="pp", world_size=2, stages=(3, 1), num_layers=4)
    alone = on_one(plan_of(num_layers=4), steps=4)
    (first, own), (_, other) = run_ranks(2, staged, plan)
    assert (own, other) == ([0, 1, 2], [3])
    assert_same(first, alone)
