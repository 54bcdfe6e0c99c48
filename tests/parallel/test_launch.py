"""One command starts every rank, passes signals on, and ends all of them when one fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fitune import recipe as recipes
from fitune.errors import EXIT_BAD_INPUT, EXIT_DOES_NOT_FIT, EXIT_RESTART, EXIT_TERMINATED, UserError
from fitune.parallel import world as worlds
from fitune.parallel.launch import FAILED_GRACE_S, Launcher, num_processes
from fitune.parallel.world import World, card_of, from_environment
from fitune.train.supervise import for_ranks
from tests.conftest import ROOT
from tests.parallel.runs import assert_same_run
from tests.train.tiny_run import of_kind, steps_done


def recipe(**values: Any) -> recipes.Recipe:
    return recipes.build(dict(model="smollm2", data="demo", batch=8) | values)


# ---- how many, and which card ----------------------------------------------------------------------------------------


def test_how_many_processes():
    assert num_processes(recipe(), 4) == 4 and num_processes(recipe(), 1) == 1 and num_processes(recipe(), 0) == 1
    assert num_processes(recipe(devices="0,2"), 4) == 2 and num_processes(recipe(nproc=2), 4) == 2
    assert num_processes(recipe(parallel="none"), 4) == 1 and num_processes(recipe(batch=3), 4) == 3
    assert num_processes(recipe(devices="cpu"), 4) == 1 and num_processes(recipe(devices="cpu", nproc=2), 4) == 2
    with pytest.raises(UserError) as caught:
        num_processes(recipe(nproc=4), 2)
    assert caught.value.what == "cannot use 4 GPUs" and caught.value.fix == "use --nproc 2"
    with pytest.raises(UserError) as caught:
        num_processes(recipe(devices="2,3"), 2)  # a run that is resumed on another machine, say
    assert (caught.value.what, caught.value.why) == ("cannot use --devices 2,3", "2 GPUs are there, counted from 0")


def test_each_rank_gets_its_own_card():
    def cards(devices: str | None, visible: str | None, size: int = 2) -> list[str]:
        return [card_of(World(rank, size, rank, size), devices, visible, 4) for rank in range(size)]

    assert cards(None, None) == ["0", "1"] and cards("3,1", None) == ["3", "1"]
    assert cards(None, "4,6") == ["4", "6"] and cards("1,0", "GPU-a,GPU-b") == ["GPU-b", "GPU-a"]
    assert cards(None, "5") == ["5", "5"], "a scheduler that shows each process one card"
    with pytest.raises(UserError, match="3 processes for 2 GPUs"):
        cards("0,1", None, 3)
    with pytest.raises(UserError, match="5 processes for 4 GPUs"):
        cards(None, None, 5)
    for devices, visible in (("0,4", None), ("0,2", "4,6")):
        with pytest.raises(UserError, match=f"cannot use --devices {devices}"):
            cards(devices, visible)
    with pytest.raises(UserError, match="named twice"):
        num_processes(recipe(devices="0,0"), 2)


def test_the_place_comes_from_torchrun_or_slurm():
    torchrun = dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1")
    assert from_environment(torchrun) == World(3, 4, 1, 2, "a", 1)
    assert from_environment(torchrun | {"TORCHELASTIC_RUN_ID": "job"}).elastic  # type: ignore[union-attr]
    slurm = dict(
        SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="4", SLURM_LOCALID="1", SLURM_NTASKS_PER_NODE="2", MASTER_ADDR="n1"
    )
    assert from_environment(slurm) == World(1, 4, 1, 2, "n1", 29500)
    assert from_environment({}) is None and from_environment(dict(RANK="0", WORLD_SIZE="1")) is None
    with pytest.raises(UserError) as caught:
        from_environment(torchrun | {"WORLD_SIZE": "many"})
    assert caught.value.why == "WORLD_SIZE is 'many', not a number"


# ---- the launcher alone ----------------------------------------------------------------------------------------------


def launch(code: str, size: int = 2) -> int:
    return Launcher([sys.executable, "-c", code], size, for_ranks(None)[0]).run()


def test_every_rank_knows_its_place(tmp_path: Path):
    code = (f"import os, pathlib; e = os.environ; pathlib.Path({str(tmp_path)!r}, e['RANK']).write_text("
            "' '.join(e[n] for n in ('WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_PORT')))")  # fmt: skip
    assert launch(code, 3) == 0
    texts = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [t[:3] for t in texts] == [["3", str(rank), "3"] for rank in range(3)]
    assert len({t[3] for t in texts}) == 1


def test_a_failure_ends_all_and_is_shown(capfd: pytest.CaptureFixture[str]):
    code = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('no such file: x'); time.sleep(200)"
    started = time.monotonic()
    assert launch(code) == 1 and time.monotonic() - started < 100
    assert "process 1 of 2 failed:\nno such file: x" in capfd.readouterr().err


def test_a_killed_rank_gives_the_shells_code(capfd: pytest.CaptureFixture[str]):
    assert launch("import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(60)") == 137
    assert capfd.readouterr().err == "error: process 1 of 2 was ended by SIGKILL\n"


def test_what_all_say_is_shown_once(capfd: pytest.CaptureFixture[str]):
    assert launch("import sys; sys.stderr.write('the data is broken\\n'); sys.exit(2)") == 2
    assert capfd.readouterr().err.count("the data is broken") == 1


def test_a_rank_that_saves_is_waited_for(tmp_path: Path):
    """The others have ended with the same code long before the first one has written everything."""
    done = tmp_path / "done"
    code = (f"import os, sys, time, pathlib; first = os.environ['RANK'] == '0'; time.sleep(5 * first); "
            f"first and pathlib.Path({str(done)!r}).touch(); sys.exit(143)")  # fmt: skip
    assert launch(code) == EXIT_TERMINATED and done.exists()


@pytest.mark.parametrize(("knows", "after_s"), [(EXIT_DOES_NOT_FIT, FAILED_GRACE_S + 2), (EXIT_BAD_INPUT, 1)])
def test_who_knows_why_decides(capfd: pytest.CaptureFixture[str], knows: int, after_s: float):
    """The first process asks for new ones, since another is gone: with them it would be the same again."""
    code = (f"import os, sys, time\nif os.environ['RANK'] == '0': sys.exit({EXIT_RESTART})\n"
            f"time.sleep({after_s}); sys.stderr.write('error: nothing is left'); sys.exit({knows})")  # fmt: skip
    assert launch(code) == knows
    assert "process 1 of 2 failed:\nerror: nothing is left" in capfd.readouterr().err


def test_who_was_killed_decides(capfd: pytest.CaptureFixture[str]):
    """It may be gone for the others before it has ended for who started it."""
    code = (f"import os, sys, time\nif os.environ['RANK'] == '0': sys.exit({EXIT_RESTART})\n"
            f"time.sleep(1); os.kill(os.getpid(), 9)")  # fmt: skip
    assert launch(code) == 137
    assert capfd.readouterr().err == "error: process 1 of 2 was ended by SIGKILL\n"


def test_signals_reach_all_ranks(tmp_path: Path):
    code = (f"import os, pathlib, signal, sys, time\n"
            f"def stop(*_): pathlib.Path({str(tmp_path)!r}, 'stopped' + os.environ['RANK']).touch(); sys.exit(130)\n"
            f"signal.signal(signal.SIGINT, stop); pathlib.Path({str(tmp_path)!r}, 'up' + os.environ['RANK']).touch()\n"
            f"time.sleep(60)")  # fmt: skip

    def interrupt() -> None:
        while len(list(tmp_path.glob("up*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert launch(code) == 130 and len(list(tmp_path.glob("stopped*"))) == 2


# ---- the real command ------------------------------------------------------------------------------------------------


def test_the_command_stops_in_one_checkpoint_and_goes_on(job: Any, alone: Path, tmp_path: Path):
    """`--nproc 2`, SIGTERM in the middle, the same run on one process: the losses of a run that was never stopped."""
    run = tmp_path / "run"
    settings = job(run, save_every=100)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "fitune", "train", str(tmp_path / "recipe.yaml"), "--nproc", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + 120
    while not (run / "events.jsonl").exists() or steps_done(run) < 1:
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    if process.returncode == 0:
        pytest.skip("the run was over before the signal came")
    assert process.returncode == EXIT_TERMINATED, output
    saved = of_kind(run, "checkpoint")
    assert len(saved) == 1 and saved[0]["step"] == steps_done(run)
    again = subprocess.run([sys.executable, "-m", "fitune", "train", "--resume", str(run), "--nproc", "1"],
                           env=environment, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    ours = [e["loss"] for e in of_kind(run, "step")]
    assert ours == pytest.approx([e["loss"] for e in of_kind(alone, "step")], rel=1e-4)


def test_a_rank_that_is_killed_while_it_saves(job: Any, alone: Path, tmp_path: Path):
    """Half of a checkpoint is no checkpoint: new processes go on from the one before, to the same losses."""
    run = tmp_path / "run"
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(job(run, parallel="fsdp2")))
    part, struck = "state-00002-of-00002.safetensors", str(tmp_path / "struck")
    fault = dict(at="write", name=part, kind="kill", once=struck, after=1)
    faults = json.dumps({"log": str(tmp_path / "log"), "faults": [fault]})
    command = [sys.executable, "-m", "tests.faults.inject", "train", str(tmp_path / "recipe.yaml"), "--nproc", "2"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT), "FAULTS": faults}, cwd=ROOT,
                          capture_output=True, text=True, timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(run, alone)
    (restart,) = of_kind(run, "restart")
    assert restart["from_step"] == 2 and "it was killed (SIGKILL)" in restart["cause"]
    assert not [path for path in (run / "checkpoints").iterdir() if "fitune-tmp" in path.name]


def test_a_rank_that_fails_alone_ends_the_run_in_its_words(job: Any, tmp_path: Path):
    """The first rank, which writes the events, learns only that another one is gone."""
    run = tmp_path / "run"
    done = with_faults(tmp_path, job(run), [dict(at="after step", step=1, kind="nothing left", rank=1)])
    assert done.returncode == EXIT_DOES_NOT_FIT, done.stdout + done.stderr
    (end,) = of_kind(run, "end")
    assert (end["status"], end["error"]) == ("failed", "nothing is left to change")
    assert "nothing is left to change" in (run / "report.html").read_text(encoding="utf-8")


def with_faults(folder: Path, settings: dict[str, Any], faults: list[dict[str, Any]], *options: str) -> Any:
    """The command on two processes, which fail as the faults say: its exit code and words."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    given = json.dumps({"log": str(folder / "log"), "faults": faults})
    command = [sys.executable, "-m", "tests.faults.inject", "train", str(folder / "recipe.yaml"), "--nproc", "2"]
    return subprocess.run([*command, *options], env=os.environ | {"PYTHONPATH": str(ROOT), "FAULTS": given}, cwd=ROOT,
                          capture_output=True, text=True, timeout=240)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "rank", "place"), [("device", None, "GPU"), ("device", 1, "GPU"), ("host", 1, "host")]
)
def test_memory_that_runs_out_in_loading_with_nothing_left_is_told_at_once(
    job: Any, tmp_path: Path, kind: str, rank: int | None, place: str
):
    """As one process says it, and it is not tried again: new processes would find what these have found."""
    done = with_faults(tmp_path, job(tmp_path / "run"), [dict(at="load", kind=kind, rank=rank)])
    assert done.returncode == EXIT_DOES_NOT_FIT, done.stdout + done.stderr
    words = f"out of {place} memory while loading, and nothing is left to change"
    assert done.stderr.count("error: ") == 1 and f"error: {words}" in done.stderr, done.stderr
    (end,) = of_kind(tmp_path / "run", "end")
    assert (end["status"], end["error"]) == ("failed", words)
    assert not of_kind(tmp_path / "run", "restart") and not of_kind(tmp_path / "run", "replan")


