"""What GPUs measured against what the constants that ship predict: `benchmarks/results/*.json` they were fitted on."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from fitune.speed import constants
from fitune.speed.fit import Point, points_of, predicted

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def points() -> list[Point]:
    """Records of the files that the constants were fitted on: newer ones ask for a new fit, not for a failure."""
    pairs = [
        (file.name, record)
        for file in sorted(RESULTS.glob("*.json"))
        if file.name in constants.FITTED_ON
        for record in json.loads(file.read_text(encoding="utf-8"))
    ]
    return points_of(pairs)[0]


ALL = points()
pytestmark = pytest.mark.skipif(not ALL, reason="the records that the constants were fitted on are not here")


def test_nine_of_ten_records_lie_in_the_interval():
    inside = [p.name for p in ALL if (t := predicted(p, constants.FITTED)).low_s <= p.measured_s <= t.high_s]
    assert len(inside) >= 0.9 * len(ALL), sorted({p.name for p in ALL} - set(inside))


def test_records_bound_by_the_device_are_close():
    """Where the device is the limit the host does not matter: half within 5 %, all within 15 %."""
    errors = {
        p.name: abs(predicted(p, constants.FITTED).step_s / p.measured_s - 1)
        for p in ALL
        if predicted(p, constants.FITTED).parts["host"] < 0.05 * p.measured_s and p.work.micro_batch_tokens >= 4096
    }
    assert errors, "no record is bound by the device"
    assert statistics.median(errors.values()) <= 0.05 and max(errors.values()) <= 0.15, errors


def test_a_wrong_constant_would_be_seen():
    """The test of the test: products at half their rate put the large records outside."""
    import dataclasses

    wrong = dataclasses.replace(constants.FITTED, gemm_share=constants.FITTED.gemm_share / 2)
    large = [p for p in ALL if p.work.flops > 2e14]
    assert large
    outside = [p for p in large if predicted(p, wrong).low_s > p.measured_s]
    assert len(outside) >= 0.5 * len(large)
