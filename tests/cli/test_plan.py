"""The real `fitune plan`, for cards nobody here has, with no network and no weights."""

from __future__ import annotations

import json

import pytest

from fitune import plan as plans
from fitune.cli.main import main
from fitune.units import GIB, format_bytes

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


def test_cards_that_are_not_alike(capsys):
    """Each card's share, peak and time, in the plan and on the terminal in both languages."""
    arguments = ["plan", "smollm2", "--gpu", "rtx4090,rtx3060", "--parallel", "ddp", "--batch", "16"]
    assert main([*arguments, "--json", "--explain"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["explain"], "on the one with the least memory"
    fast, slow = result["plan"]["shares"]
    assert fast["card"] == "GeForce RTX 4090" and slow["card"] == "GeForce RTX 3060 12GB"
    assert fast["records"] + slow["records"] == 16 and fast["records"] > 3 * slow["records"]
    assert result["predicted"]["step_s"] == max(fast["step_s"], slow["step_s"])
    assert plans.from_dict(result["plan"]).shares[1].records == slow["records"]
    shares = f"{fast['records']} + {slow['records']}"
    room = format_bytes(slow["needed_bytes"]), format_bytes(slow["budget_bytes"])
    for lang, title, batch in (
        ("en", "GPU share micro-batch recomputed needs / budget a step", f"batch 16 as {shares},"),
        ("zh", "显卡 份额 微批 重算层数 需要 / 预算 每步", f"批大小 16（{shares}），"),
    ):
        assert main([*arguments, "--lang", lang]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert title in shown and batch in shown
        assert f"1 GeForce RTX 3060 12GB {slow['records']} / 16 {slow['micro_batch']} 0 {' / '.join(room)} " in shown
        assert "on each" not in shown
    assert f"16 条记录分为 {shares}" in shown and "各块大约同时完成" in shown


BAD: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "batch 0": (["--batch", "0"], ("cannot use batch = '0'", "greater than or equal to 1", "give another value")),
    "seq_len 0": (["--seq-len", "0"], ("cannot use seq_len = '0'", "greater than or equal to 8")),
    "unknown card": (["--gpu", "rtx9999"], ("unknown GPU 'rtx9999'", "nearest names", "GeForce RTX 4090")),
    "no card at all": (["--gpu", "rtx3090:0"], ("cannot read the GPU count", "at least 1", "rtx3090:2")),
    "negative budget": (["--vram", "-4"], ("cannot use vram = '-4'", "'-4' is not a size", "10GiB")),
    "budget 0": (["--vram", "0"], ("cannot use vram = '0'", "not a positive size")),
    "negative RAM": (["--ram", "-1"], ("cannot use ram = '-1'",)),
    "full and nf4": (["--method", "full", "--base-format", "nf4"],
                     ("settings that contradict each other", "trains every weight",
                      "fix: use method qlora, or base_format auto")),
    "micro-batch above the batch": (["--micro-batch", "9"],
                                    ("micro_batch 9 is larger than batch 8", "fix: make it smaller")),
    "simple, in parallel": (["--effort", "simple", "--parallel", "tp"],
                            ("parallel tp is more than effort simple accepts", "fix: leave one of the two out")),
    "unknown effort": (["--effort", "lazy"], ("cannot use effort = 'lazy'", "one of: simple, usual, any")),
    "WSL of this machine": (["--wsl"], ("wsl says what to assume beside gpu", "fix: leave it out")),
    "what if nothing": (["--what-if", "nonsense"], ("cannot read --what-if 'nonsense'", "seq=8192")),
    "another language": (["--lang", "fr"], ("'fr' is not one of 'en', 'zh'",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_requests(kind: str, capsys):
    """Exit code 2, one message that says what, why and what to do, and no traceback."""
    arguments, parts = BAD[kind]
    card = [] if {"--gpu", "--wsl"} & set(arguments) else ["--gpu", "rtx3080"]
    assert main(["plan", "meta-llama/Llama-3.1-8B", *card, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err and printed.err.startswith("error: ")
    for part in parts:
        assert part in printed.err


def test_records_beyond_the_trained_positions_are_said(capsys):
    """SmolLM2 was trained on 8,192 positions."""
    assert main(["plan", "smollm2", "--gpu", "rtx3080", "--seq-len", "16384", "--batch", "1", "--lang", "en"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "seq_len 16384 is beyond the 8192 positions this model was trained on; consider --rope-scaling" in shown
