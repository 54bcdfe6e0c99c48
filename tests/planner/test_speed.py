"""Planning a catalog model is quick, cold and on any machine: it imports neither torch nor transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fitune.engine.optimizers import NEEDS_CUDA, require_device
from fitune.errors import UserError
from fitune.planner.choose import _check_optimizer
from fitune.recipe import Recipe
from tests.house.source import ROOT

LIMITS_S = {
    "8B": 3.0, "70B": 5.0, "30B MoE": 5.0, "70B, does not fit": 5.0, "8B, 200,000 tokens": 5.0,
}  # fmt: skip
"""Of processor time on a quiet machine."""
BESIDE_OTHERS = 1.4  # tests run beside each other, and share caches and a core's arithmetic
JOBS = {
    "8B": ("meta-llama/Llama-3.1-8B", "--gpu", "rtx3080"),
    "70B": ("meta-llama/Llama-3.1-70B", "--gpu", "a100-80gb"),
    "30B MoE": ("Qwen/Qwen3-30B-A3B", "--gpu", "rtx4090"),
    "70B, does not fit": ("meta-llama/Llama-3.1-70B", "--gpu", "rtx3080"),
    "8B, 200,000 tokens": ("meta-llama/Llama-3.1-8B", "--gpu", "rtx3090", "--seq-len", "200000"),
}
PROGRAM = """
import json, sys
from fitune.cli.main import main
code = main(["plan", *sys.argv[1:], "--json"])
print(json.dumps([code, sorted({"torch", "transformers", "numpy", "rich"} & set(sys.modules))]), file=sys.stderr)
"""


def run(program, *arguments, cache):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FITUNE_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("job", JOBS)
def test_planning_a_catalog_model_imports_no_library(job, tmp_path):
    done = run(PROGRAM, *JOBS[job], cache=tmp_path)
    code, imported = json.loads(done.stderr.splitlines()[-1])
    result = json.loads(done.stdout)
    assert imported == [] and code == (0 if result["fits"] else 3)
    assert list(tmp_path.iterdir()) == [], "nothing had to be traced"


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="no processor time of a child process here")
@pytest.mark.parametrize("job", JOBS)
def test_a_cold_plan_takes_at_most_seconds(job, tmp_path):
    """In processor time, which other programs on the machine do not lengthen: planning is one thread and waits for
    nothing."""
    before = os.times()
    run(PROGRAM, *JOBS[job], cache=tmp_path)
    after = os.times()
    taken = after.children_user + after.children_system - before.children_user - before.children_system
    assert 0 < taken < LIMITS_S[job] * BESIDE_OTHERS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_optimizers_are_refused_as_the_engine_refuses_them(device):
    for name in Recipe.model_fields["optimizer"].annotation.__args__:
        refused = []
        for check in (_check_optimizer, require_device):
            try:
                check(name, device)
                refused.append(None)
            except UserError as error:
                refused.append(str(error))
        assert refused[0] == refused[1]
        assert (refused[0] is not None) == (name in NEEDS_CUDA and device == "cpu")


def test_what_does_not_ship_is_traced_once(tmp_path):
    """Adapters on two kinds of layers only: the second time nothing is imported."""
    job = ("smollm2", "--gpu", "rtx3090", "--method", "lora", "--lora-targets", "q_proj,v_proj", "--optimizer")
    first, again = (run(PROGRAM, *job, optimizer, cache=tmp_path) for optimizer in ("adamw", "lion"))
    imported = [json.loads(done.stderr.splitlines()[-1])[1] for done in (first, again)]
    assert "torch" in imported[0] and imported[1] == []
    assert len(list((tmp_path / "traces").iterdir())) == 1
    results = [json.loads(done.stdout) for done in (first, again)]
    assert results[0]["plan"]["adapter"]["targets"] == ["q_proj", "v_proj"]
    peaks = [result["predicted"]["phases"]["save"]["peak_allocated_bytes"] for result in results]
    assert peaks[1] < peaks[0], "half of the state"
