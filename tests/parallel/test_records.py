"""What was measured of ways to share a job against what was predicted for one rank: `benchmarks/results/multi_gpu`."""

from __future__ import annotations

import json

import pytest

from tests.conftest import ROOT

FILE = ROOT / "benchmarks" / "results" / "multi_gpu" / "records.json"
RECORDS = json.loads(FILE.read_text()) if FILE.exists() else []
MEASURED = [record for record in RECORDS if "measured" in record and "cap_bytes" in record]


@pytest.mark.skipif(not MEASURED, reason="no records of several GPUs yet")
def test_predicted_peaks_are_near():
    errors = {
        record["name"]: record["predicted"]["phases"]["step"]["peak_allocated_bytes"]
        / record["measured"]["phases"]["step"]["peak_allocated_bytes"] - 1
        for record in MEASURED
    }  # fmt: skip
    assert all(abs(error) <= 0.03 for error in errors.values()), errors


ALONE = {r["name"]: r for path in FILE.parent.glob("alone-*.json") for r in json.loads(path.read_text())}


@pytest.mark.parametrize("name", [name for name, record in ALONE.items() if record["against"]])
def test_one_process_in_a_group_is_as_fast_as_the_plain_way(name):
    record = ALONE[name]
    measured, plain = record["measured"], ALONE[record["against"]]["measured"]
    assert record["host"] == ALONE[record["against"]]["host"] and len(measured["seconds"]) >= 8
    assert measured["tokens_per_s"] >= 0.98 * plain["tokens_per_s"]
    step = measured["phases"]["step"]["peak_allocated_bytes"]
    assert record["predicted"]["phases"]["step"]["peak_allocated_bytes"] == pytest.approx(step, rel=1e-3)
