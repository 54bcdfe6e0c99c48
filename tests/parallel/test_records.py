"""What several GPUs measured against what was predicted for one rank: `benchmarks/results/multi_gpu/records.json`."""

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
