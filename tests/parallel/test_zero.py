"""DeepSpeed's ZeRO against one process: the same training, state in parts."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fitune import recipe as recipes
from fitune.engine.driver import Driver
from fitune.engine.engine import Engine
from fitune.errors import NotFinite, UserError
from fitune.parallel.group import Group
from fitune.parallel.replicated import share_of
from fitune.parallel.zero import check_formats
from fitune.parallel.zero_config import config_of
from fitune.parallel.zero_library import check, load_deepspeed
from fitune.parallel.zero_model import Work
from fitune.plan import Adapter, Plan
from tests.parallel.jobs import assert_same, batches_of, make_built, on_one, plan_of, records, train
from tests.parallel.ranks import run_ranks
from tests.parallel.runs import losses
from tests.parallel.runs import train as train_run
from tests.parallel.test_agreement import fail_on
from tests.parallel.zero_ranks import make, needs_deepspeed
from tests.train.tiny_run import of_kind

FULL: dict[str, Any] = dict(method="full", adapter=None)


def stages(group: Group, plans: list[Plan], architecture: str) -> list[Any]:
    """Ten steps with each plan, and the loss of an evaluation in which a rank has no rows."""
    results = []
    for plan in plans:
        engine = make(group, plan, architecture)
        trained = train(engine, lambda some: share_of(some, group.rank, group.size))
        share = share_of(records(3, seed=99), group.rank, group.size)
        results.append((trained, engine.evaluate(batches_of(share, plan))))
    return results


@needs_deepspeed
@pytest.mark.parametrize(
    ("size", "ways", "architecture", "changes"),
    [
        (2, ("zero1", "zero2", "zero3"), "llama", dict(packing=True, recompute_layers=2)),
        (4, ("zero2", "zero3"), "gemma2", dict(**FULL, micro_batch=1, recompute_layers=2)),  # its head is the embedding
        (2, ("zero2",), "llama", dict(base_format="nf4")),
    ],
)
def test_as_one_process(size: int, ways: tuple[str, ...], architecture: str, changes: dict[str, Any]):
    engine = Engine(make_built(plan_of(**changes), architecture), plan_of(**changes))
    alone = train(engine)
    expected = engine.evaluate(batches_of(records(3, seed=99), plan_of(**changes)))
    results = run_ranks(size, stages, [plan_of(**changes, parallel=way, world_size=size) for way in ways], architecture)
    for number in range(len(ways)):
        assert_same(results[0][number][0], alone)
        sums = [result[number][1] for result in results]
        assert sum(count for _, count in sums) == expected[1]
        assert sum(loss for loss, _ in sums) == pytest.approx(expected[0], rel=1e-4)


def exact_steps(group: Group, plans: list[Plan]) -> list[Any]:
    return [train(make(group, plan), lambda some: share_of(some, group.rank, group.size), steps=3) for plan in plans]


@needs_deepspeed
def test_offloaded_and_in_16_bit():
    """What is offloaded changes no number; masters are fp32 beside parameters in bf16 (within its noise)."""
    plans = [
        plan_of(parallel="zero2", world_size=2, offload_optimizer="cpu"),
        plan_of(parallel="zero3", world_size=2, offload_optimizer="cpu", offload_params="cpu"),
    ]
    half = dict(precision="bf16", base_format="bf16", **FULL)
    plans += [plan_of(**half, parallel=way, world_size=2) for way in ("zero1", "zero3")]
    results = run_ranks(2, exact_steps, plans)[0]
    alone = on_one(plan_of(), steps=3)
    for result in results[:2]:
        assert_same(result, alone)
    alone = on_one(plan_of(**half), steps=3)
    for losses_of_steps, _ in results[2:]:
        for mine, other in zip(losses_of_steps, alone[0], strict=True):
            assert mine[0] == pytest.approx(other[0], rel=1e-3) and mine[1] == pytest.approx(other[1], rel=2e-2)


def broken_then_whole(group: Group, plans: list[Plan]) -> list[Any]:
    return [_broken_then_whole(group, plan) for plan in plans]


def _broken_then_whole(group: Group, plan: Plan) -> Any:
    """A step whose loss is not a number, one that an observer gives up on one rank, and the same two steps whole."""
    engine = make(group, plan)
    share = lambda step: batches_of(share_of(records(5, seed=step), group.rank, group.size), plan)  # noqa: E731
    table = next(iter(engine.built.model.get_input_embeddings().parameters()))
    broken = getattr(table, "ds_tensor", table).detach().view(-1, 64)  # stage 3: this rank's part of it
    row = broken[5].clone()
    told = []
    broken[5] = float("nan")
    try:
        engine.step(share(0), step=0, lr=plan.lr)
    except NotFinite as problem:
        told.append(problem.what)
        engine.abandon()
    broken[5] = row

    def observe(part: str, index: int) -> None:
        if part == ("backward" if group.rank == 1 else "optimizer"):
            raise KeyError("given up")

    try:
        engine.step(share(0), step=0, lr=plan.lr, observe=observe)
    except KeyError:
        told.append("given up")
        engine.ranks.drain()  # nothing to wait for
        engine.abandon()
    return told, [engine.step(share(step), step=step, lr=plan.lr).loss for step in range(2)]


@needs_deepspeed
def test_a_step_that_is_dropped_leaves_nothing():
    plans = [plan_of(parallel=way, world_size=2, offload_optimizer=offload, micro_batch=1)
             for way, offload in (("zero2", "cpu"), ("zero3", "none"))]  # fmt: skip
    expected = [loss for loss, *_ in on_one(plan_of(), steps=2, sizes=(5, 5))[0]]
    for of_rank in run_ranks(2, broken_then_whole, plans):
        for told, found in of_rank:
            assert told == ["the loss is not finite at step 1", "given up"]
            assert found == pytest.approx(expected, rel=1e-5)


# ---- whole runs ------------------------------------------------------------------------------------------------------


def go_on(run: Path, steps: int) -> None:
    """As if the run had been asked for more steps, and cut off."""
    text = (run / "recipe.yaml").read_text().replace(f"steps: {steps - 2}", f"steps: {steps}")
    (run / "recipe.yaml").write_text(text)
    lines = (run / "events.jsonl").read_text().splitlines(True)
    (run / "events.jsonl").write_text("".join(line for line in lines if '"end"' not in line))


@needs_deepspeed
def test_a_run_goes_from_ddp_to_zero3_to_one_process(job: Any, alone: Path, tmp_path: Path):
    run = tmp_path / "run"
    train_run(2, job(run, steps=2, parallel="ddp"))
    for size, steps, way in ((4, 4, "zero3"), (1, 6, "auto")):
        go_on(run, steps)
        assert train_run(size, job(run, steps=steps, parallel=way), resume=str(run))[0][0] == "done"
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4) and len(losses(run)) == 6
    told = json.loads((run / "deepspeed.json").read_text())
    assert told["zero_optimization"]["stage"] == 3 and told["gradient_clipping"] == 1.0


@needs_deepspeed
def test_all_weights_in_parts(assert_same_model: Any, tmp_path: Path):
    assert_same_model(tmp_path / "run", "zero3")


@needs_deepspeed
def test_a_rank_that_fails_in_the_middle_ends_all(job: Any, tmp_path: Path):
    """DeepSpeed's exchanges cannot be caught up with: nobody waits, new processes (here none are started) would go on
    with the plan that the one that failed has left."""
    settings = job(tmp_path / "run", parallel="zero3", eval_share=0)
    fail = functools.partial(fail_on, 1, "run_layer", 9)
    with pytest.raises(AssertionError, match="cannot go on with the device|another process of this run has ended"):
        train_run(2, settings, prepare=fail)
    plans = [json.loads((tmp_path / "run" / name).read_text()) for name in ("plan.json", "plan.1.json")]
    assert plans[1]["micro_batch"] < plans[0]["micro_batch"] and plans[1]["parallel"] == "zero3"


@needs_deepspeed
def test_a_rank_that_fails_in_an_evaluation_stays_in_it(job: Any, alone: Path, tmp_path: Path):
    fail = functools.partial(fail_on, 1, "run_layer", 2)
    results = train_run(2, job(tmp_path / "run", parallel="zero3"), prepare=fail)
    assert [r[:2] for r in results] == [("done", 0)] * 2
    (told,) = of_kind(tmp_path / "run", "replan")
    assert told["phase"] == "eval" and told["where"] == "device"
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-4)


# ---- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what", "why"),
    [
        (dict(optimizer="adafactor"), "optimizer adafactor cannot be used with --parallel zero3", "whole matrices"),
        (dict(base_format="nf4"), "a nf4 base cannot be used with --parallel zero3", "shards floating-point"),
        (dict(precision="bf16"), "a base in fp32 cannot be used with --parallel zero3 and --precision bf16", "format"),
    ],
)
def test_what_cannot_be_sharded_is_refused(changes: dict[str, Any], what: str, why: str):
    with pytest.raises(UserError) as caught:
        check(plan_of(parallel="zero3", **changes))
    assert caught.value.what == what and why in caught.value.why


def test_a_model_in_several_formats_is_refused():
    """Adapters are fp32, trained biases are in the compute format."""
    adapter = Adapter(r=4, alpha=8, dropout=0.0, bias="all", targets=("all-linear",))
    plan = plan_of(parallel="zero2", precision="bf16", base_format="bf16", adapter=adapter)
    work = Work(Driver(make_built(plan, "qwen2")), sharded=False, trains_embedding=False)
    with pytest.raises(UserError) as caught:
        check_formats(work, plan)
    assert caught.value.what == "this model cannot be trained with --parallel zero2"
    assert caught.value.why.endswith("one format, float32 here, and some are in bfloat16")


def test_without_deepspeed_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError) as caught:
        load_deepspeed("cpu")
    assert caught.value.what == "ZeRO needs DeepSpeed" and 'pip install "fitune[deepspeed]"' in caught.value.fix


def without_deepspeed(rank: int) -> None:
    sys.modules["deepspeed"] = None  # type: ignore[assignment]


def test_a_run_that_needs_it_leaves_nothing_behind(job: Any, tmp_path: Path):
    with pytest.raises(AssertionError, match="--parallel zero2 cannot do this job\n  why: DeepSpeed is not inst"):
        train_run(2, job(tmp_path / "run", parallel="zero2"), prepare=without_deepspeed)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "why", "fix"),
    [
        (dict(offload_optimizer="cpu"), "offload_optimizer is DeepSpeed's", "zero1 or zero2 or zero3"),
        (dict(parallel="zero2", offload_params="cpu"), "offload_params is DeepSpeed's", "use parallel zero3"),
        (dict(parallel="zero3", offload_params="disk"), "Input should be 'none' or 'cpu'", "one of: none, cpu"),
    ],
)
def test_offload_that_contradicts_the_rest(values: dict[str, Any], why: str, fix: str):
    with pytest.raises(UserError) as caught:
        recipes.build(values)
    assert why in caught.value.why and fix in caught.value.fix


def test_configuration_of_a_plan():
    plan = plan_of(parallel="zero3", precision="bf16", base_format="bf16", clip=0.5, device="cuda",
                   offload_params="cpu")  # fmt: skip
    told = config_of(plan)
    assert told["bf16"]["enabled"] and not told["fp16"]["enabled"] and told["gradient_clipping"] == 0.5
    assert told["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert "offload_optimizer" not in told["zero_optimization"]
    adapters = config_of(plan.with_(parallel="zero2"))
    assert not adapters["bf16"]["enabled"], "adapters are fp32 where DeepSpeed holds nothing else"
