from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fitune.errors import UserError
from fitune.plan import Reason
from fitune.planner.techniques_list import BY_KEY
from fitune.train import report_charts, report_text
from fitune.train.events import EventLog
from fitune.train.report import write_report
from fitune.train.report_charts import nice_ticks, smooth
from fitune.train.report_memory import measured_peaks
from fitune.train.report_text import LANGUAGES, Words
from fitune.units import GIB

from .fake_run import make_plan, make_run

VOID = {"meta", "link", "br", "hr", "img", "path"}


class Page(HTMLParser):
    """The page as elements, tables and text; fails on tags that do not nest."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open[-1][0] == tag, (self.open[-1], tag)
            self.open.pop()

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.open]
        if "script" in tags:
            self.scripts.append((self.open[-1][1], data))
        elif "style" not in tags:
            self.text += data
            if "td" in tags or "th" in tags:
                self.tables[-1][-1][-1] += data

    def table(self, *head: str) -> dict[str, list[str]]:
        """Rows by their first cell, of the table whose header starts like this."""
        for table in self.tables:
            if table and table[0][: len(head)] == list(head):
                return {row[0]: row[1:] for row in table[1:]}
        raise AssertionError(f"no table {head} among {[table[0] for table in self.tables]}")


def page_of(run: Any, lang: str = "en") -> Page:
    return Page(write_report(run, lang).read_text(encoding="utf-8"))


def test_the_page_tells_what_was_planned_and_what_happened(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", notices=("3 records were dropped",), resumed_from=60)
    run.adapter_path.mkdir()
    page = page_of(run)
    for text in (
        "meta-llama/Llama-3.1-8B", "Done", "QLoRA r 16", "NVIDIA GeForce RTX 3080", "41.9 M", "3 records were dropped",
        f"fitune chat {run.path}", f"fitune export {run.path}", "PeftModel.from_pretrained(base,", "transformers",
        "5.24.0", "demo.jsonl:417", "empty answer: 2", "Resumed from step", run.recipe_text(),
    ):  # fmt: skip
        assert text in page.text, text
    plan = page.table("Decision", "Value")
    assert plan["base format"] == [
        "nf4", "≈ approximate", "bf16 weights (14.96 GiB) do not fit 9.20 GiB; nf4 takes 4.01 GiB",
    ]  # fmt: skip
    assert plan["attention"][1] == "= exact"
    held_out = page.table("Records")
    assert held_out["all"] == ["2.730", "1.141", "−58.2\u00a0%"]
    assert held_out["English"][0] == "2.530" and held_out["Chinese"][0] == "2.980"
    assert "Training also keeps the gradients" in page.text and "因为模型很大" in page.text
    assert ("p", {"lang": "zh"}) in page.seen


def test_techniques_of_the_plan_with_what_they_save(tmp_path: Path) -> None:
    """The texts are those of `planner.techniques_list`, in both languages."""
    run = make_run(tmp_path / "run")
    for lang, head, free in (("en", "Technique", "no memory"), ("zh", "技术", "不省内存")):
        page = page_of(run, lang)
        rows = page.table(head, page_words("saves_here", lang))
        name, flash, major = (BY_KEY[key].text("name", lang) for key in ("qlora", "flash_attention", "layer_major"))
        assert rows[name][0] == "100.00 GiB" and rows[flash][0] == "~3.50 GiB" and rows[major][0] == free
        assert rows[name][2:] == [BY_KEY["qlora"].text("how", lang), BY_KEY["qlora"].text("costs", lang)]


def test_a_chinese_report_tells_the_reasons_in_chinese(tmp_path: Path) -> None:
    plan = make_plan("cuda").with_(reasons=(Reason("micro-batch", "2 of 8", "the smallest need there is"),))
    page = page_of(make_run(tmp_path / "run", plan=plan), "zh")
    assert page.table("决定", "取值")["微批"] == ["2 / 8", "= 精确", "需求最小"]


def page_words(key: str, lang: str) -> str:
    return Words(lang)(key)


def test_memory_predicted_against_measured(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run"))
    rows = page.table("Phase", "Predicted")
    assert rows["load"] == ["5.61 GiB", "5.60 GiB", "+0.2\u00a0%"]
    assert rows["evaluation"] == ["6.20 GiB", "6.31 GiB", "−1.7\u00a0%"]
    assert rows["save"] == ["not computed", "5.72 GiB", "–"]  # null is not 0
    every = [row for table in page.tables if table[0][:2] == ["Phase", "Memory"] for row in table[1:]]
    assert ["load", "host (RAM)", "not computed", "1.76 GiB", "–"] in every
    widths = [float(attrs["style"].split(":")[1][:-1]) for tag, attrs in page.seen if tag == "i" and attrs.get("style")]
    assert len(widths) == 9  # five phases, two bars each, one not computed
    assert widths[0] / widths[1] == pytest.approx(5.61 / 5.60, rel=1e-3)
    assert "The plan may use 9.20 GiB of device memory" in page.text


def test_measured_peaks_are_the_highest_of_all_sessions() -> None:
    events = [
        {"event": "phase", "phase": "step", "peak_allocated_bytes": 5, "host_bytes": None},
        {"event": "phase", "phase": "step", "peak_allocated_bytes": None, "host_bytes": 9},
        {"event": "step", "step": 1, "peak_allocated_bytes": 7},
        {"event": "step", "step": 2, "peak_allocated_bytes": 6},
    ]
    assert measured_peaks(events)["step"] == {
        "peak_allocated_bytes": 7, "peak_reserved_bytes": None, "device_bytes": None, "host_bytes": 9,
    }  # fmt: skip


def test_without_a_gpu_host_memory_is_shown(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", device="cpu"))
    assert page.table("Phase", "Predicted")["training step"] == ["2.10 GiB", "2.07 GiB", "+1.5\u00a0%"]
    assert page.table("Phase", "Predicted")["load"][0] == "not computed"
    assert "host (RAM)" in page.text and "of a budget" not in page.text


def test_without_any_memory_the_page_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", begin=False, plan=make_plan(predicted={}))
    assert "Memory was neither predicted nor measured." in page_of(run).text


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run"))
    html = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert not re.findall(r"https?://|@import|url\(", html)
    for tag, attrs in page.seen:
        assert tag not in ("iframe", "object", "embed", "img")
        for name in ("src", "href"):
            assert (attrs.get(name) or "#").startswith(("#", "data:,")), (tag, attrs)
    policy = next(attrs["content"] for tag, attrs in page.seen if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'")
    assert "prefers-color-scheme: dark" in html and 'name="viewport"' in html


def test_everything_a_run_says_is_escaped(tmp_path: Path) -> None:
    evil = '</script><script>alert("x")</script><img src=x onerror=alert(1)>&amp;'
    plan = make_plan(model=evil, device_name=evil)
    plan = plan.with_(reasons=tuple(type(r)(evil, evil, evil, r.exact) for r in plan.reasons))
    prompts = {'zh"><u>': (evil, evil, evil)}
    run = make_run(tmp_path / "run", plan=plan, notices=(evil,), status="failed", error=evil, prompts=prompts)
    with EventLog(run.events_path) as log:
        log.write("data", layout=evil, template=evil, lengths={evil: evil}, dropped={evil: 1}, truncated=evil)
        log.write("eval", step=120, eval_loss=1.0, by_language={evil: 1.0, "en": 2.0})
        log.write("phase", phase=evil, peak_allocated_bytes=GIB)
        log.write("end", status="failed", step=120, error=evil)
    page = page_of(run)
    assert evil in page.text
    assert not {tag for tag, _ in page.seen} & {"img", "u"}
    assert len([1 for attrs, _ in page.scripts if attrs.get("type") is None]) == 1
    assert not any("onerror" in attrs for _, attrs in page.seen)


def test_cursor_data_and_tables_hold_the_recorded_values(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20, nan_steps=(5,))
    page = page_of(run)
    rows = [json.loads(text) for attrs, text in page.scripts if attrs.get("class") == "cursor-data"][0]
    events = {event["step"]: event for event in run.events() if event["event"] == "step"}
    assert [title for _, title, _ in rows] == [f"step {step}" for step in range(21)]
    assert rows[0][0] == 0 and rows[-1][0] == 1
    shown = {name: text for _, name, text, _ in rows[7][2]}
    assert shown["training, each step"] == f"{events[7]['loss']:.2f}"
    assert [name for _, name, _, _ in rows[4][2]] == ["training, each step"]
    assert rows[5][2][1][1].startswith("held-out") and rows[5][2][0][1] == "held-out"  # step 5 has evaluations, no loss
    assert "not a number in 1 of 20 steps, first in step 5" in page.text


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("settings", "english", "chinese"),
    [
        ({"begin": False}, ["Not started", "No step has been recorded", "train --resume"], "尚未开始"),
        ({"steps": 1, "evals": False, "samples": False}, ["Nothing was held out"], "没有验证损失"),
        ({"stop_at": 37, "status": None}, ["kill -9", "last checkpoint is of step 36"], "被强制结束"),
        ({"stop_at": 3, "status": "interrupted"}, ["Ctrl-C after step 3", "no checkpoint"], "已中断"),
        ({"stop_at": 50, "status": "terminated"}, ["SIGTERM"], "已终止"),
        ({"stop_at": 20, "status": "failed", "error": "CUDA oom"}, ["an error after step 20", "CUDA oom"], "CUDA oom"),
        ({"steps": 12, "nan_steps": tuple(range(1, 13)), "evals": False}, ["12 of 12 steps"], "12 步中有 12 步"),
        ({"stop_at": 0, "status": "failed", "device": "cpu"}, ["Stopped by an error"], "失败"),
    ],
)
def test_every_kind_of_run_has_a_page(
    tmp_path: Path, settings: dict[str, Any], english: list[str], chinese: str, lang: str
) -> None:
    page = page_of(make_run(tmp_path / "run", **settings), lang)
    for text in english if lang == "en" else [chinese]:
        assert text in page.text
    assert "None" not in page.text and "nan" not in page.text.replace("nano", "")


def test_a_run_in_progress_is_shown_as_running(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stop_at=10, status=None)
    with EventLog(run.events_path):
        page = page_of(run)
    assert "Running" in page.text and "train --resume" not in page.text


def test_chinese_says_the_same_in_chinese(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    english, chinese = page_of(run), page_of(run, "zh")
    assert ("html", {"lang": "zh-CN"}) in chinese.seen and ("html", {"lang": "en"}) in english.seen
    assert [tag for tag, _ in english.seen] == [tag for tag, _ in chinese.seen]
    assert list(chinese.table("数据")["全部"]) == list(english.table("Records")["all"])
    assert "计划与理由" in chinese.text and "5 分" in chinese.text
    assert not set(re.findall(r"[A-Z][a-z]+ [a-z]+ [a-z]+", chinese.text)) & set(
        re.findall(r"[A-Z][a-z]+ [a-z]+ [a-z]+", " ".join(pair[0] for pair in report_text._WORDS.values()))
    )


def test_every_text_exists_in_both_languages_with_the_same_places() -> None:
    for key, (english, chinese) in report_text._WORDS.items():
        assert english and chinese, key
        assert sorted(re.findall(r"{\w+}", english)) == sorted(re.findall(r"{\w+}", chinese)), key
        assert not re.search(r"[\u4e00-\u9fff][,;:?()]", chinese), key  # full-width punctuation after Chinese
    assert Words("zh").duration(200) == "3 分 20 秒" and Words("en").duration(3900) == "1 h 05 min"


def test_an_unknown_language_and_an_unreadable_plan_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", begin=False)
    with pytest.raises(UserError) as caught:
        write_report(run, "fr")
    assert "'fr'" in caught.value.what and "one of: en, zh" in caught.value.fix
    run.plan_path.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        write_report(run)
    assert not run.report_path.exists()


def test_a_long_run_stays_a_small_page_and_keeps_its_spikes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=5000, samples=False)
    lines = [json.loads(line) for line in run.events_path.read_text(encoding="utf-8").splitlines()]
    for event in lines:
        if event["event"] == "step" and event["step"] == 3333:
            event["loss"] = 9.9
    run.events_path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    path = write_report(run)
    assert path.stat().st_size < 600_000
    chart = path.read_text(encoding="utf-8").split('id="loss-chart"')[1]
    faint = re.search(r'class="faint train" d="([^"]+)"', chart)
    assert faint is not None
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", faint[1])]
    assert min(heights) < 20 and len(heights) <= report_charts._MAX_DRAWN + 2


def test_smoothing_is_unbiased_and_keeps_gaps() -> None:
    points = tuple((float(i), None if i == 3 else 2.0) for i in range(8))
    smoothed = smooth(points, 5)
    assert [x for x, _ in smoothed] == [x for x, _ in points]
    assert [y is None for _, y in smoothed] == [y is None for _, y in points]
    assert all(y == pytest.approx(2.0) for _, y in smoothed if y is not None)
    noisy = tuple((float(i), 1.0 + (-1) ** i) for i in range(100))
    assert all(0.7 < y < 1.3 for _, y in smooth(noisy, 20)[20:] if y is not None)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.9, 2.9, (0.5, 1, 1.5, 2, 2.5, 3)),
        (0, 2e-4, (0, 5e-5, 1e-4, 1.5e-4, 2e-4)),
        (2400, 6600, tuple(range(2000, 8000, 1000))),
    ],
)
def test_ticks_are_round_and_cover_the_values(low: float, high: float, ticks: tuple[float, ...]) -> None:
    assert nice_ticks(low, high, 5) == pytest.approx(ticks)
