"""Fitting finds the constants that made the times, and what it writes is read back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fitune.speed import constants
from fitune.speed.fit import Point, block, fit, points_of, predicted
from fitune.speed.work import step_work
from tests.speed.case import LLAMA, decoder, plan

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def made_points(true: constants.Fitted) -> list[Point]:
    """What a card with these constants would measure: one quick host, one slow one."""
    plans = [plan(b, base_format=f, recompute_layers=n) for b in (1, 4) for f in ("nf4", "bf16") for n in (0, 32)]
    points = []
    for host, factor in (("quick", 0.8), ("slow", 1.25)):
        for asked in plans:
            point = Point(f"{host}-{len(points)}", host, "NVIDIA H200", step_work(asked, decoder()), 1.0)
            points.append(replace(point, measured_s=predicted(point, true, factor).step_s))
    return points


def test_a_fit_explains_times_that_the_model_made():
    true = replace(constants.PRIOR, gemm_share=0.55, memory_share=0.6, host_call_s=1.6e-4)
    points = made_points(true)
    found = fit(points)
    errors = [abs(predicted(p, found.fitted, found.hosts[p.host]).step_s / p.measured_s - 1) for p in points]
    assert max(errors) < 0.06
    assert found.fitted.gemm_share == pytest.approx(0.55, rel=0.08)
    assert found.hosts["slow"] / found.hosts["quick"] > 1.3
    assert found.fitted.host_low < 0.8 < 1.25 < found.fitted.host_high


def test_without_records_there_is_nothing_to_fit():
    with pytest.raises(ValueError, match="no record"):
        fit([])


def test_records_become_points_and_others_are_named():
    record = {
        "name": "a", "model": f"random:{LLAMA}", "plan": plan().as_dict(), "gpu": {"name": "NVIDIA H200"},
        "measured": {"step_s": 0.9},
    }  # fmt: skip
    foreign = record | {"name": "b", "model": "random:no/such-model"}
    empty = {"name": "overheads"}
    points, skipped = points_of([("x.json", r) for r in (record, foreign, empty, record | {"host": "h1"})])
    assert [(p.name, p.host, p.measured_s) for p in points] == [("a", "h1", 0.9)]
    assert skipped == ["b: random:no/such-model is not in the catalog"]


def test_the_written_block_is_read_back(tmp_path):
    found = fit(made_points(constants.PRIOR)[::4], rounds=2)
    names = {"Fitted": constants.Fitted}
    exec(block(found, 'records "of" a test ' * 12), names)
    written = names["FITTED"]
    for field in ("gemm_share", "host_call_s", "kernel_s", "device_error"):
        assert getattr(written, field) == pytest.approx(getattr(found.fitted, field), rel=1e-3)
    assert names["FITTED_ON"] == ('records "of" a test ' * 12).strip()


def test_the_script_shows_every_record(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import fit_speed

    source = Path(constants.__file__).read_text()
    files = sorted(RESULTS.glob("h200-2026-11-30.json"))
    fit_speed.main([str(f) for f in files])
    shown = capsys.readouterr().out
    for record in json.loads(files[0].read_text()):
        if record.get("measured", {}).get("step_s"):
            assert re.search(rf"^(left out: )?{re.escape(record['name'])}[ :]", shown, re.MULTILINE)
    assert "inside the interval" in shown
    assert Path(constants.__file__).read_text() == source


def test_storing_replaces_the_block_only(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import fit_speed

    copy = tmp_path / "constants.py"
    copy.write_text("a = 1\n# fitted: begin\nold\n# fitted: end\nb = 2\n")
    monkeypatch.setattr(fit_speed, "CONSTANTS", copy)
    fit_speed.store("new = 3")
    assert copy.read_text() == "a = 1\n# fitted: begin\nnew = 3\n# fitted: end\nb = 2\n"


def test_the_page_has_the_constants_that_ship(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import fit_speed

    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert fit_speed.page_tables() in page, "run: python scripts/fit_speed.py --page"
