"""A plan and a run on the terminal, from the plain values that `--json` and `events.jsonl` hold."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.cells import cell_len
from rich.console import Console

from fitune.cli import render, render_layouts, render_memory
from fitune.cli.output import console
from fitune.cli.progress import Display, data_lines
from fitune.cli.words import Words
from fitune.cli.words_progress import PROGRESS
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
    assert "base format  nf4    approx.\n    bf16 [16 GiB] does not fit\n" in text
    assert "about 1 min 30 s a step, 1,234 tokens/s" in text
    also = "Also fits: nf4, batch 8 as 1 x 8, 8 of 32 layers recomputed, 20 streamed: 7.00 GiB, 1 min 35 s a step"
    assert also in " ".join(text.split())


def test_phases_stand_in_the_order_they_happen_with_a_bar():
    rows = render.phase_rows(RESULT)
    assert rows == [("load", 5 * GIB, None), ("step", 8 * GIB, None)]
    lines = [line.split() for line in printed(RESULT).splitlines()]
    assert ["load", "5.00", "GiB", "█" * 12 + "░" * 12] in lines
    assert ["step", "8.00", "GiB", "█" * 19 + "░" * 5] in lines


def test_what_a_person_asks_stands_first():
    """Whether it fits, what is trained, how long it takes: before notes and reasons."""
    text = printed(RESULT)
    marks = ["fits on", "LoRA r=16", "a step, 1,234", "note: assumed", "decision", "█", "Also fits"]
    assert [text.index(mark) for mark in marks] == sorted(text.index(mark) for mark in marks)


def test_a_plan_that_is_faster_and_was_not_taken_says_why():
    faster = RESULT["alternatives"][0] | {"why": "2 % faster, but more complex"}
    text = " ".join(printed(RESULT | {"alternatives": [faster]}).split())
    assert text.endswith("1 min 35 s a step; 2 % faster, but more complex")


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


STREAMED = {
    "event": "step", "step": 12, "loss": 1.25, "tokens_per_s": 9812.3, "step_s": 10.0,
    "peak_allocated_bytes": 2 * GIB, "link_bytes": 6 * GIB, "link_bytes_per_s": 54.1e9, "link_wait_share": 0.002,
}  # fmt: skip


@pytest.mark.parametrize(
    ("width", "lang", "lines"),
    [
        (160, "en", ["step   12/1000", "loss 1.2500  9,812 tokens/s  2.00 GiB  2 h 44 min left  "
                     "6.00 GiB streamed at 54.1 GB/s, waiting 0.2 %"]),
        (80, "en", ["step   12/1000", "loss 1.2500  9,812 tokens/s  2.00 GiB  2 h 44 min left",
                    "6.00 GiB streamed at 54.1 GB/s, waiting 0.2 %"]),
        (80, "zh", ["步   12/1000", "损失 1.2500  每秒 9,812 个 token  剩余 2 小时 44 分",
                    "流式传输 6.00 GiB，54.1 GB/s，等待 0.2 %"]),
        (60, "en", ["step   12/1000", "loss 1.2500  2 h 44 min left"]),
        (40, "en", ["step   12/1000", "loss 1.2500"]),
    ],
)  # fmt: skip
def test_the_bar_fits_the_terminal(width: int, lang: str, lines: list[str]):
    made = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, highlight=False)
    with Display(made, lang=lang) as display:
        display.on_event({"event": "start", "steps": 1000})
        display.on_event(STREAMED)
    last = made.file.getvalue().split("\r")[-1].split("\x1b[2K")[-1].replace("\x1b[?25h", "")
    assert re.sub(r"[━╸╺ \n]+", " ", last).strip() == re.sub(" +", " ", " ".join(lines)), last
    assert all(cell_len(line.rstrip()) <= width for line in last.splitlines())


def test_a_step_that_needed_nothing_from_the_link():
    display = Display(Console(file=io.StringIO()))
    event = STREAMED | {"link_bytes": 0, "link_bytes_per_s": None, "link_wait_share": 0.0}
    assert display.step_line(event).endswith("nothing streamed, waiting 0.0 %")
    assert "streamed" not in display.step_line({"step": 1, "loss": 1.0})


def test_a_run_speaks_the_language_of_its_folder():
    made = Console(file=io.StringIO(), width=200, highlight=False, color_system=None)
    with Display(made, plain_every_s=0) as display:
        display.on_event({"event": "folder", "run_folder": "runs/x", "lang": "zh"})
        for event in EVENTS:
            display.on_event(event)
    assert made.file.getvalue().splitlines() == [
        "训练 139 M 个参数中的 4.88 M 个（3.51%）",
        "共 4 步，设备：CPU",
        "数据：layout messages: messages (of {role, content})",
        "own template",
        "长度：348 条, 40,000 个 token, 中位数 120, 95 % 不超过 300, 最长 1,412, 在第 7 行",
        "丢弃：2（no answer）",
        "按序列长度截断：1",
        "模型已加载：312 MiB, 主机内存 2.00 GiB",
        "第 0 步评估：损失 2.5000（en 2.0000, zh 不是数值）",
        "步 1/4  损失 2.2500  每秒 1,000 个 token  312 MiB  剩余 30.0 秒",
        "步 2/4  损失 不是数值  剩余 20.0 秒",
        "",
        "[训练后] 显存？",
        "  [b]够[/b]",
        "",
        "注：the disk is nearly full",
        "完成，用时 1 分 05 秒",
    ]


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
    assert data_lines({"layout": "layout text: text (raw text)"}, Words("en", PROGRESS)) == [
        "data: layout text: text (raw text)"
    ]


def plan_of(**changes: object) -> dict:
    return PLAN | {"num_layers": 32, "recompute_layers": 8, "stream_from": "none"} | changes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(parallel="none", world_size=1), "batch 8 as 2 x 4, "),
        (dict(parallel="ddp", world_size=2), "batch 8 as 2 x 2 on each of 2 GPUs, "),
        (dict(parallel="tp", world_size=2), "batch 8 as 2 x 4, "),  # all of them work on every record
        (dict(parallel="ddp", world_size=2, micro_batch=4), "batch 8 as 4 x 1 on each of 2 GPUs, "),
        (dict(parallel="ddp", world_size=2, device="cpu"), "batch 8 as 2 x 2 on each of 2 processes, "),
        (dict(parallel="ddp", world_size=2, shares=[{"records": 5}, {"records": 3}]), "batch 8 as 5 + 3, "),
        (dict(parallel="none", world_size=1, micro_batch=8), "batch 8, "),
    ],
)
def test_a_step_is_told_by_what_each_gpu_does(changes: dict, text: str):
    assert text in render.summary(plan_of(**changes))
    assert text.rstrip(", ") in render.entry_line({"plan": plan_of(**changes), "predicted": {}})


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"change": "QLoRA: a frozen nf4 base (approximate)", "setting": {"method": "qlora"}},
         "QLoRA: a frozen nf4 base (approximate): --method qlora"),
        ({"change": "shorter records: --seq-len 512", "setting": {"seq_len": 512}}, "shorter records: --seq-len 512"),
        ({"change": "let fitune choose: leave out --micro-batch", "setting": {"micro_batch": None}},
         "let fitune choose: leave out --micro-batch"),
        ({"change": "a smaller model of the same family: x/y", "setting": {"model": "x/y"}},
         "a smaller model of the same family: x/y"),
        ({"change": "more RAM: 3 GiB are missing (--ram 85)", "setting": {"ram": 85.0}},
         "more RAM: 3 GiB are missing (--ram 85)"),
    ],
)  # fmt: skip
def test_what_would_fit_says_what_to_type(entry: dict, text: str):
    assert render.entry_line(entry) == text


LAYOUTS = [
    {"layout": "fsdp2", "chosen": False, "fits": False, "num_gpus": 8, "needed_bytes": 170 * GIB,
     "why": "bf16 needs at least 170.68 GiB on each card, 37.91 GiB of 39.49 GiB may be used"},
    {"layout": "tp", "chosen": False, "fits": True, "num_gpus": 8, "needed_bytes": 30 * GIB, "step_s": 2.0,
     "why": "more than --effort usual accepts; 22 % slower"},
    {"layout": "pp", "chosen": False, "fits": True, "num_gpus": 8, "needed_bytes": 30 * GIB, "step_s": 3.0,
     "why": "more than --effort usual accepts; 46 % slower"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("lang", "more"),
    [("en", "more than --effort usual accepts: tp 22 % slower, pp 46 % slower"),
     ("zh", "超出 --effort usual 的范围：tp 慢 22 %，pp 慢 46 %")],
)  # fmt: skip
def test_ways_that_are_not_accepted_take_one_line(lang: str, more: str):
    lines = [line.strip() for line, _ in render_layouts.lines({"layouts": LAYOUTS}, 100, lang)]
    assert lines[1].split() == ["fsdp2", "8", "170.00", "GiB"] and lines[2:] == [more]


def test_cards_that_are_not_alike_are_named_where_nothing_fits():
    rows = [{"layout": "none", "cards": ["A"]}, {"layout": "fsdp2", "cards": ["A", "B"], "chosen": False}]
    plan = {"parallel": "fsdp2", "world_size": 2, "device_name": "A"}
    assert render_layouts.place({"plan": plan, "layouts": rows}) == "A + B"


def test_the_headline_says_what_the_bars_show():
    """Where no replay has told what the driver counts, it is the phases' sums, the context among them."""
    owners = {"weights": 100 * GIB, "context": GIB}
    result = RESULT | {"fits": False, "predicted": {
        "peak_allocated_bytes": 100 * GIB, "phases": {"step": {"owners": owners, "device": owners}}}}  # fmt: skip
    shown = render_memory.phase_owners(result)
    assert shown and "it needs 101.00 GiB" in render.headline(result)
