"""What the driver counted on GPUs, predicted again by this version: context, workspaces and the allocator together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fitune import plan as plans
from fitune import recipe as recipes
from fitune.memory import phases
from fitune.memory.accuracy import CARD_ERROR, interval
from fitune.memory.constants import overheads
from fitune.memory.host import Facts
from fitune.memory.known import tracer_for
from fitune.model.source import resolve
from tests.memory.engine_then import engine_of
from tests.memory.test_records import ALL, sample

PHASES = ("first_step", "step", "eval")
MATRIX = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200-matrix-2026-11-30.json"


def predicted(record: dict) -> tuple[phases.Prediction, phases.Overheads]:
    plan, recipe = plans.from_dict(record["plan"]), recipes.build(record["recipe"])
    config = resolve(recipe.model, weights=False).config
    tracer = tracer_for(config, plan)
    facts = Facts(
        num_parameters=1, num_trained=1, state_bytes=1, vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        largest_values=1, largest_linear_values=1,
        stored_width=2, download_bytes=0, data_tokens=None, keep_checkpoints=1, platform="linux",
        makes_weights=recipe.model.startswith("random:"),
    )  # fmt: skip
    major, _, minor = record["gpu"]["compute_capability"].partition(".")
    extra = overheads("cuda", (int(major), int(minor)))
    terms = tracer.terms(plan.micro_batch, plan.seq_len, plan.loss_chunk)
    return phases.predict(terms, plan, extra, facts, tracer, plan.seq_len), extra


@pytest.mark.skipif(not ALL, reason="no measured records in benchmarks/results")
@pytest.mark.parametrize("record", sample(ALL), ids=lambda record: record["name"])
def test_what_the_driver_counted_lies_in_the_interval(record):
    with engine_of(record):
        made, extra = predicted(record)
    for name in PHASES:
        found = record["measured"]["phases"].get(name)
        if not found or not found.get("device_bytes"):
            continue
        phase = made.phase(name)
        error = found["device_bytes"] / phase.device_bytes - 1
        assert CARD_ERROR[0] <= error <= CARD_ERROR[1], f"{name}: {error:+.2%}"
        bounds = interval(phase, extra)
        assert bounds.low_bytes <= found["device_bytes"] <= bounds.high_bytes, name


def test_what_was_predicted_before_the_runs_lies_within_the_error():
    """Of runs without a cap: their predictions as they stand in the records."""
    records = [r for r in json.loads(MATRIX.read_text(encoding="utf-8")) if not r["cap_bytes"]]
    assert len(records) >= 120
    for record in records:
        for name in PHASES:
            was, said = (record[side]["phases"][name]["device_bytes"] for side in ("measured", "predicted"))
            assert CARD_ERROR[0] <= was / said - 1 <= CARD_ERROR[1], f"{record['name']}, {name}: {was / said - 1:+.2%}"
