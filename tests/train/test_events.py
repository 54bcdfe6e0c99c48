from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fitune.errors import UserError
from fitune.train.events import EventLog, is_being_written, read_events


def write_steps(path: Path, count: int) -> None:
    with EventLog(path) as log:
        for step in range(1, count + 1):
            log.write("step", step=step, loss=2.0 / step)


def test_events_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    before = time.time()
    with EventLog(path) as log:
        stored = log.write("step", step=3, loss=1.5, lr=2e-4)
        log.write("sample", when="before", language="zh", prompt="显存?", answer="一行\n两行\u2028三行")
    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 3 and lines[2] == ""
    step, sample = read_events(path)
    assert step == stored and step["event"] == "step" and (step["step"], step["loss"], step["lr"]) == (3, 1.5, 2e-4)
    assert before - 1 <= step["time"] <= time.time() + 1
    assert sample["answer"] == "一行\n两行\u2028三行" and "显存" in lines[1]


def test_values_become_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write("step", step=np.int64(7), loss=math.nan, grad_norm=np.float32("inf"), lr=np.float32(0.5))
        log.write("checkpoint", step=7, path=Path("checkpoints/step-7"), bytes=12)
        log.write("sample", answer="half a pair \ud83d.")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    step, checkpoint, sample = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert step["step"] == 7 and step["loss"] is None and step["grad_norm"] is None and step["lr"] == 0.5
    assert checkpoint["path"] == "checkpoints/step-7"
    assert sample["answer"] == "half a pair \ud83d."


@pytest.mark.parametrize("torn", [b'{"event": "step", "st', b'{"event":"step","step":4,"loss":1.', b"\x00\x00", b"{\n"])
def test_reopening_cuts_a_torn_line_and_nothing_else(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "events.jsonl"
    write_steps(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert [e["step"] for e in read_events(path)] == [1, 2, 3]
    with EventLog(path) as log:
        assert path.read_bytes() == whole
        log.write("step", step=4, loss=1.0)
    assert [e["step"] for e in read_events(path)] == [1, 2, 3, 4]


def test_a_last_line_that_lacks_only_its_line_feed_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_steps(path, 3)
    path.write_bytes(path.read_bytes()[:-1])
    with EventLog(path) as log:
        log.write("step", step=4, loss=1.0)
    assert [e["step"] for e in read_events(path)] == [1, 2, 3, 4]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "notice"}\noops\n{"event": "notice"}\n')
    with pytest.raises(UserError) as caught:
        read_events(path)
    assert "cannot read" in caught.value.what and "line 2 is not a JSON object" in caught.value.why
    assert "remove line 2" in caught.value.fix


def test_no_file_means_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl") == []


def test_rewind_leaves_one_continuous_history(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write("start", steps=10, resumed_from=None)
        log.write("eval", step=0, eval_loss=3.0)
        for step in range(1, 8):
            log.write("step", step=step, loss=1.0)
            if step in (4, 6):
                log.write("eval", step=step, eval_loss=1.0)
                log.write("checkpoint", step=step, path="x")
        log.write("end", status="interrupted", step=7)
        assert log.rewind(4) == 5  # steps 5, 6, 7; the evaluation and the checkpoint of step 6
        assert log.rewind(4) == 0
        log.write("start", steps=10, resumed_from=4)
        log.write("step", step=5, loss=0.5)
    events = read_events(path)
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3, 4, 5]
    assert [e["step"] for e in events if e["event"] == "eval"] == [0, 4]
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == [4]
    assert [e["event"] for e in events if e["event"] in ("start", "end")] == ["start", "end", "start"]
    assert [p.name for p in tmp_path.iterdir()] == ["events.jsonl"]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert not is_being_written(path)
    with EventLog(path):
        assert is_being_written(path)
        with pytest.raises(UserError) as caught:
            EventLog(path)
        assert "another fitune process is training it right now" in caught.value.why and caught.value.exit_code == 1
    assert not is_being_written(path)
    EventLog(path).close()


def test_kill_minus_9_loses_at_most_the_line_being_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from pathlib import Path; from fitune.train.events import EventLog\n"
        "log = EventLog(Path(sys.argv[1])); step = 0\n"
        "while True:\n    step += 1; log.write('step', step=step, loss=1.0, answer='x' * 3000)\n"
        "    print(step, flush=True)\n"
    )
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, cwd=root, text=True)
    assert child.stdout is not None
    while int(child.stdout.readline()) < 200:
        pass
    child.send_signal(signal.SIGKILL)
    reported = max([200, *map(int, child.stdout.read().split())])
    child.wait()
    assert not is_being_written(path)  # the lock died with the process
    steps = [e["step"] for e in read_events(path)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= reported


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    write_steps(path, 2)
    whole = path.read_bytes()
    real, calls = os.write, []

    def half_then_full(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real(descriptor, bytes(data[:10]))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with EventLog(path) as log:
        monkeypatch.setattr(os, "write", half_then_full)
        with pytest.raises(UserError) as caught:
            log.write("step", step=3, loss=1.0)
        monkeypatch.undo()
        assert "the disk is full" in caught.value.why and caught.value.exit_code == 1
        assert path.read_bytes() == whole
        log.write("step", step=3, loss=1.0)
    assert [e["step"] for e in read_events(path)] == [1, 2, 3]
