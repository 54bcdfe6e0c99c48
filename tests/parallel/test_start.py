"""Processes that have not come for the same job, or of which one cannot begin: one message, one code, nobody left."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from fitune.errors import EXIT_BAD_INPUT, EXIT_DOES_NOT_FIT, EXIT_FAILED
from tests.conftest import ROOT
from tests.parallel.ranks import free_port
from tests.parallel.zero_ranks import needs_deepspeed
from tests.train.tiny_run import Command, make_base, of_kind, questions, write_rows

GIB = 1 << 30


def as_rank(rank: int, size: int, port: int, fault: Callable[[int], None] | None) -> None:
    """This process is the rank of a run that torchrun has started on one machine."""
    import torch

    from fitune.parallel.world import World

    torch.set_num_threads(1)
    os.environ.update(World(rank, size, rank, size, "127.0.0.1", port).environment())
    if fault is not None:
        fault(rank)


def start(folder: Path, settings: Sequence[dict[str, Any]], fault: Callable[[int], None] | None = None) -> list[Any]:
    """Exit code and words of each rank, which has a recipe of its own."""
    port, commands = free_port(), []
    for rank, values in enumerate(settings):
        here = folder / f"rank-{rank}"
        here.mkdir()
        (here / "recipe.yaml").write_text(yaml.safe_dump(values))
        prepare = functools.partial(as_rank, rank, len(settings), port, fault)
        commands.append(Command("train", str(here / "recipe.yaml"), cwd=here, prepare=prepare))
    try:
        return [command.wait() for command in commands]
    finally:
        for command in commands:
            if command.process.is_alive():
                command.kill()


def assert_one_message(results: Sequence[Any], code: int, *parts: str) -> None:
    """The first rank's, with these parts; the others end with the same code, silently."""
    (_, words), *others = results
    assert [result[0] for result in results] == [code] * len(results), results
    assert words.count("error: ") == 1 and "Traceback" not in words, words
    assert all(part in words for part in parts), words
    assert not any("error" in text or "Traceback" in text for _, text in others), others


# ---- devices ---------------------------------------------------------------------------------------------------------


def two_gpus(rank: int) -> None:
    """A machine with two cards, of which this process sees those that CUDA_VISIBLE_DEVICES names."""
    from fitune import hardware
    from fitune.hardware import Device

    real = hardware.probe

    def probe(*arguments: Any, **options: Any) -> Any:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        cards = [Device(i, "a card", "NVIDIA", GIB, GIB) for i, name in enumerate(names) if name in ("0", "1")]
        return dataclasses.replace(real(*arguments, **options), devices=tuple(cards))

    hardware.probe = probe
    hardware.check_torch_matches = lambda *arguments: None


@pytest.mark.parametrize(
    ("devices", "size", "parts"),
    [
        ("0,7", 2, ("error: cannot use --devices 0,7", "2 GPUs are there, counted from 0")),
        ("1", 2, ("error: there are 2 processes for 1 GPUs", "each process needs a GPU of its own (process 1 of 2)")),
        (None, 3, ("error: there are 3 processes for 2 GPUs", "(process 2 of 3)")),
    ],
)
def test_devices_that_are_not_there(job: Any, tmp_path: Path, devices: str | None, size: int, parts: tuple[str, ...]):
    settings = job(tmp_path / "run", devices=devices)
    assert_one_message(start(tmp_path, [settings] * size, two_gpus), EXIT_BAD_INPUT, *parts)
    assert not (tmp_path / "run").exists()


# ---- not the same job ------------------------------------------------------------------------------------------------


def other_torch(rank: int) -> None:
    import torch

    if rank == 1:
        torch.__version__ = "2.99.0"  # type: ignore[assignment]


def elsewhere(rank: int) -> None:
    """Each rank on a machine of its own."""
    import socket

    socket.gethostname = lambda: f"node{rank}"  # type: ignore[assignment]


def test_other_versions(job: Any, tmp_path: Path):
    results = start(tmp_path, [job(tmp_path / "run")] * 2, other_torch)
    assert_one_message(results, EXIT_BAD_INPUT, "error: the processes of this run have different versions",
                       'process 1 has torch "2.99.0"')  # fmt: skip


def test_other_settings(job: Any, tmp_path: Path):
    settings = job(tmp_path / "run")
    results = start(tmp_path, [settings, settings, settings | dict(lora_r=8)], elsewhere)
    assert_one_message(results, EXIT_BAD_INPUT, "error: the processes of this run were given different settings",
                       "process 0 on node0 has lora-r 4, process 2 on node2 has lora-r 8")  # fmt: skip


def test_a_recipe_that_only_one_cannot_read(job: Any, tmp_path: Path):
    settings = job(tmp_path / "run")
    results = start(tmp_path, [settings, settings | dict(lora_rank=8)], elsewhere)
    assert_one_message(results, EXIT_BAD_INPUT, "error: ", "lora_rank", "(process 1 on node1 of 2)")


