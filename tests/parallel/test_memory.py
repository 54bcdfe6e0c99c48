"""What one rank holds and needs, traced with the step that runs, against formulas and against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fitune import recipe as recipes
from fitune.memory.dry import Rows
from fitune.memory.ranks import Imagined, RankPeaks, trace_rank
from fitune.train import session as sessions
from fitune.train.ranks import plan_for
from tests import tiny
from tests.parallel.jobs import plan_of
from tests.parallel.test_sharded import SHARDED


def traced(size: int, **changes: Any) -> RankPeaks:
    plan = plan_of(world_size=size, micro_batch=1, loss_chunk=8, device="cuda", precision="bf16", base_format="bf16",
                   attention="flash", **changes)  # fmt: skip
    config = tiny.config_of("llama", hidden_size=256, intermediate_size=704, num_hidden_layers=8, vocab_size=512)
    return trace_rank(config, plan.with_(num_layers=8, recompute_layers=8), [Rows(1, 16)])


def test_what_one_cannot_hold_four_can(job: Any, tmp_path: Path):
    """Full fine-tuning under a cap that one process does not keep; the ranks share the machine's RAM."""
    settings = job(tmp_path / "run", method="full", micro_batch=1, recompute="all", lora_dropout=0.0)
    whole = sessions.plan_session(sessions.open_session(recipes.build(settings)))
    cap = whole.predicted["peak_allocated_bytes"] / 1024**3
    found = {}
    for way in ("ddp", "fsdp2"):
        session = sessions.open_session(recipes.build(settings | dict(ram=4 * cap, parallel=way)))
        found[way] = plan_for(session, Imagined(4))
    assert not found["ddp"].fits and found["fsdp2"].fits


@pytest.mark.parametrize("method", ["lora", "full"])
def test_more_ranks_hold_less_each(method: str):
    changes = dict(method=method) | (dict(adapter=None) if method == "full" else {})
    whole = traced(1, **changes)
    parts = [traced(size, **SHARDED, **changes) for size in (2, 4, 8)]
    assert parts[0].step > parts[1].step > parts[2].step
    assert parts[0].state > parts[1].state > parts[2].state
    replicated = traced(2, parallel="ddp", **changes)
    assert replicated.held == whole.held and replicated.state == whole.state
    assert replicated.step >= whole.step