def test_the_end_is_told_of_a_first_rank_that_is_stuck(job: Any, tmp_path: Path):
    """Without a supervisor. The first rank waits in an exchange for the other one, which was killed: it is ended, and
    can tell nothing."""
    faults = [dict(at="part", part="backward", step=2, kind="hang", rank=0),
              dict(at="part", part="backward", step=2, kind="kill", rank=1)]  # fmt: skip
    done = with_faults(tmp_path, job(tmp_path / "run"), faults, "--no-supervise")
    assert done.returncode == 128 + signal.SIGKILL, done.stdout + done.stderr
    assert "error: process 1 of 2 was ended by SIGKILL" in done.stderr
    (end,) = of_kind(tmp_path / "run", "end")
    assert (end["status"], end["step"], end["error"]) == ("failed", 2, "process 1 of 2 was ended by SIGKILL")
    assert "was ended by SIGKILL" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_several_processes_need_a_way_to_start(job: Any, tmp_path: Path):
    from fitune.train import run

    with pytest.raises(UserError) as caught:
        run(recipes.build(job(tmp_path / "run", nproc=2)))
    assert caught.value.what == "cannot start 2 processes from here" and "torchrun" in caught.value.fix
    assert not (tmp_path / "run").exists()
    for size, changes, message in ((2, dict(parallel="none"), "--parallel none cannot run on 2 processes"),
                                   (4, dict(batch=3), "4 processes cannot share a batch of 3")):  # fmt: skip
        from fitune.train.ranks import check

        with pytest.raises(UserError, match=message):
            check(recipe(**changes), size)


def test_variables_are_only_added(monkeypatch: pytest.MonkeyPatch):
    environ = {"RANK": "5"}
    worlds.publish(World(1, 2, 1, 2, "host", 7), environ)
    assert environ["RANK"] == "5" and environ["MASTER_ADDR"] == "host" and environ["MASTER_PORT"] == "7"
