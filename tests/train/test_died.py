"""Why a worker is gone, and what the next one does differently."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from fitune import plan as plans
from fitune.errors import EXIT_FAILED, EXIT_RESTART, UserError
from fitune.train.died import FRUGAL, UNCHANGED, Death, Restarts, diagnose, tell_end
from fitune.train.events import EventLog, read_events
from fitune.train.run_folder import RunFolder
from tests import tiny

BNB = "Error out of memory at line 380 in file /src/bitsandbytes/csrc/pythonInterface.c\n"


@pytest.mark.parametrize("code", [0, 1, 2, 3, 130, 143, -signal.SIGINT, -signal.SIGTERM])
def test_an_end_of_its_own(code: int):
    assert diagnose(code, "error: cannot read data.jsonl", 5, 5) is None


@pytest.mark.parametrize("code", [-signal.SIGKILL, 137])
def test_killed(code: int):
    counted = diagnose(code, "", 5, 6)
    assert counted is not None and counted.failure is not None and counted.is_certain
    assert (counted.failure.where, counted.cause) == ("host", "the system killed it for memory (oom_kill)")
    unknown = diagnose(code, "", None, None)
    assert unknown is not None and not unknown.is_certain and "by the system or by hand" in unknown.cause


def test_a_library_that_prints_and_exits():
    death = diagnose(1, f"step 3\n{BNB}", 5, 5)
    assert death is not None and death.failure is not None
    assert death.failure.source == "bitsandbytes" and death.cause == BNB.strip()


def test_a_crash():
    death = diagnose(-signal.SIGSEGV, "Fatal Python error: Segmentation fault", 5, 5)
    assert death is not None and death.failure is None and death.cause == "it was ended by SIGSEGV"
    aborted = diagnose(-signal.SIGABRT, "terminate called: std::bad_alloc\n  what():  std::bad_alloc", 5, 5)
    assert aborted is not None and aborted.failure is not None and aborted.failure.where == "host"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("model: smollm2\ndata: demo\n")
    (run / "plan.json").write_text(tiny.make_plan(micro_batch=4).to_json())
    with EventLog(run / "events.jsonl") as log:
        log.write("start", steps=10, device_name="CPU")
    return run


def kinds(run: Path) -> list[str]:
    return [event["event"] for event in read_events(run / "events.jsonl")]


def test_a_certain_kill_takes_a_notch_at_once(folder: Path):
    death = diagnose(-9, "", 1, 2)
    assert death is not None
    line = Restarts(folder).next(death, -9, 7)
    assert line == ("note: the run died after step 7: the system killed it for memory (oom_kill); micro-batch 4 -> 2; "
                    "it goes on from the beginning")  # fmt: skip
    assert plans.from_json((folder / "plan.1.json").read_text()).micro_batch == 2
    assert kinds(folder) == ["start", "replan", "restart"]


def test_a_plan_that_a_rank_has_left_silently_is_told(folder: Path):
    """DeepSpeed's other ranks cannot be told, and only the first rank writes events: it leaves its plan alone."""
    restarts = Restarts(folder)
    for number, micro_batch in ((1, 2), (2, 2), (3, 1)):  # the second: two ranks that failed at the same time
        (folder / f"plan.{number}.json").write_text(tiny.make_plan(micro_batch=micro_batch).to_json())
        if number > 1:
            death = diagnose(75, "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB", 0, 0, wants_restart=True)
            assert death is not None
            line = restarts.next(death, 75, 7)
            assert f"; micro-batch {'4 -> 2' if number == 2 else '2 -> 1'}; it goes on from" in line
    assert kinds(folder) == ["start", *["replan", "restart"] * 2]
    assert [e["number"] for e in read_events(folder / "events.jsonl") if e["event"] == "replan"] == [2, 3]
    assert "nothing" not in str(read_events(folder / "events.jsonl"))


def test_the_report_of_an_end_that_others_tell_speaks_the_run_s_language(folder: Path):
    (folder / "recipe.yaml").write_text("model: smollm2\ndata: demo\nlang: zh\n")
    tell_end(folder, 1, "step 3\nerror: no such file\n  why: it was moved\n", 3)
    end = read_events(folder / "events.jsonl")[-1]
    assert (end["event"], end["status"], end["step"], end["error"]) == ("end", "failed", 3, "no such file")
    assert '<html lang="zh' in (folder / "report.html").read_text(encoding="utf-8")


