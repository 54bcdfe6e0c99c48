"""Stages of layers against one process: the same training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fitune.engine.engine import Engine
from fitune.errors import UserError
from fitune.model.build import build
from fitune.parallel.group import Group
from fitune.parallel.pipeline import PipelineEngine, layers_of, open_stage
from fitune.parallel.world import Single
from fitune.plan import Plan
from tests import tiny
from tests.parallel.jobs import assert_same, batches_of, make_built, on_one, plan_of, records, step_given_up, train
from tests.parallel.ranks import run_ranks
from tests.parallel.runs import assert_same_run, losses
from tests.parallel.runs import train as train_run


def piped(group: Group, plan: Plan) -> Any:
    engine = PipelineEngine(make_built(plan, before_fill=lambda built: open_stage(built, plan, group)), plan, group)
    result = train(engine)
    loss = engine.evaluate(batches_of(records(3, seed=99), plan))
    held = sum(p.numel() for p in engine.built.model.parameters() if p.device.type != "meta")
    packed = sum(lin.packed.num_bytes() for lin in engine.built.linears.values() if lin.packed is not None)
    return result, loss, held, packed


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, dict(base_format="nf4", packing=True, accumulation_order="layer-major")),
        (3, dict(recompute_layers=2)),  # stages of two, one and one layers
        (2, dict(method="full", adapter=None, micro_batch=1)),
    ],
)
def test_as_one_process(size: int, changes: dict[str, Any]):
    plan = plan_of(**changes)
    alone = on_one(plan)
    results = run_ranks(size, piped, plan_of(**changes, parallel="pp", world_size=size))
    assert_same(results[0][0], alone)
    engine = Engine(make_built(plan), plan)
    packed = sum(lin.packed.num_bytes() for lin in engine.built.linears.values() if lin.packed is not None)
    train(engine)
    expected = engine.evaluate(batches_of(records(3, seed=99), plan))
    assert [loss for _, loss, *_ in results[:-1]] == [(0.0, 0)] * (size - 1), "the last stage has the loss"
    assert results[-1][1][0] == pytest.approx(expected[0], rel=1e-4) and results[-1][1][1] == expected[1]
    assert sum(part for *_, part in results) == packed, "each layer is held once"


def gathered(group: Group, plan: Plan) -> Any:
    """The result as the first rank writes it, of a model with a saved buffer in each layer."""
    built = make_built(plan, before_fill=lambda made: open_stage(made, plan, group))
    own = layers_of(len(built.layers), group.rank, group.size)
    for index, layer in enumerate(built.layers):
        layer.register_buffer("scalar", torch.tensor(float(index) if index in own else -1.0))
    engine = PipelineEngine(built, plan, group)
    return engine.whole_weights() if group.is_leader else engine.trained_tensors()


def test_the_result_has_the_buffers_of_all_stages():
    """Each stage has read those of its own layers only."""
    plan = plan_of(method="full", adapter=None, micro_batch=1, parallel="pp", world_size=2)
    weights, nothing = run_ranks(2, gathered, plan)
    built = make_built(plan_of(method="full", adapter=None, micro_batch=1))
    assert weights.keys() - {name for name, _ in built.model.named_parameters()} == {
        f"{built.layers_prefix}.{index}.scalar" for index in range(len(built.layers))
    }
    scalars = [float(weights[f"{built.layers_prefix}.{index}.scalar"]) for index in range(len(built.layers))]
    assert scalars == list(map(float, range(len(built.layers)))) and nothing == {}


def given_up(group: Group, plan: Plan, failing: int, part: str) -> str:
    """A step that one rank gives up at a part of it, as `fitune.train` has it; how it ended here."""
    engine = PipelineEngine(make_built(plan, before_fill=lambda built: open_stage(built, plan, group)), plan, group)
    return step_given_up(engine, group, plan, lambda name, index: group.rank == failing and name == part)


@pytest.mark.parametrize("part", ["forward", "tail", "backward"])
@pytest.mark.parametrize("failing", [0, 1])
def test_one_stage_gives_a_step_up_and_nobody_waits_for_it(failing: int, part: str):
    plan = plan_of(parallel="pp", world_size=2)
    results = run_ranks(2, given_up, plan, failing, part, timeout_s=100)
    assert results[failing] == "gave up" and results[1 - failing] == "told"


def test_layers_are_shared_out():
    assert [list(layers_of(7, rank, 3)) for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


def test_a_run_in_stages_goes_on_without_them(job: Any, alone: Path, tmp_path: Path):
    run = tmp_path / "run"
    results = train_run(2, job(run, parallel="pp"))
    assert [r[:2] for r in results] == [("done", 0)] * 2
    assert_same_run(run, alone)
    assert len(losses(run)) == 6


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(method="full", adapter=None, tied=True), "the head is the embedding"),
        (dict(stream_from="pageable", resident_layers=0), "the plan streams weights"),
        (dict(dora=True), "DoRA's start needs the weights of every layer"),
    ],
)
def test_what_cannot_be_cut_is_refused(changes: dict[str, Any], why: str):
    tied, dora = changes.pop("tied", False), changes.pop("dora", False)
    plan = plan_of(**changes)
    if dora:
        assert plan.adapter is not None
        plan = plan.with_(adapter=dataclasses.replace(plan.adapter, dora=True))
    built = build(tiny.config_of("llama", tie_word_embeddings=tied), plan, "meta")
    with pytest.raises(UserError) as caught:
        open_stage(built, plan, Single())
    assert caught.value.what == "this job cannot be cut into stages (--parallel pp)" and why in caught.value.why
