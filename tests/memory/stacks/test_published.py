"""Predictions against peaks that others measured and published."""

from __future__ import annotations

import csv
import importlib.util
import sys
import time
from pathlib import Path
from statistics import mean

import pytest

from fitune.memory.stacks import predict
from fitune.memory.stacks.rows import settings_of, stack_of
from fitune.units import GIB
from tests.memory.stacks.runs import PUBLISHED, Published

ROOT = Path(__file__).resolve().parents[3]
ROWS = ROOT / ".." / "shared" / "measured_elsewhere" / "rows.csv"
needs_rows = pytest.mark.skipif(not ROWS.exists(), reason="the table of published runs is not here")


@pytest.mark.parametrize("run", PUBLISHED, ids=[f"{run.stack}: {run.name}" for run in PUBLISHED])
def test_published_peak(run: Published):
    predicted = predict(run.settings, run.stack)
    assert predicted.peak_bytes / GIB == pytest.approx(run.gib, rel=0.055), run.source
    assert predicted.low_bytes <= run.gib * GIB <= predicted.high_bytes


def test_published_peaks_on_average():
    """A term that is off everywhere by a little would pass the single bounds."""
    errors = [predict(run.settings, run.stack).peak_bytes / GIB / run.gib - 1 for run in PUBLISHED]
    assert len(errors) >= 15
    assert mean(map(abs, errors)) < 0.013
    assert min(errors) > -0.055


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("other_stacks", ROOT / "benchmarks" / "other_stacks.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["other_stacks"] = module
    spec.loader.exec_module(module)
    return module


@needs_rows
def test_single_gpu_rows(benchmark):
    """The gate: groups of source and model, 16-bit and NF4 bases, one GPU."""
    rows = [row for row in benchmark.score(ROWS) if row.section == "one GPU"]
    groups = benchmark.by_group(rows)
    assert len(rows) >= 128 and len(groups) >= 23
    assert mean(mae for mae, _ in groups.values()) < 0.015
    assert min(bias for _, bias in groups.values()) > -0.06


@needs_rows
def test_every_complete_row_can_be_described(benchmark):
    with ROWS.open(encoding="utf-8") as handle:
        complete = [row for row in csv.DictReader(handle) if row["completeness"] == "A"]
    scored = {row.identity for row in benchmark.score(ROWS) if row.section != "incomplete"}
    assert scored == {row["id"] for row in complete}


@needs_rows
def test_intervals_hold_the_rows():
    """The interval is the scatter of complete one-GPU rows, so each of them lies in it."""
    with ROWS.open(encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
            if row["completeness"] == "A" and row["n_gpus"] == "1" and "gptq" not in row["base_dtype"]:
                predicted = predict(settings_of(row), stack_of(row))
                assert predicted.low_bytes <= float(row["peak_gib"]) * GIB <= predicted.high_bytes, row["id"]


@needs_rows
def test_table_of_the_page_is_current(benchmark):
    page = (ROOT / "docs" / "stacks.md").read_text(encoding="utf-8")
    assert benchmark.table(benchmark.score(ROWS)) in page


def test_prediction_is_fast():
    """The best of ten, since machines are shared."""
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        predict(PUBLISHED[0].settings, "trl")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05