def test_a_lost_connection_changes_nothing(folder: Path):
    death = diagnose(-6, "RuntimeError: Connection reset by peer", 0, 0)
    assert death is not None and "it goes on from the beginning" in Restarts(folder).next(death, -6, 7)
    assert kinds(folder) == ["start", "restart"]


def test_a_change_of_an_earlier_life_is_not_told_again(folder: Path):
    with EventLog(folder / "events.jsonl") as log:
        log.write("replan", step=3, change="micro-batch 4 -> 2")
    death = diagnose(75, "", 0, 0, wants_restart=True)
    assert death is not None
    restarts = Restarts(folder)
    assert "micro-batch 4 -> 2" in restarts.next(death, 75, 3)
    assert "micro-batch" not in restarts.next(death, 75, 5)
    assert [e["change"] for e in read_events(folder / "events.jsonl") if e["event"] == "restart"] == [
        "micro-batch 4 -> 2", "nothing"]  # fmt: skip


def test_a_kill_by_nobody_knows_whom_changes_nothing_the_first_time(folder: Path):
    death = diagnose(-9, "", None, None)
    assert death is not None
    restarts = Restarts(folder)
    assert "micro-batch" not in restarts.next(death, -9, 7)
    assert not (folder / "plan.1.json").exists()
    assert "micro-batch 4 -> 2" in restarts.next(death, -9, 7), "the same again without a newer checkpoint"


def test_host_memory_beside_a_gpu(folder: Path):
    (folder / "plan.json").write_text(tiny.make_plan(device="cuda", offload_inputs=True).to_json())
    death = diagnose(-9, "", 1, 2)
    assert death is not None
    restarts = Restarts(folder)
    assert "inputs of recomputed layers stay on the GPU" in restarts.next(death, -9, 7)
    assert FRUGAL in restarts.next(death, -9, 7)
    assert [e["change"] for e in read_events(folder / "events.jsonl") if e["event"] == "replan"][-1] == FRUGAL


def test_a_plan_of_which_nobody_has_told(folder: Path):
    """A rank that could tell nobody has left it: told are its settings, not what was predicted, and of shares that
    they have changed."""
    shares = tuple(plans.Share(card, None, records=2, micro_batch=2, recompute_layers=4) for card in ("one", "two"))
    before = tiny.make_plan(micro_batch=4, parallel="ddp", world_size=2, shares=shares, predicted={"step_s": 1.0})
    (folder / "plan.json").write_text(before.to_json())
    RunFolder(folder).store_plan(before.changed({"micro_batch": 1}).with_(predicted={}))
    Restarts(folder).next(Death("it has changed its plan", planned=True), EXIT_RESTART, 7)
    told = [event["change"] for event in read_events(folder / "events.jsonl") if event["event"] == "replan"]
    assert told == ["micro-batch 4 -> 1, the ranks' shares"]


def test_it_gives_up_when_nothing_gets_better(folder: Path):
    death = diagnose(-signal.SIGSEGV, "", 1, 1)
    assert death is not None
    restarts = Restarts(folder)
    restarts.next(death, -11, 3)
    restarts.next(death, -11, 3)
    with pytest.raises(UserError) as caught:
        restarts.next(death, -11, 3)
    assert caught.value.what == "the run died 3 times after step 3 without getting on"
    assert caught.value.why == "it was ended by SIGSEGV" and caught.value.exit_code == EXIT_FAILED
    end = read_events(folder / "events.jsonl")[-1]
    assert (end["event"], end["status"]) == ("end", "failed") and (folder / "report.html").exists()


def test_progress_starts_the_count_again(folder: Path):
    death = diagnose(-signal.SIGSEGV, "", 1, 1)
    assert death is not None
    restarts = Restarts(folder)
    for step in range(1, 8):
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        line = restarts.next(death, -11, step)
        assert line.endswith(f"it goes on from step {step}")
    assert [e["change"] for e in read_events(folder / "events.jsonl") if e["event"] == "restart"] == [UNCHANGED] * 7
    assert json.loads((folder / "plan.json").read_text())["micro_batch"] == 4
