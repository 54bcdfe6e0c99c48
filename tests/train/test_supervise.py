"""The supervisor with real processes, their workers small programs without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fitune.errors import EXIT_FAILED, UserError
from fitune.train.events import read_events
from fitune.train.supervise import Supervisor
from tests import tiny
from tests.train.tiny_run import of_kind

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from fitune.train.supervise import link

run, *acts = sys.argv[1:]
up = link()
assert up is not None and "FITUNE_WORKER" not in os.environ
life = Path(run) / "lives"
number = int(life.read_text()) if life.exists() else 0
life.write_text(str(number + 1))
up.on_event({"event": "folder", "run_folder": run})
up.on_event({"event": "start", "steps": 9})
up.on_event({"event": "step", "step": number + 1, "loss": 1.5})
act = acts[min(number, len(acts) - 1)]
def end(status, code):
    up.on_event({"event": "end", "status": status})
    sys.exit(code)
if act == "done":
    print("printed", flush=True)
    end("done", 0)
if act == "refused":
    print("error: no", file=sys.stderr)
    end("failed", 2)
if act == "left":  # another rank has failed, the first one is ended before it can tell
    up.on_event({"event": "beat"})
    print("process 1 of 2 failed:\\nerror: out of GPU memory at step 2\\n  why: 20 MiB", file=sys.stderr, flush=True)
    os._exit(3)
if act == "kill at the end":
    up.on_event({"event": "end", "status": "done"})
if act.startswith("kill"):
    os.kill(os.getpid(), signal.SIGKILL)
if act == "restart":
    print("NCCL error: out of memory", file=sys.stderr)
    sys.exit(75)
if act == "bitsandbytes":
    print("Error out of memory at line 380 in file /src/csrc/pythonInterface.c", file=sys.stderr, flush=True)
    os._exit(1)
if act == "hang":
    up.on_event({"event": "beat"})
    time.sleep(600)
if act.startswith("wait"):
    def stop(received, frame):
        if act == "wait, fail":
            up.on_event({"event": "beat"})
            print("error: no space", file=sys.stderr, flush=True)
            os._exit(1)
        up.on_event({"event": "end", "status": "terminated"})
        os._exit(143 if received == signal.SIGTERM else 130)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    Path(run, "waiting").write_text(str(os.getpid()))
    for _ in range(600):
        up.on_event({"event": "beat"})
        time.sleep(0.05)
"""
SUPERVISED = """
import os
import sys
from pathlib import Path
from fitune.train.supervise import Supervisor
first = [sys.executable, *sys.argv[1:]]
silence = float(os.environ.get("LEAST_SILENCE_S", 600))
tell = lambda text: print(text, file=sys.stderr)
code = Supervisor(first, lambda run: first, tell=tell, least_silence_s=silence).run()
assert not {"torch", "numpy", "transformers"} & set(sys.modules)
sys.exit(code)
"""


@pytest.fixture
def worker(tmp_path: Path):
    """`worker("kill", "done")`: the command of a worker that dies in its first life and ends in its second."""
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("model: smollm2\ndata: demo\n")
    (run / "plan.json").write_text(tiny.make_plan(micro_batch=4).to_json())

    def command(*acts: str) -> list[str]:
        return [str(program), str(run), *acts]

    return command


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def supervise(command: list[str], **options) -> int:
    first = [sys.executable, *command]
    return Supervisor(first, lambda run: first, **options).run()


def lives(tmp_path: Path) -> int:
    return int((tmp_path / "run" / "lives").read_text())


@pytest.mark.parametrize(("act", "code"), [("done", 0), ("refused", 2)])
def test_an_end_is_passed_on(act: str, code: int, worker, tmp_path: Path, capfd):
    heard: list[dict] = []
    assert supervise(worker(act), on_event=heard.append) == code
    assert lives(tmp_path) == 1
    assert [e["event"] for e in heard] == ["folder", "start", "step", "end"] and heard[2]["loss"] == 1.5
    output = capfd.readouterr()
    assert (output.out, output.err) == (("printed\n", "") if act == "done" else ("", "error: no\n"))


def test_an_end_that_nobody_told_is_written(worker, tmp_path: Path):
    """The first of several ranks, which writes, may be gone before it knows why another one has failed."""
    assert supervise(worker("left")) == 3 and lives(tmp_path) == 1
    (end,) = of_kind(tmp_path / "run", "end")
    assert (end["status"], end["step"], end["error"]) == ("failed", 1, "out of GPU memory at step 2")
    assert "out of GPU memory at step 2" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("act", "cause", "change"),
    [
        ("kill", "it was killed (SIGKILL), by the system or by hand", "nothing"),
        ("bitsandbytes", "Error out of memory at line 380 in file /src/csrc/pythonInterface.c", "micro-batch 4 -> 2"),
        ("restart", "NCCL error: out of memory", "nothing"),
    ],
)
def test_a_death_is_followed_by_another_life(act: str, cause: str, change: str, worker, tmp_path: Path):
    told: list[str] = []
    assert supervise(worker(act, "done"), tell=told.append) == 0
    assert lives(tmp_path) == 2
    (restart,) = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "restart"]
    assert (restart["cause"], restart["change"], restart["step"]) == (cause, change, 1)
    assert len(told) == 1 and cause in told[0] and told[0].startswith("note: the run died after step 1: ")


