"""The real command with its supervisor: the worker dies in mid-run, nobody resumes it by hand, the end is the same."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fitune.train.run_folder import RunFolder
from tests.faults.inject import BITSANDBYTES
from tests.train.tiny_run import WAIT_S, of_kind, steps_done

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
SETTINGS = ("--micro-batch", "4", "--eval-every", "8", "--save-every", "6")

NCCL = "Cuda failure 2 'out of memory'"
HALF = "recomputed layers 0 -> 2"
FAULTS = {
    "killed by the system": (dict(at="after step", step=8, kind="kill"), "it was killed (SIGKILL)", "nothing"),
    "bitsandbytes prints and exits": (dict(at="after step", step=8, kind="print and exit"), BITSANDBYTES, HALF),
    "a lost communicator": (dict(at="part", part="backward", step=8, kind="nccl"), NCCL, HALF),
}  # fmt: skip


def environment(log: Path, *faults: dict) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "FAULTS": json.dumps({"log": str(log), "faults": faults})}


@pytest.mark.parametrize("kind", FAULTS)
def test_it_starts_again_by_itself(kind: str, harness):
    job = harness(STEPS, *SETTINGS)
    fault, cause, change = FAULTS[kind]
    out = job.new()
    fault = fault | {"once": str(out.with_name(f"{out.name}-struck"))}
    command = [sys.executable, "-m", "tests.faults.inject", *job.arguments(out)]
    done = subprocess.run(command, cwd=job.folder, env=environment(job.log(out), fault), capture_output=True, text=True,
                          timeout=WAIT_S)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    job.assert_whole(out)
    job.assert_same_bits(out)
    (restart,) = of_kind(out, "restart")
    assert restart["cause"].startswith(cause) and restart["change"] == change
    assert restart["from_step"] in (6, 8), "every sixth step, and the one with the best held-out loss"
    assert f"note: the run died after step {restart['step']}: {cause}" in done.stderr
    story = RunFolder(out).info().recovered
    assert story is not None and f"and went on from step {restart['from_step']}" in story
    assert "On the way it " in (out / "report.html").read_text(encoding="utf-8")


def test_a_step_that_never_ends(harness, monkeypatch):
    """The worker hangs: nothing is heard of it, it is ended, another one goes on."""
    from fitune.train.supervise import Supervisor

    job = harness(STEPS, *SETTINGS)
    out = job.new()
    fault = dict(at="part", part="backward", step=8, kind="hang", once=str(out.with_name(f"{out.name}-struck")))
    for name, value in environment(job.log(out), fault).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(job.folder)
    program, told = [sys.executable, "-m", "tests.faults.inject"], []
    again = [*program, "train", "--resume", str(out)]
    code = Supervisor([*program, *job.arguments(out)], lambda run: again, tell=told.append, to_stderr=True,
                      least_silence_s=30).run()  # fmt: skip
    assert code == 0 and len(told) == 1 and "it hung: no sign of life for " in told[0]
    job.assert_whole(out)
    job.assert_same_bits(out)
    story = RunFolder(out).info().recovered
    assert story is not None and "it hung" in story


def test_on_a_terminal(harness):
    """A progress bar, Ctrl-C typed once and heard once, saved, the exit code kept."""
    job = harness(STEPS, *SETTINGS)
    out = job.new()
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "fitune", *job.arguments(out), "--steps", "4000", "--eval-share", "0"]
    process = subprocess.Popen(command, cwd=job.folder, env=environment(job.log(out)) | {"TERM": "xterm"}, stdin=slave,
                               stdout=slave, stderr=slave, start_new_session=True,
                               preexec_fn=_own_the_terminal)  # fmt: skip
    os.close(slave)
    shown, end, sent = b"", time.monotonic() + WAIT_S, False
    while process.poll() is None:
        assert time.monotonic() < end, shown.decode()
        shown += _available(master)
        if not sent and steps_done(out) >= 3:
            os.write(master, b"\x03")
            sent = True
    shown += _available(master)
    text = shown.decode()
    assert process.returncode == 130, text
    assert text.count("stopping: this step is finished and saved first") == 1
    assert "\x1b[" in text and "continue with: fitune train --resume" in text
    assert of_kind(out, "end")[-1]["status"] == "interrupted"
    assert of_kind(out, "checkpoint")[-1]["step"] == steps_done(out)


def _own_the_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _available(master: int) -> bytes:
    import select

    if not select.select([master], [], [], 0.05)[0]:
        return b""
    try:
        return os.read(master, 65536)
    except OSError:  # the other end is closed
        return b""


def test_a_closed_terminal_saves_and_stops(harness):
    """The window is closed: SIGHUP, and nothing can be printed any more."""
    job = harness(STEPS, *SETTINGS)
    out = job.new()
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "fitune", *job.arguments(out), "--steps", "4000", "--eval-share", "0"]
    process = subprocess.Popen(command, cwd=job.folder, env=environment(job.log(out)), stdin=slave, stdout=slave,
                               stderr=slave, start_new_session=True, preexec_fn=_own_the_terminal)  # fmt: skip
    os.close(slave)
    end = time.monotonic() + WAIT_S
    while process.poll() is None and steps_done(out) < 3:
        assert time.monotonic() < end
        _available(master)
    os.close(master)
    assert process.wait(WAIT_S) == 143
    assert of_kind(out, "end")[-1]["status"] == "terminated"
    assert of_kind(out, "checkpoint")[-1]["step"] == steps_done(out)


def test_kill_of_the_command_ends_everything(harness):
    """`kill -9` of the command itself: its worker dies too, and the run can be resumed at once."""
    job = harness(STEPS, *SETTINGS)
    out = job.new()
    command = [sys.executable, "-m", "fitune", *job.arguments(out), "--steps", "4000", "--eval-share", "0"]
    process = subprocess.Popen(command, cwd=job.folder, env=environment(job.log(out)), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    end = time.monotonic() + WAIT_S
    while process.poll() is None and steps_done(out) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT_S)
    time.sleep(1)
    before = steps_done(out)
    time.sleep(1)
    assert steps_done(out) == before and RunFolder(out).info().status == "killed"


def test_from_python(harness, monkeypatch):
    """`supervise=True`: the same result as in this process, the events come here, a refusal is an error here."""
    import fitune
    from fitune.errors import UserError

    job = harness(STEPS, *SETTINGS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    settings = dict(data=str(job.data), batch=4, seq_len=128, precision="fp32", lr=5e-3, lora_r=4, steps=STEPS,
                    micro_batch=4, eval_every=8, save_every=6)  # fmt: skip
    out, heard = job.new(), []
    result = fitune.train(str(job.base), out=str(out), supervise=True, on_event=heard.append, **settings)
    assert (result["status"], result["exit_code"], result["steps"]) == ("done", 0, STEPS)
    assert result["loss"] == of_kind(job.whole, "step")[-1]["loss"]
    assert [e["step"] for e in heard if e["event"] == "step"] == list(range(1, STEPS + 1))
    job.assert_same_bits(out)
    with pytest.raises(UserError) as caught:
        fitune.train(str(job.base), out=str(out), supervise=True, **settings)
    assert caught.value.exit_code == 2 and "its exit code is 2" in caught.value.why
