"""RAM of real runs on the CPU, predicted again by this version: `benchmarks/results/host-cpu-*.json`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fitune import plan as plans
from fitune.memory import host, phases
from fitune.memory.accuracy import RAM_ERROR
from fitune.memory.constants import overheads
from fitune.memory.known import tracer_for
from fitune.planner import facts
from fitune.planner.context import PlanContext
from fitune.planner.target import choose_target
from tests import tiny
from tests.planner import case

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
RECORDS = [record for path in sorted(RESULTS.glob("host-cpu-*.json")) for record in json.loads(path.read_text())]
USUAL = ("tiny lora fp32", "small lora bf16", "small full bf16")
STEPPING = ("first_step", "step", "eval", "save")


def sample() -> list[dict]:
    return [r for r in RECORDS if os.environ.get("FITUNE_ALL_RECORDS") or r["name"] in USUAL]


def predicted(record: dict) -> tuple[phases.Prediction, host.Facts]:
    """The recorded plan on this version, for the platform that was measured."""
    plan = plans.from_dict(record["plan"] | {"predicted": {}, "reasons": []})
    config = _config(record["model"])
    recipe = case.recipe(**(record["job"] | record["recipe"] | {"model": plan.model, "devices": "cpu"}))
    context = PlanContext(recipe, choose_target(recipe, case.machine()), config, plan.seq_len)
    tracer = tracer_for(config, plan)
    terms = tracer.terms(plan.micro_batch, plan.seq_len, plan.loss_chunk)
    known = facts.of(context, plan, terms, plan.seq_len)
    return phases.predict(terms, plan, overheads("cpu", None), known, tracer), known


def _config(values: dict):
    from transformers import AutoConfig

    kept = {k: v for k, v in values.items() if k not in ("model_type", "architectures")}
    return AutoConfig.for_model(values["model_type"], **kept)


@pytest.mark.skipif(not RECORDS, reason="no measured records in benchmarks/results")
@pytest.mark.parametrize("record", sample(), ids=lambda record: record["name"].replace(" ", "-"))
def test_measured_ram_lies_in_the_interval(record, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    made, known = predicted(record)
    measured = {name: values["host_bytes"] for name, values in record["measured"]["phases"].items()}
    most = max(measured[name] for name in STEPPING)
    needed = max(sum(made.phase(name).host.values()) for name in STEPPING)
    assert RAM_ERROR[0] <= most / needed - 1 <= RAM_ERROR[1], f"{most / needed - 1:+.1%}"
    load = sum(made.phase("load").host.values())
    assert abs(measured["load"] / load - 1) < 0.3
    if "merge" in measured:
        merge = sum(made.phase("merge").host.values())
        assert abs(measured["merge"] / merge - 1) < 0.1
        assert record["measured"]["merged_bytes"] == pytest.approx(2 * known.num_parameters, rel=0.1, abs=8 * 2**20)
    assert record["measured"]["checkpoint_bytes"] == pytest.approx(known.checkpoint_bytes, rel=0.02, abs=65536)


def test_a_platform_that_was_not_measured_has_no_figure():
    from tests.memory.test_phases import FACTS

    plan = tiny.make_plan(device="cpu")
    from dataclasses import replace

    elsewhere = replace(FACTS, platform="win32")
    assert host.ram("step", plan, elsewhere, {"weights": 1}) is None
    assert "not measured on win32" in host.notes(plan, elsewhere)[0]
    assert host.ram("step", plan, FACTS, {"weights": 1}) is not None
