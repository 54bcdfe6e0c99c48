"""How many processes `fitune train` starts by itself: as many as `fitune plan` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fitune import hardware
from fitune.cli import api, launch
from fitune.units import GIB
from tests.planner import case

QUICK: dict[str, Any] = dict(method="full", batch=2, seq_len=32)  # little to compute, many gradients to exchange


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [case.card(index=i, name="GeForce RTX 3090") for i in range(2)]
    machine = case.machine(*cards, ram_bytes=64 * GIB)
    monkeypatch.setattr(hardware, "probe", lambda: machine)


def test_all_gpus_where_that_is_faster(two_cards: None):
    assert launch.wanted("llama-3.1-8b", None, {}) == 2


def test_one_gpu_where_more_would_not_be_faster(two_cards: None):
    assert api.plan("smollm2", **QUICK)["plan"]["parallel"] == "none"
    assert launch.wanted("smollm2", None, QUICK) == 1
    for asked in (dict(nproc=2), dict(parallel="ddp")):
        assert launch.wanted("smollm2", None, QUICK | asked) == 2, "what was asked for is not changed"


def test_a_run_goes_on_with_the_processes_that_it_has(two_cards: None, tmp_path: Path):
    planned = api.planned("smollm2", QUICK | dict(parallel="ddp"))
    (tmp_path / "recipe.yaml").write_text("model: smollm2\nmethod: full\nbatch: 2\nseq_len: 32\n")
    for size in (2, 1):
        (tmp_path / "plan.json").write_text(planned[2].plan.with_(world_size=size).to_json())
        assert launch.wanted(None, tmp_path, {}) == size
