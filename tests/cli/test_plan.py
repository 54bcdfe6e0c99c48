"""The real `fitune plan`, for cards nobody here has, with no network and no weights."""

from __future__ import annotations

import json

from fitune import plan as plans
from fitune.units import GIB

# Whoever asks the network gets a refused connection at once, not an answer.
NO_NETWORK = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}


def test_plan_for_a_card_one_does_not_have(fitune_command):
    done = fitune_command("plan", "meta-llama/Llama-3.1-8B", "--gpu", "rtx3080", "--json", **NO_NETWORK)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["fits"] is True
    plan = plans.from_dict(result["plan"])
    assert (plan.model, plan.base_format, plan.adapter.r) == ("meta-llama/Llama-3.1-8B", "nf4", 16)
    assert 9 * GIB < plan.budget_bytes < 10 * GIB
    assert 4 * GIB < result["predicted"]["peak_allocated_bytes"] < plan.budget_bytes
    phases = result["predicted"]["phases"]
    assert phases["load"]["peak_allocated_bytes"] < phases["step"]["peak_allocated_bytes"]
    (base,) = [reason for reason in result["reasons"] if reason["decision"] == "base format"]
    assert base["exact"] is False and base["why"]


def test_plan_that_does_not_fit(fitune_command):
    arguments = ("plan", "Qwen/Qwen3-0.6B", "--gpu", "rtx3080", "--vram", "0.5")
    done = fitune_command(*arguments, **NO_NETWORK)
    assert done.returncode == 3, done.stderr
    assert "does not fit on GeForce RTX 3080" in done.stdout
    assert "Would fit: " in done.stdout
