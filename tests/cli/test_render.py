"""A plan and a run on the terminal, from the plain values that `--json` and `events.jsonl` hold."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from fitune.cli import render
from fitune.cli.output import console
from fitune.cli.progress import Display, data_lines
from fitune.units import GIB, MIB

PLAN = {
    "model": "meta-llama/Llama-3.1-8B", "method": "lora", "base_format": "nf4", "double_quant": True,
    "adapter": {"r": 16, "alpha": 32, "dora": False}, "device_name": "RTX 3080 [10 GB]", "precision": "bf16",
    "batch": 8, "micro_batch": 2, "seq_len": 2048, "budget_bytes": 10 * GIB,
}  # fmt: skip
RESULT = {
    "fits": True,
    "plan": PLAN,
    "predicted": {
        "peak_allocated_bytes": 8 * GIB, "device_bytes": None, "step_s": 90.0, "tokens_per_s": 1234.5,
        "phases": {
            "step": {"peak_allocated_bytes": 8 * GIB}, "load": {"peak_allocated_bytes": 5 * GIB},
            "merge": {"peak_allocated_bytes": None},
        },
    },
    "reasons": [{"decision": "base format", "value": "nf4", "why": "bf16 [16 GiB] does not fit", "exact": False}],
    "alternatives": [{
        "plan": PLAN | {"micro_batch": 1, "num_layers": 32, "recompute_layers": 8, "stream_from": "pinned",
                        "resident_layers": 12},
        "predicted": {"device_bytes": 7 * GIB, "step_s": 95.0},
    }],
    "nearest_fits": [],
    "notes": ["assumed: 20 GiB RAM"],
}  # fmt: skip


def printed(result: dict) -> str:
    made = Console(file=io.StringIO(), width=120, highlight=False)
    render.show_plan(made, result)
    return made.file.getvalue()


def test_plan_on_the_terminal():
    text = printed(RESULT)
    assert text.startswith("meta-llama/Llama-3.1-8B fits on RTX 3080 [10 GB]: 8.00 GiB of 10.00 GiB at the peak\n")
    assert "note: assumed: 20 GiB RAM\n" in text
    assert "LoRA r=16 on an nf4 (double quantisation) base, bf16, batch 8 as 2 x 4, up to 2048 tokens" in text
    assert "base format  nf4    approx.  bf16 [16 GiB] does not fit" in text
    assert "about 1 min 30 s a step, 1,234 tokens/s" in text
    assert (
        "Also fits: nf4, batch 8 as 1 x 8, 8 of 32 layers recomputed, 20 streamed: 7.00 GiB, 1 min 35 s a step\n"
        in text
    )


def test_phases_stand_in_the_order_they_happen_with_a_bar():
    rows = render.phase_rows(RESULT)
    assert rows == [("load", 5 * GIB, None), ("step", 8 * GIB, None)]
    lines = [line.split() for line in printed(RESULT).splitlines()]
    assert ["load", "5.00", "GiB", "█" * 12 + "░" * 12] in lines
    assert ["step", "8.00", "GiB", "█" * 19 + "░" * 5] in lines


def test_plan_that_does_not_fit():
    result = RESULT | {
        "fits": False, "predicted": {"peak_allocated_bytes": 41 * GIB}, "alternatives": [],
        "nearest_fits": [{"change": "shorter records: --seq-len 512", "needs_bytes": 9 * GIB}],
    }  # fmt: skip
    text = printed(result)
    assert "does not fit on RTX 3080 [10 GB]: it needs 41.00 GiB, there are 10.00 GiB\n" in text
    assert "Would fit: shorter records: --seq-len 512\n" in text


@pytest.mark.parametrize(
    ("num_bytes", "full", "shown"),
    [(5, 10, "█████░░░░░"), (0, 10, "░" * 10), (10, 10, "█" * 10), (11, 10, "█████████>"), (None, 10, ""), (5, 0, "")],
)
def test_bar(num_bytes, full, shown):
    assert render.bar(num_bytes, full, width=10) == shown


EVENTS = [
    {
        "event": "start", "steps": 4, "trainable": 4_880_000, "total": 139_000_000, "device_name": "CPU",
        "resumed_from": None,
    },
    {
        "event": "data", "layout": "layout messages: messages (of {role, content})", "template": "own template",
        "lengths": {"records": 348, "tokens": 40_000, "median": 120, "p95": 300, "longest": 1412, "longest_record": 7},
        "dropped": {"no answer": 2}, "truncated": 1,
    },
    {"event": "phase", "phase": "load", "peak_allocated_bytes": 312 * MIB, "host_bytes": 2 * GIB},
    {"event": "phase", "phase": "eval", "peak_allocated_bytes": 312 * MIB, "host_bytes": 2 * GIB},
    {"event": "eval", "step": 0, "eval_loss": 2.5, "by_language": {"en": 2.0, "zh": None}},
    {
        "event": "step", "step": 1, "loss": 2.25, "tokens_per_s": 1000.4, "step_s": 10.0,
        "peak_allocated_bytes": 312 * MIB,
    },
    {"event": "step", "step": 2, "loss": None, "tokens_per_s": None, "step_s": 10.0, "peak_allocated_bytes": None},
    {"event": "sample", "when": "after", "language": "zh", "prompt": "显存？", "answer": "[b]够[/b]"},
    {"event": "notice", "text": "the disk is nearly full"},
    {"event": "checkpoint", "step": 2, "path": "checkpoints/2"},
    {"event": "unheard-of", "x": 1},
    {"event": "end", "status": "done", "seconds": 65.0},
]  # fmt: skip


def shown(plain_every_s: float = 0.0, terminal: bool = False) -> str:
    made = Console(file=io.StringIO(), width=200, highlight=False, force_terminal=terminal, color_system=None)
    with Display(made, plain_every_s=plain_every_s) as display:
        for event in EVENTS:
            display.on_event(event)
    return made.file.getvalue()


def test_run_without_a_terminal():
    assert shown().splitlines() == [
        "training 4.88 M of 139 M parameters (3.51%)",
        "4 steps on CPU",
        "data: layout messages: messages (of {role, content})",
        "own template",
        "lengths: 348 records, 40,000 tokens, median 120, 95 % within 300, longest 1,412, in row 7",
        "left out: 2 (no answer)",
        "cut at the sequence length: 1",
        "model loaded: 312 MiB, host RAM 2.00 GiB",
        "evaluation at step 0: loss 2.5000 (en 2.0000, zh not a number)",
        "step 1/4  loss 2.2500  1,000 tokens/s  312 MiB  30.0 s left",
        "step 2/4  loss not a number  20.0 s left",
        "",
        "[after] 显存？",
        "  [b]够[/b]",
        "",
        "note: the disk is nearly full",
        "done after 1 min 05 s",
    ]


def test_steps_are_not_all_printed_without_a_terminal():
    made = Console(file=io.StringIO(), width=200)
    display = Display(made, plain_every_s=3600)
    begin = time.monotonic()
    display.on_event({"event": "start", "steps": 100})
    for step in range(1, 101):
        display.on_event({"event": "step", "step": step, "loss": 1.0, "step_s": 0.01})
    lines = [line for line in made.file.getvalue().splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/100", "100/100"]
    assert time.monotonic() - begin < 10


def test_bar_on_a_terminal():
    text = shown(terminal=True)
    assert "step 2/4 ━━━━" in text and "loss not a number  20.0 s left" in text
    assert "checkpoint at step 2" in text and text.rstrip().endswith("done after 1 min 05 s")


def test_time_left_follows_the_last_steps():
    display = Display(Console(file=io.StringIO()), plain_every_s=0)
    display.on_event({"event": "start", "steps": 1000})
    for step in range(1, 101):
        display.on_event({"event": "step", "step": step, "loss": 1.0, "step_s": 100.0 if step <= 50 else 2.0})
    assert display.step_line({"step": 100, "loss": 1.0}).endswith("30 min 00 s left")


def test_plan_event_shows_the_plan():
    made = Console(file=io.StringIO(), width=120)
    Display(made).on_event({"event": "plan", "run_folder": "runs/x", **RESULT})
    assert "Llama-3.1-8B fits on" in made.file.getvalue() and "run folder: runs/x\n" in made.file.getvalue()


def test_a_reader_that_goes_away_does_not_stop_the_run():
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    made = console()
    made.file = Gone()
    display = Display(made)
    for event in EVENTS:
        display.on_event(event)  # raises nothing, and does not end the program as rich by itself would


def test_data_without_lengths():
    assert data_lines({"layout": "layout text: text (raw text)"}) == ["data: layout text: text (raw text)"]