def test_where_files_lie_may_differ_but_not_what_they_hold(job: Any, tmp_path: Path):
    settings = job(tmp_path / "run", steps=1, eval_every=1)
    copied = Path(shutil.copy(settings["data"], tmp_path / "copy.jsonl"))
    results = start(tmp_path, [settings, settings | dict(data=str(copied))])
    assert [code for code, _ in results] == [0, 0], results
    assert "next:" in results[0][1] and "next:" not in results[1][1], "the others are silent"
    other = write_rows(tmp_path / "other.jsonl", [*questions(23), dict(prompt="What?", response="It is something.")])
    (tmp_path / "again").mkdir()
    settings = settings | dict(out=str(tmp_path / "run2"))
    results = start(tmp_path / "again", [settings, settings | dict(data=str(other))])
    assert_one_message(results, EXIT_BAD_INPUT, "error: the processes of this run have read different ",
                       "put the same data and tokenizer on every machine")  # fmt: skip
    assert not (tmp_path / "run2").exists()


def test_another_model(job: Any, tmp_path: Path):
    settings = job(tmp_path / "run")
    other = make_base(tmp_path / "other", num_hidden_layers=3)
    results = start(tmp_path, [settings, settings | dict(model=str(other))])
    assert_one_message(results, EXIT_BAD_INPUT, "error: the processes of this run have read different models")


# ---- the meeting -----------------------------------------------------------------------------------------------------


def exchanged(store: Any, size: int, first: int) -> list[tuple[list[str], Any]]:
    """What each process has heard, and its part of the store; the one of this rank comes before the others."""
    from fitune.parallel.start import _exchanged
    from fitune.parallel.world import World

    def come(rank: int) -> tuple[list[str], Any]:
        time.sleep(0.3 * (rank != first))
        heard, own = _exchanged(store, World(rank, size, rank, size), {"of": f"{size}.{rank}"}, 30.0)
        return [said["of"] for said in heard], own

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(come, range(size)))


def test_what_others_left_in_the_store_is_not_heard():
    """torchrun starts fewer processes in place of those that have ended, or more, with the same store."""
    import torch.distributed as dist

    store = dist.HashStore()
    for size, first in ((3, 0), (2, 1), (2, 0), (4, 2)):
        found = exchanged(store, size, first)
        assert [heard for heard, _ in found] == [[f"{size}.{rank}" for rank in range(size)]] * size
        assert not any(own.check(["word"]) for _, own in found)
        found[0][1].set("word", "")
        assert all(own.check(["word"]) for _, own in found)


@pytest.mark.parametrize(("rank", "words"), [(0, "process 1, 2$"), (2, "process 0, or")])
def test_who_is_waited_for_in_vain(rank: int, words: str):
    import torch.distributed as dist

    from fitune.parallel.start import _exchanged
    from fitune.parallel.world import World

    with pytest.raises(RuntimeError, match=f"waited in vain for {words}"):
        _exchanged(dist.HashStore(), World(rank, 3, rank, 3), {}, 0.2)


@pytest.mark.parametrize("what", ["no data named", None])
def test_a_problem_is_told_where_nobody_comes(monkeypatch: pytest.MonkeyPatch, what: str | None):
    from fitune.errors import UserError
    from fitune.parallel.start import meet
    from fitune.parallel.world import World

    world = World(0, 2, 0, 2, port=free_port())
    for name, value in world.environment().items():
        monkeypatch.setenv(name, value)
    problem = None if what is None else UserError(what, "training needs a data file", "add --data FILE")
    with pytest.raises(UserError) as caught:
        meet(world, None, "cpu", problem, 1.0)
    assert caught.value.what == (what or "the 2 processes of this run did not come together")
    assert caught.value.exit_code == (EXIT_FAILED if what is None else EXIT_BAD_INPUT)


def test_a_problem_is_told_where_the_others_are_gone():
    from fitune.errors import UserError
    from fitune.parallel.world import Single
    from fitune.train.ranks import together

    class Gone(Single):
        size = 2

        def gather(self, value: Any) -> Any:
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(UserError, match="no weights"), together(Gone()):
        raise UserError("no weights", "the file is gone", "copy it again")
    with pytest.raises(RuntimeError, match="closed by peer"), together(Gone()):
        pass