def test_killed_after_its_end(worker, tmp_path: Path):
    """While the report is written, say: the run is done, nothing is started again."""
    assert supervise(worker("kill at the end")) == 0 and lives(tmp_path) == 1


def test_it_gives_up(worker, tmp_path: Path):
    with pytest.raises(UserError) as caught:
        supervise(worker("kill"))
    assert caught.value.exit_code == EXIT_FAILED and "without getting on" in caught.value.what
    assert 3 <= lives(tmp_path) <= 6, "each life changes something or it is the last but one"


def test_a_worker_that_hangs_is_ended_and_another_goes_on(worker, tmp_path: Path):
    told: list[str] = []
    heard: list[dict] = []
    assert supervise(worker("hang", "done"), tell=told.append, on_event=heard.append, least_silence_s=0.5) == 0
    assert lives(tmp_path) == 2 and "beat" not in {e["event"] for e in heard}
    (restart,) = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "restart"]
    assert restart["cause"].startswith("it hung: no sign of life for ") and restart["change"] == "nothing"
    assert len(told) == 1 and restart["cause"] in told[0]


def test_a_worker_that_always_hangs(worker, tmp_path: Path):
    with pytest.raises(UserError) as caught:
        supervise(worker("hang"), least_silence_s=0.2)
    assert caught.value.exit_code == EXIT_FAILED and "it hung" in caught.value.why
    assert lives(tmp_path) == 3


def test_a_worker_that_somebody_stopped_does_not_hang(worker, tmp_path: Path):
    process, pid = start(worker, tmp_path, least_silence_s=0.3)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(pid, signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and lives(tmp_path) == 1, errors


def test_a_signal_between_two_workers(worker, tmp_path: Path):
    """There is nobody to pass it on to: no other worker is started."""

    def stop(text: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    first = [sys.executable, *worker("kill", "done")]
    assert Supervisor(first, lambda run: first, tell=stop).run() == 143 and lives(tmp_path) == 1


def test_a_death_before_there_is_a_run():
    with pytest.raises(UserError) as caught:
        supervise(["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    assert caught.value.what == "the run died before it began" and "killed" in caught.value.why
    assert supervise(["-c", "import sys; sys.exit(2)"]) == 2


def start(
    worker, tmp_path: Path, act: str = "wait", *, least_silence_s: float = 600
) -> tuple[subprocess.Popen[bytes], int]:  # fmt: skip
    """A supervisor in a process of its own, and the pid of its worker, which waits."""
    environment = os.environ | {"LEAST_SILENCE_S": str(least_silence_s)}
    process = subprocess.Popen([sys.executable, "-c", SUPERVISED, *worker(act)], stderr=subprocess.PIPE,
                               env=environment)  # fmt: skip
    waiting = tmp_path / "run" / "waiting"
    end = time.monotonic() + 60
    while not (waiting.exists() and waiting.read_text()):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    return process, int(waiting.read_text())


def gone(pid: int) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_the_worker_and_no_life_follows(number: int, code: int, worker, tmp_path: Path):
    process, pid = start(worker, tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert gone(pid) and lives(tmp_path) == 1


def test_a_failure_after_a_signal_is_told(worker, tmp_path: Path):
    """Of several ranks the first one, which writes, may be ended while they save."""
    process, _ = start(worker, tmp_path, "wait, fail")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    (end,) = of_kind(tmp_path / "run", "end")
    assert (end["status"], end["error"]) == ("failed", "no space")


def test_the_worker_dies_with_its_supervisor(worker, tmp_path: Path):
    """Else `kill -9` of the command would leave a training behind that nobody sees."""
    process, pid = start(worker, tmp_path)
    process.kill()
    process.communicate(timeout=60)
    assert gone(pid)


def test_a_stopped_run_is_not_started_again(worker, tmp_path: Path):
    """Killed by the system while it saves after a SIGTERM: the scheduler wants it gone."""
    process, pid = start(worker, tmp_path)
    os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == 143 and lives(tmp_path) == 1


def test_a_terminal_stays_a_terminal(worker):
    """Standard error of the worker is a terminal where ours is one."""
    import pty

    master, slave = pty.openpty()
    code = "import os, sys; print(os.isatty(2), file=sys.stderr)"
    program = (
        "import sys; from fitune.train.supervise import Supervisor; "
        f"sys.exit(Supervisor([sys.executable, '-c', {code!r}], list).run())"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=slave, stdin=slave, stdout=slave)
    os.close(slave)
    shown = b""
    while b"\n" not in shown:
        shown += os.read(master, 100)
    assert process.wait(60) == 0 and shown.strip() == b"True", json.dumps(shown.decode())
