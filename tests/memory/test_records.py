"""What GPUs measured, predicted again by this version: `benchmarks/results/*.json`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fitune import plan as plans
from fitune import recipe as recipes
from fitune.memory.constants import overheads
from fitune.memory.replay import peaks
from fitune.memory.trace import Tracer
from fitune.model.source import resolve
from fitune.planner.result import predicted_dict

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
PHASES = ("first_step", "step", "eval")
TOLERANCE = 0.005  # of allocated bytes, per phase
SAMPLE = 5  # cases of the usual run; FITUNE_ALL_RECORDS=1 takes every one


def records() -> list[dict]:
    """Every record with a prediction and a measurement, the newest of a name."""
    found: dict[str, dict] = {}
    for path in sorted(RESULTS.glob("*.json")):
        for record in json.loads(path.read_text(encoding="utf-8")):
            if "predicted" in record and record.get("measured", {}).get("phases"):
                if record["name"] not in found or record["date"] >= found[record["name"]]["date"]:
                    found[record["name"]] = record
    return list(found.values())


def sample(found: list[dict]) -> list[dict]:
    """A few that are cheap to trace and differ most: one per model, base format and method first."""
    if os.environ.get("FITUNE_ALL_RECORDS"):
        return found
    first: dict[tuple, dict] = {}
    for record in sorted(found, key=lambda r: r["plan"]["seq_len"] * r["plan"]["micro_batch"]):
        first.setdefault((record["plan"]["method"], record["plan"]["base_format"]), record)
    return list(first.values())[:SAMPLE]


def predict(record: dict) -> dict:
    """The `predicted` object for the recorded plan, as the planner of this version makes it."""
    plan = plans.from_dict(record["plan"])
    recipe = recipes.build(record["recipe"])
    config = resolve(recipe.model, weights=False).config
    terms = Tracer(config, plan).terms(plan.micro_batch, plan.seq_len, plan.loss_chunk)
    reached = peaks(terms, plan.recompute_layers, accumulates=plan.micro_batch < plan.batch)
    major, _, minor = record["gpu"]["compute_capability"].partition(".")
    return predicted_dict(reached, overheads("cuda", (int(major), int(minor))).workspace_bytes)


ALL = records()


@pytest.mark.skipif(not ALL, reason="no measured records in benchmarks/results")
@pytest.mark.parametrize("record", sample(ALL), ids=lambda record: record["name"])
def test_predicted_is_what_was_measured(record):
    predicted = predict(record)
    for phase in PHASES:
        if phase not in record["measured"]["phases"]:
            continue
        measured = record["measured"]["phases"][phase]["peak_allocated_bytes"]
        error = predicted["phases"][phase]["peak_allocated_bytes"] / measured - 1
        assert abs(error) <= TOLERANCE, f"{phase}: {error:+.2%} of {measured / 2**30:.3f} GiB"


@pytest.mark.skipif(not ALL, reason="no measured records in benchmarks/results")
def test_records_hold_what_the_contract_asks():
    for record in ALL:
        assert set(record) >= {"name", "model", "job", "recipe", "plan", "gpu", "cap_bytes", "versions", "date"}
        assert set(record["job"]) >= {"batch", "micro_batch", "seq_len", "lora_r", "lora_targets", "num_layers"}
        assert set(record["measured"]) >= {
            "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes", "step_s", "tokens_per_s",
            "phases",
        }  # fmt: skip
        if record["cap_bytes"] is not None:
            assert record["measured"]["device_bytes"] <= record["cap_bytes"]