def without_network(rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "none0"


def test_machines_that_do_not_reach_each_other(job: Any, tmp_path: Path):
    for code, words in start(tmp_path, [job(tmp_path / "run")] * 2, without_network):
        assert code == EXIT_FAILED and "Traceback" not in words
        assert "error: the processes of this run have met, but cannot exchange anything" in words
        assert "GLOO_SOCKET_IFNAME" in words


# ---- one that cannot begin -------------------------------------------------------------------------------------------


def test_data_that_one_does_not_have(job: Any, tmp_path: Path):
    settings = job(tmp_path / "run")
    results = start(tmp_path, [settings, settings | dict(data=str(tmp_path / "gone.jsonl"))])
    assert_one_message(results, EXIT_BAD_INPUT, "gone.jsonl", "(process 1 of 2)")
    assert not (tmp_path / "run").exists()


def test_what_only_the_first_finds_out(job: Any, tmp_path: Path):
    """It plans, and makes the run folder; the others wait for both."""
    settings = job(tmp_path / "run", ram=0.0005)
    assert_one_message(start(tmp_path, [settings] * 2), EXIT_DOES_NOT_FIT, "does not fit on CPU")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").touch()
    (tmp_path / "again").mkdir()
    settings = job(tmp_path / "run")
    assert_one_message(start(tmp_path / "again", [settings] * 2), EXIT_BAD_INPUT, "cannot create a run in ")


def without_deepspeed(rank: int) -> None:
    from fitune.errors import UserError
    from fitune.parallel import zero_library

    def check(*arguments: Any) -> None:
        raise UserError("ZeRO needs DeepSpeed", "it is not installed", "install it")

    if rank == 1:
        zero_library.check = check


@needs_deepspeed
def test_a_library_that_one_does_not_have(job: Any, tmp_path: Path):
    settings = job(tmp_path / "run", parallel="zero1")
    results = start(tmp_path, [settings] * 2, without_deepspeed)
    assert_one_message(results, EXIT_BAD_INPUT, "error: ZeRO needs DeepSpeed", "it is not installed (process 1 of 2)")
    assert not (tmp_path / "run").exists()


def fails(*arguments: Any, **options: Any) -> None:
    """Not a problem that anybody has thought of."""
    raise ZeroDivisionError("by one")


def broken(rank: int) -> None:
    from fitune.train import session

    if rank == 1:
        session.open_session = fails  # type: ignore[assignment]


def broken_at_once(rank: int) -> None:
    from fitune.cli import api

    if rank == 1:
        api.make_recipe = fails  # type: ignore[assignment]


@pytest.mark.parametrize("fault", [broken, broken_at_once])
def test_one_that_fails_ends_the_others(job: Any, tmp_path: Path, fault: Callable[[int], None]):
    (code, words), (other, traceback) = start(tmp_path, [job(tmp_path / "run")] * 2, fault)
    assert (code, other) == (EXIT_FAILED, EXIT_FAILED) and "ZeroDivisionError: by one" in traceback
    assert "error: a process has failed: ZeroDivisionError" in words and "by one (process 1 of 2)" in words


def without_weights(rank: int) -> None:
    """The second rank's file ends in the middle."""
    from fitune.errors import UserError
    from fitune.train import session

    def fails(*arguments: Any, **options: Any) -> None:
        raise UserError("cannot read model.safetensors", "it ends in the middle", "copy it again")

    if rank == 1:
        session.load_model = fails  # type: ignore[assignment]


def test_a_model_that_one_cannot_load(job: Any, tmp_path: Path):
    """The others wait for it somewhere in loading: they find its words when they find that it is gone."""
    (code, words), (other, told) = start(tmp_path, [job(tmp_path / "run")] * 2, without_weights)
    assert (code, other) == (EXIT_BAD_INPUT, EXIT_BAD_INPUT)
    for text in (words, told):
        assert text.count("error: ") == 1 and "error: cannot read model.safetensors" in text, text
    (end,) = of_kind(tmp_path / "run", "end")
    assert (end["status"], end["error"]) == ("failed", "cannot read model.safetensors")


def test_torchrun_does_not_end_the_one_that_tells(job: Any, tmp_path: Path):
    """It ends all as soon as one has ended: the first process is to be that one."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(job(tmp_path / "run", data=str(tmp_path / "gone.jsonl"))))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fitune"]
    done = subprocess.run([*command, "train", str(tmp_path / "recipe.yaml")], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=200)  # fmt: skip
    words = done.stdout + done.stderr
    assert words.count("error: ") == 1 and "error: cannot find the data file" in words, words
    assert "failed (exitcode: 2) local_rank: 0" in words, words


def test_a_job_that_is_started_again_is_the_run_that_is_there(job: Any, tmp_path: Path):
    """Wherever its first process is now."""
    from fitune.errors import UserError
    from fitune.recipe import Recipe
    from fitune.train.loop import _same_run

    recipe = Recipe(**job(tmp_path / "run", lang="en"))
    assert _same_run(recipe) is None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(recipe.to_yaml())
    assert _same_run(recipe) == _same_run(recipe.with_(lang="zh", devices=None)) == tmp_path / "run"
    assert _same_run(recipe.with_(lr=1.0)) is None
    (tmp_path / "run" / "recipe.yaml").write_text("lora_rank: 8")
    with pytest.raises(UserError, match="lora_rank"):
        _same_run(recipe)


def test_torchrun_starts_them_again_and_they_meet_anew(job: Any, tmp_path: Path):
    """Its store outlives the processes: what those before have told is there still."""
    settings = job(tmp_path / "run", steps=1)
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(settings | dict(lora_rank=8)))
    (tmp_path / "again.py").write_text(
        "import os, sys\n"
        "from fitune.cli.main import main\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "sys.exit(main(['train', 'bad.yaml' if first and os.environ['RANK'] == '1' else 'good.yaml']))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run([*command, "--master-port", str(free_port()), "again.py"], capture_output=True, text=True,
                          cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                          timeout=200)  # fmt: skip
    words = done.stdout + done.stderr
    assert done.returncode == 0 and words.count("error: ") == 1 and "next:" in words, words
