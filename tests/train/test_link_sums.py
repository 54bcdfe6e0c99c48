"""A run that streams says so everywhere: while it goes on, in its result and report, the list of runs, loggers."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fitune.cli import api
from fitune.cli.main import main
from fitune.cli.progress import Display, last_lines
from fitune.train import session
from fitune.train.link_sums import link_fields, link_sums
from fitune.train.loggers import scalars
from fitune.train.report import write_report
from fitune.train.run_folder import RunFolder
from fitune.units import format_bytes, format_rate, format_share, gib
from tests.train.test_report import Page


def step(**fields: Any) -> dict[str, Any]:
    return {"event": "step", "step": 1, "step_s": 2.0} | fields


def test_sums_weigh_speed_by_bytes_and_waiting_by_time() -> None:
    events = [
        step(link_bytes=8_000, link_bytes_per_s=4_000.0, link_wait_share=0.5),
        step(link_bytes=1_000, link_bytes_per_s=500.0, link_wait_share=0.0, step_s=8.0),
        step(link_bytes=0, link_bytes_per_s=None, link_wait_share=0.1, step_s=10.0),  # all was there from before
        step(step_s=1000.0),  # a batch that was left out
        {"event": "eval", "step": 1, "link_bytes": 5},
    ]
    sums = link_sums(events)
    assert sums is not None and (sums.num_bytes, sums.copy_s, sums.step_s) == (9_000, 4.0, 20.0)
    assert link_fields(events) == {"link_bytes": 9_000, "link_bytes_per_s": 2_250.0, "link_wait_share": 0.1}
    assert link_fields([step(), {"event": "start"}]) == {} and link_sums([]) is None
    assert link_fields([step(link_bytes=0, link_bytes_per_s=None, link_wait_share=0.0)])["link_bytes_per_s"] is None
    assert link_fields([step(link_bytes="many", link_bytes_per_s={}, link_wait_share=[])]) == {}, "a damaged event"


@pytest.fixture(scope="module")
def streamed(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """(result, what was shown) of a run on the CPU whose layers pass through a ring, its folder's language Chinese."""

    def plan(*args: Any, real: Any = session.plan_session, **how: Any) -> Any:
        result = real(*args, **how)
        return dataclasses.replace(result, plan=result.plan.with_(stream_from="pageable", resident_layers=0))

    out = tmp_path_factory.mktemp("streamed") / "a run"
    console = Console(file=io.StringIO(), width=200)
    with pytest.MonkeyPatch.context() as patch, Display(console, plain_every_s=0) as display:
        patch.setattr(session, "plan_session", plan)
        result = api.train(str(base), data=str(data), devices="cpu", seq_len=128, batch=4, steps=3, lora_r=4,
                           eval_share=0, lang="zh", out=str(out), on_event=display.on_event)  # fmt: skip
    return result, console.file.getvalue() + "\n".join(last_lines(result, display.words))


def of_steps(run: str) -> list[dict[str, Any]]:
    return [event for event in RunFolder(Path(run)).events() if event["event"] == "step"]


def test_every_step_and_the_end_are_shown(streamed: tuple[dict[str, Any], str]) -> None:
    result, shown = streamed
    steps = of_steps(result["run"])
    assert len(steps) == 3
    for event in steps:
        size, rate = format_bytes(event["link_bytes"]), format_rate(event["link_bytes_per_s"])
        line = next(line for line in shown.splitlines() if line.startswith(f"步 {event['step']}/3"))
        assert line.endswith(f"流式传输 {size}，{rate}，等待 {format_share(event['link_wait_share'])}")
    total = format_bytes(sum(event["link_bytes"] for event in steps))
    assert f"流式传输：共 {total} 权重，{format_rate(result['link_bytes_per_s'])}" in shown
    assert f"fitune chat '{result['run']}'" in shown, "a folder's name with a space, as a shell wants it"
    assert f"报告：'{result['run']}/report.html'" in shown


def test_the_result_and_the_list_of_runs(streamed: tuple[dict[str, Any], str], capsys: pytest.CaptureFixture) -> None:
    result, _ = streamed
    steps, folder = of_steps(result["run"]), str(Path(result["run"]).parent)
    expected = link_fields(steps)
    assert expected["link_bytes"] == sum(event["link_bytes"] for event in steps) > 0
    assert {key: result[key] for key in expected} == expected
    assert main(["runs", folder, "--json"]) == 0
    (info,) = json.loads(capsys.readouterr().out)
    assert {key: info[key] for key in expected} == pytest.approx(expected)
    size, share = format_bytes(expected["link_bytes"]), format_share(expected["link_wait_share"])
    for lang, words in (
        (
            "en",
            (
                f"a run: streamed: {size} of weights at ",
                f"{share} of the steps' time spent waiting",
                "done",
                "held out",
            ),
        ),
        ("zh", (f"a run：流式传输：共 {size} 权重，", f"等待占各步时间的 {share}", "已完成", "验证损失")),
    ):
        assert main(["runs", folder, "--lang", lang]) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words), out


@pytest.mark.parametrize(("lang", "title"), [("en", "Streamed weights"), ("zh", "权重的流式传输")])
def test_the_report_has_a_line_and_two_plots(streamed: tuple[dict[str, Any], str], lang: str, title: str) -> None:
    run = RunFolder(Path(streamed[0]["run"]))
    page = Page(write_report(run, lang).read_text(encoding="utf-8"))
    assert title in page.text
    for text in (
        format_bytes(streamed[0]["link_bytes"]), format_rate(streamed[0]["link_bytes_per_s"]),
        format_share(streamed[0]["link_wait_share"]),
    ):  # fmt: skip
        assert text in page.text.partition(title)[2]
    assert {"wait-chart", "rate-chart"} <= {attrs.get("id") for _, attrs in page.seen}


def test_loggers_get_them(streamed: tuple[dict[str, Any], str]) -> None:
    event = of_steps(streamed[0]["run"])[0]
    logged = dict(scalars(event))
    assert logged["link/moved_gib"] == gib(event["link_bytes"])
    assert logged["link/gb_per_s"] == event["link_bytes_per_s"] / 1e9
    assert logged["link/wait_share"] == event["link_wait_share"]


def test_a_run_that_streams_nothing_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from tests.train.fake_run import make_run

    run = make_run(tmp_path / "run", steps=4)
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert "Streamed weights" not in page.text and "wait-chart" not in {attrs.get("id") for _, attrs in page.seen}
    assert main(["runs", str(tmp_path)]) == 0
    assert "streamed" not in capsys.readouterr().out
    assert run.info().link_bytes is None and not any(
        tag.startswith("link/") for e in run.events() for tag in dict(scalars(e))
    )
