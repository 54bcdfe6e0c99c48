"""Slices of rows against one process: the same training, each rank with 1/N of every row's tokens."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fitune import recipe as recipes
from fitune.engine.engine import Engine
from fitune.errors import UserError
from fitune.memory.dry import Rows
from fitune.memory.ranks import trace_rank
from fitune.model.build import build
from fitune.parallel.context import ContextEngine, check_context, slices_of
from fitune.parallel.group import Group
from fitune.parallel.launch import num_processes
from fitune.parallel.shared import close_shared, open_shared
from fitune.plan import Plan
from fitune.train import ranks
from tests import tiny
from tests.parallel.jobs import assert_same, batches_of, make_built, on_one, plan_of, records, step_given_up, train
from tests.parallel.ranks import run_ranks
from tests.parallel.runs import assert_same_run, losses
from tests.parallel.runs import train as train_run
from tests.parallel.test_agreement import fail_on
from tests.parallel.test_shared import STREAMED
from tests.train.tiny_run import of_kind


def sliced(group: Group, plan: Plan, architecture: str) -> Any:
    built = make_built(plan, architecture, before_fill=lambda made: open_shared(made, plan, group))
    close_shared(built, group)
    engine = ContextEngine(built, plan, group)
    result = train(engine)
    return result, engine.evaluate(batches_of(records(3, seed=99), plan))


@pytest.mark.parametrize(
    ("size", "architecture", "changes"),
    [
        (2, "llama", dict(packing=True, recompute_layers=2)),
        (4, "llama", dict(method="full", adapter=None)),  # two key heads for four ranks
        (2, "gpt_oss", dict(micro_batch=1)),  # windows and sinks
        (3, "gemma2", dict(accumulation_order="layer-major")),  # three ranks share out no number of heads; soft-capping
        (2, "llama", STREAMED | dict(recompute_layers=4)),
    ],
)
def test_as_one_process(size: int, architecture: str, changes: dict[str, Any]):
    plan = plan_of(**changes)
    alone = on_one(plan, architecture)
    results = run_ranks(size, sliced, plan_of(**changes | dict(parallel="cp", world_size=size)), architecture)
    for result, _ in results:
        assert_same(result, alone)
    engine = Engine(make_built(plan, architecture), plan)
    train(engine)
    expected = engine.evaluate(batches_of(records(3, seed=99), plan))
    loss, count = (sum(part) for part in zip(*(told for _, told in results), strict=True))
    assert count == expected[1] and loss == pytest.approx(expected[0], rel=1e-4)


def test_rows_are_cut_after_targets_were_shifted():
    (host,) = batches_of(records(5), plan_of(micro_batch=8, packing=True, seq_len=64))
    cut = [slices_of(host, rank, 3) for rank in range(3)]
    width = host.input_ids.shape[1]
    for name, padding in (("input_ids", 0), ("targets", -100), ("position_ids", 0), ("record_ids", -1)):
        whole = np.concatenate([getattr(part, name) for part in cut], axis=1)
        assert (whole[:, :width] == getattr(host, name)).all() and (whole[:, width:] == padding).all()
    assert len({part.input_ids.shape for part in cut}) == 1
    assert all(sum(row) == 3 * cut[0].input_ids.shape[1] for row in cut[0].doc_lengths), "padding is a document"


# ---- failures --------------------------------------------------------------------------------------------------------


def given_up(group: Group, plan: Plan, failing: int, part: str, at: int) -> str:
    """A step that one rank gives up at a part of it, as `fitune.train` has it; how it ended here."""
    engine = ContextEngine(make_built(plan), plan, group)
    return step_given_up(engine, group, plan, lambda name, index: group.rank == failing and (name, index) == (part, at))


@pytest.mark.parametrize(("failing", "part", "at"), [(0, "embed", 0), (1, "forward", 2), (0, "tail", 0),
                                                     (1, "backward", 0)])  # fmt: skip
def test_one_rank_gives_a_step_up_and_nobody_waits_for_it(failing: int, part: str, at: int):
    results = run_ranks(2, given_up, plan_of(parallel="cp", world_size=2), failing, part, at, timeout_s=100)
    assert results[failing] == "gave up" and results[1 - failing] == "told"


@pytest.mark.parametrize(("failing", "at_call"), [(1, 1), (0, 12)])  # in an evaluation, in a step
def test_all_change_together(job: Any, alone: Path, tmp_path: Path, failing: int, at_call: int):
    settings = job(tmp_path / "run", parallel="cp")
    results = train_run(2, settings, prepare=functools.partial(fail_on, failing, "run_layer", at_call))
    assert [r[:2] for r in results] == [("done", 0)] * 2
    (told,) = of_kind(tmp_path / "run", "replan")
    assert told["where"] == "device" and told["phase"] == ("eval" if at_call == 1 else "step")
    assert_same_run(tmp_path / "run", alone)


# ---- runs, plans, memory ---------------------------------------------------------------------------------------------


def test_a_run_in_slices_goes_on_without_them(job: Any, alone: Path, tmp_path: Path):
    run = tmp_path / "run"
    train_run(2, job(run, parallel="cp", steps=2))
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("steps: 2", "steps: 6"))
    lines = (run / "events.jsonl").read_text().splitlines(True)
    (run / "events.jsonl").write_text("".join(line for line in lines if '"end"' not in line))
    assert train_run(1, job(run), resume=str(run))[0][0] == "done"
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)


def test_one_long_record_on_several_gpus():
    recipe = recipes.build(dict(model="smollm2", data="demo", batch=1, parallel="cp"))
    assert num_processes(recipe, num_gpus=4) == 4
    ranks.check(recipe, 4)


def test_activations_are_shared_out():
    def peaks(size: int) -> Any:
        plan = plan_of(world_size=size, parallel="cp" if size > 1 else "none", micro_batch=1, device="cuda",
                       precision="bf16", base_format="bf16", attention="flash", loss_chunk=64, num_layers=4,
                       recompute_layers=0)  # fmt: skip
        config = tiny.config_of("llama", hidden_size=256, intermediate_size=704, num_hidden_layers=4,
                                num_attention_heads=8, num_key_value_heads=4)  # fmt: skip
        return trace_rank(config, plan, [Rows(1, 4096)])

    one, two, four = map(peaks, (1, 2, 4))
    assert one.held == two.held == four.held, "weights are as in data parallel"
    used = [p.step - p.held - p.state for p in (one, two, four)]
    assert used[1] / used[0] == pytest.approx(1 / 2, abs=0.1) and used[2] / used[0] == pytest.approx(1 / 4, abs=0.1)


LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[2.0] * 8, factor=4.0)


@pytest.mark.parametrize(
    ("architecture", "changes", "plan", "why"),
    [
        ("llama", {}, dict(attention="native"), "its attention is code of its own"),
        ("llama", dict(rope_parameters=LONGROPE), {}, "depend on the length of the row"),
        ("llama4", {}, {}, "its attention counts tokens by itself"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    architecture: str, changes: dict[str, Any], plan: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(tiny.ARCHITECTURES, "llama4", ("Llama4TextConfig", dict(head_dim=16, num_local_experts=4)))
    built = build(tiny.config_of(architecture, **changes), plan_of(), "meta")
    with pytest.raises(UserError) as caught:
        check_context(built, plan_of(**plan))
    name = type(built.model).__name__
    assert caught.value.what == f"rows of {name} cannot be cut into slices (--parallel cp)"
    assert why in caught.value.why
