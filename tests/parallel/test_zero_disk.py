"""ZeRO's optimizer state on a disk: the same training, files that go again, and what is refused before it begins."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fitune import recipe as recipes
from fitune.errors import EXIT_BAD_INPUT, UserError
from fitune.files import clean_leftovers
from fitune.memory.zero import zero_bytes
from fitune.parallel import zero_config, zero_disk
from fitune.parallel.group import Group
from fitune.parallel.replicated import share_of
from fitune.parallel.slices import Saved
from fitune.parallel.world import Single
from fitune.parallel.zero_config import config_of, sub_groups
from fitune.parallel.zero_library import check
from fitune.plan import Plan
from tests.parallel.jobs import assert_same, batches_of, plan_of, records, train
from tests.parallel.ranks import run_ranks
from tests.parallel.runs import Ranks, losses
from tests.parallel.runs import train as train_run
from tests.parallel.zero_ranks import make, needs_deepspeed, why_no_async_io
from tests.train.tiny_run import make_base, questions, write_rows

FULL: dict[str, Any] = dict(method="full", adapter=None)
WIDE: dict[str, Any] = dict(hidden_size=192, intermediate_size=512)  # more than 1 MiB of masters a rank
SMALL_GROUP = 300_000  # elements: several groups, each above that
needs_async_io = pytest.mark.usefixtures("async_io")


@pytest.fixture(scope="module")
def async_io() -> None:
    if (why := why_no_async_io()) is not None:
        pytest.skip(why)


def plan_on(folder: Path, **changes: Any) -> Plan:
    return plan_of(**(dict(**FULL, parallel="zero3", world_size=2, lr=1e-3, offload_optimizer="nvme",
                           offload_folder=str(folder)) | changes))  # fmt: skip


def on_disk(folder: Path) -> dict[str, int]:
    """Files of DeepSpeed's and their bytes."""
    return {f"{path.parent.name}/{path.name}": path.stat().st_size for path in folder.rglob("*.swp")}


# ---- the same training -----------------------------------------------------------------------------------------------


def trained(group: Group, plans: list[Plan], sub_group: int) -> list[Any]:
    """A step that is given up and four others with each plan; four more of a second engine that has taken the first
    one's state over."""
    zero_config.SUB_GROUP = sub_group
    found = []
    for plan in plans:
        share = lambda some: share_of(some, group.rank, group.size)  # noqa: E731
        engine = make(group, plan, **WIDE)
        with contextlib.suppress(GivenUp):
            engine.step(batches_of(share(records(5, seed=99)), plan), step=0, lr=plan.lr, observe=give_up)
        engine.abandon()
        first = train(engine, share, steps=4)
        files = on_disk(Path(plan.offload_folder)) if plan.offload_folder else {}
        groups = sub_groups([-(-shape.numel() // 2) for shape in engine.shapes.values()])
        state = group.share(engine.state())
        other = make(group, plan, **WIDE)
        tensors, values = state
        other.load_state(SavedHere(tensors), values)
        second = train(other, share, steps=4)
        found.append((first, second, files, groups))
        group.barrier()
    return found


class GivenUp(Exception):
    """When gradients are on the disk."""


def give_up(part: str, index: int) -> None:
    if part == "optimizer":
        raise GivenUp


class SavedHere(Saved):
    """A checkpoint that was not written."""

    def __init__(self, tensors: Any):
        self._tensors = tensors

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def elements(self, name: str, start: int, count: int) -> Any:
        return self._tensors[name].reshape(-1)[start : start + count]


@needs_async_io
@pytest.mark.parametrize("half", [False, True])
def test_as_in_memory(tmp_path: Path, half: bool):
    """No number is changed on its way to the disk and back. (Where a group ends changes rounding, and in 16 bit what
    comes of it: one group there.)"""
    changes: dict[str, Any] = dict(precision="bf16", base_format="bf16") if half else {}
    plans = [plan_on(tmp_path, offload_optimizer="cpu", **changes).with_(offload_folder=None),
             plan_on(tmp_path, **changes)]  # fmt: skip
    in_memory, there = run_ranks(2, trained, plans, zero_config.SUB_GROUP if half else SMALL_GROUP)[0]
    assert in_memory[2] == {} and (len(there[3]) > 1) is not half
    for mine, other in zip(there[:2], in_memory[:2], strict=True):
        assert_same(mine, other, first=1e-6, later=1e-6)
    swapped = [size for size in there[3] if size * 4 >= zero_config.LEAST_ON_DISK_BYTES]
    states = [size for name, size in there[2].items() if "gradient" not in name]
    assert len(states) == 2 * 3 * len(swapped), "a master and two moments of each group, for both ranks"
    assert sum(states) == pytest.approx(2 * 3 * 4 * sum(swapped), rel=0.01)
    assert os.listdir(tmp_path) == [], "files that nobody needs any more"


@needs_async_io
def test_prediction_of_the_disk(tmp_path: Path):
    """Masters, moments and gradients of both ranks as `memory.zero` has them; parts of gradients that do not fill a
    block stay in RAM."""
    (found,) = run_ranks(2, trained_once, plan_on(tmp_path))[:1]
    files, count = found
    formed = zero_bytes(plan_on(tmp_path), trained=count, frozen_bytes=0, state_bytes=8 * count, unit=0)
    states = sum(size for name, size in files.items() if "gradient" not in name)
    assert states == pytest.approx(2 * 12 * -(-count // 2), rel=0.01)
    assert states <= sum(files.values()) <= 2 * formed.disk * 1.01


def trained_once(group: Group, plan: Plan) -> Any:
    engine = make(group, plan, **WIDE)
    train(engine, lambda some: share_of(some, group.rank, group.size), steps=2)
    files = on_disk(Path(plan.offload_folder or ""))
    group.barrier()
    return files, sum(shape.numel() for shape in engine.shapes.values())


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("disk")
    base = make_base(folder / "base", num_hidden_layers=2, **WIDE)
    data = write_rows(folder / "data.jsonl", questions(24))

    def settings(out: Path, **changes: Any) -> dict[str, Any]:
        values = dict(model=str(base), data=str(data), seq_len=128, batch=4, steps=6, lr=1e-3, method="full",
                      devices="cpu", eval_share=0, save_every=2, precision="fp32", warmup=0, schedule="constant",
                      packing=False, out=str(out))  # fmt: skip
        return values | changes

    return settings


def slow_steps(rank: int) -> None:
    """Time to be killed in."""
    from fitune.parallel.zero import ZeroEngine

    step = ZeroEngine.step

    def slowly(self: Any, *arguments: Any, **named: Any) -> Any:
        if named["step"] >= 3:
            time.sleep(600)
        return step(self, *arguments, **named)

    ZeroEngine.step = slowly  # type: ignore[method-assign]


@needs_async_io
def test_a_killed_run_goes_on_and_leaves_no_files(job: Any, tmp_path: Path):
    disk, run = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    assert train_run(1, job(tmp_path / "alone"))[0][0] == "done"
    settings = job(run, parallel="zero3", offload_optimizer="nvme", offload_folder=str(disk))
    first = Ranks(2, settings, prepare=slow_steps)
    until = time.monotonic() + 200
    while not (run / "checkpoints").is_dir() or not any((run / "checkpoints").glob("step*")):
        assert time.monotonic() < until and all(p.is_alive() for p in first.processes), "no checkpoint"
        time.sleep(0.2)
    assert len(on_disk(disk)) > 0
    first.signal(signal.SIGKILL)
    for process in first.processes:
        process.join(20)
    assert len(os.listdir(disk)) == 1, "nobody was there to remove them"
    told = json.loads((run / "deepspeed.json").read_text())
    assert told["zero_optimization"]["offload_optimizer"]["nvme_path"] == str(disk)
    assert train_run(2, settings, resume=str(run))[0][0] == "done"
    assert os.listdir(disk) == []
    assert losses(run)[-6:] == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)


def test_files_go_with_who_made_them(tmp_path: Path):
    scratch = zero_disk.Scratch(tmp_path, Single())
    (scratch.path / "state").write_text("x")
    clean_leftovers(tmp_path)
    assert (scratch.path / "state").is_file(), "another run does not take them for a dead one's"
    del scratch
    assert os.listdir(tmp_path) == []
    code = (
        "import os, signal; from pathlib import Path; from fitune.parallel import zero_disk, world\n"
        f"made = zero_disk.Scratch(Path({str(tmp_path)!r}), world.Single())\n"
        "(made.path / 'state').write_text('x')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert os.listdir(tmp_path) == [], "a process that ends"
    subprocess.run([sys.executable, "-c", f"{code}os.kill(os.getpid(), signal.SIGKILL)"], check=False)
    assert len(os.listdir(tmp_path)) == 1
    zero_disk.check_folder(tmp_path, print)
    assert os.listdir(tmp_path) == [], "one that was killed: before the next"


# ---- what cannot be --------------------------------------------------------------------------------------------------

NVME: dict[str, Any] = dict(parallel="zero3", method="full", offload_optimizer="nvme", offload_folder="disk")


@pytest.mark.parametrize(
    ("values", "why", "fix"),
    [
        (NVME | dict(offload_folder=None), "needs a folder on that disk", "name one with offload_folder"),
        (NVME | dict(parallel="zero2"), "parallel zero2 has no offload_optimizer nvme", "use cpu, or parallel zero3"),
        (NVME | dict(method="lora"), "adapters have 12 bytes", "use method full, or offload_optimizer cpu"),
        (NVME | dict(method="auto"), "is for method full", "use method full"),
        (NVME | dict(offload_optimizer="cpu"), "offload_folder is for offload_optimizer nvme", "leave it out"),
        (
            NVME | dict(offload_params="nvme"),
            "weights stay off the disk in this version:",
            "one of: none, cpu",
        ),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, Any], why: str, fix: str):
    with pytest.raises(UserError) as caught:
        recipes.build({name: value for name, value in values.items() if value is not None})
    assert why in caught.value.why and fix in caught.value.fix and caught.value.exit_code == EXIT_BAD_INPUT


def test_lion_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="optimizer lion cannot be used with --offload-optimizer"):
        check(plan_on(tmp_path, optimizer="lion"))


def refused(call: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.exit_code == EXIT_BAD_INPUT and "--offload-optimizer cpu" in caught.value.fix
    return caught.value


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    problem = refused(lambda: zero_disk.check_folder(tmp_path / "none", print))
    assert problem.what == f"cannot keep optimizer state in {tmp_path / 'none'}"
    assert problem.why == "there is no such folder" and "is its disk mounted?" in problem.fix
    (tmp_path / "file").write_text("")
    assert refused(lambda: zero_disk.check_folder(tmp_path / "file", print)).why == "it is a file"
    whole = os.open

    def opened(path: Any, flags: int, *more: Any, error: int, wanted: int, **named: Any) -> int:
        if "probe" in str(path) and flags & wanted:
            raise OSError(error, os.strerror(error), str(path))
        return whole(path, flags, *more, **named)

    for error, wanted, why in ((13, os.O_CREAT, "you have no permission there"), (30, os.O_CREAT, "read-only"),
                               (22, getattr(os, "O_DIRECT", 0), "cannot be written past the cache")):  # fmt: skip
        monkeypatch.setattr(os, "open", functools.partial(opened, error=error, wanted=wanted))
        assert why in refused(lambda: zero_disk.check_folder(tmp_path, print)).why
        monkeypatch.setattr(os, "open", whole)
        assert os.listdir(tmp_path) == ["file"], "no probe is left"


@needs_deepspeed
def test_a_run_without_its_folder_leaves_nothing_behind(job: Any, tmp_path: Path):
    settings = job(tmp_path / "run", parallel="zero3", offload_optimizer="nvme", offload_folder=str(tmp_path / "none"))
    with pytest.raises(AssertionError, match="cannot keep optimizer state in .*none\n  why: there is no such folder"):
        train_run(2, settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "words"), [("tmpfs", "is in host memory (tmpfs)"), ("nfs4", "is on a network disk (nfs4)"), ("ext4", "")]
)
def test_what_is_no_local_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str):
    told: list[str] = []
    monkeypatch.setattr(zero_disk, "_kind", lambda folder: kind)
    zero_disk.check_folder(tmp_path, told.append)
    assert len(told) == bool(words) and all(words in text for text in told)


def test_kind_of_a_file_system():
    if not Path("/proc/self/mounts").exists():
        pytest.skip("this system does not list its mounts")
    assert zero_disk._kind(Path("/proc")) == "proc"
    assert zero_disk._kind(Path("/")) not in (None, "proc")


@pytest.mark.parametrize(
    ("change", "why", "fix"),
    [
        ("system", "and this is darwin", "use --offload-optimizer cpu"),
        ("c++", "there is no C++ compiler (c++)", "`apt-get install g++`, or use"),
        ("ninja", "there is no ninja", "`pip install ninja`, or use"),
        ("cuda", "is compiled with the CUDA toolkit, and there is none", "install it (CUDA_HOME), or use"),
        ("libaio", "async_io needs libaio, which is not installed", "`apt-get install libaio-dev`, or use"),
    ],
)
def test_tools_that_are_not_installed(monkeypatch: pytest.MonkeyPatch, change: str, why: str, fix: str):
    monkeypatch.setattr(sys, "platform", "darwin" if change == "system" else "linux")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == change else f"/bin/{name}")
    monkeypatch.setattr(zero_disk, "_needs_cuda_toolkit", lambda: change == "cuda")
    builder = SimpleNamespace(is_compatible=lambda verbose: change != "libaio")
    problem = zero_disk.missing_tool(builder)
    assert problem is not None and problem.what == "cannot use --offload-optimizer nvme"
    assert why in problem.why and fix in problem.fix and problem.exit_code == EXIT_BAD_INPUT


class Builder:
    """DeepSpeed's, whose compiler fails."""

    def is_compatible(self, verbose: bool) -> bool:
        return True

    def load(self, verbose: bool) -> None:
        raise RuntimeError("Error building extension 'async_io': [1/2] c++ ...\nx.cpp:1:1: fatal error: no torch.h\n1")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    library = SimpleNamespace(git_version_info=SimpleNamespace(installed_ops={}))
    builders = ModuleType("deepspeed.ops.op_builder")
    builders.AsyncIOBuilder = Builder  # type: ignore[attr-defined]
    parts = ModuleType("deepspeed.ops.op_builder.builder")
    parts.CUDAMismatchException = parts.MissingCUDAException = KeyError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder.builder", parts)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", builders)
    monkeypatch.setitem(sys.modules, "deepspeed.ops", ModuleType("deepspeed.ops"))
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setattr(zero_disk, "build_folder", lambda: tmp_path)
    monkeypatch.setattr(zero_disk, "missing_tool", lambda builder: None)
    return library


def test_another_environment_compiles_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """With its headers in other places ninja would compile again, untold, what the first one has."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    found = set()
    for place in ("/a/deepspeed/__init__.py", "/b/deepspeed/__init__.py", "/a/deepspeed/__init__.py"):
        library = ModuleType("deepspeed")
        library.__version__, library.__file__ = "0.19.8", place  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "deepspeed", library)
        found.add(zero_disk.build_folder())
    assert len(found) == 2 and {folder.parent for folder in found} == {tmp_path}


def test_a_compiler_that_fails(failing: Any, tmp_path: Path):
    (tmp_path / "async_io").mkdir()
    (tmp_path / "async_io" / "lock").write_text("")  # a killed compiler's: torch would wait for it
    told: list[str] = []
    problem = refused(lambda: zero_disk.load_async_io(failing, told.append))
    assert problem.why == "DeepSpeed's async_io cannot be compiled here: x.cpp:1:1: fatal error: no torch.h"
    assert str(tmp_path) in problem.fix and told == [zero_disk.COMPILES] and "several minutes" in told[0]
    assert not (tmp_path / "async_io" / "lock").exists()
    (tmp_path / "async_io" / "async_io.so").write_text("")
    told.clear()
    refused(lambda: zero_disk.load_async_io(failing, told.append))
    assert told == [], "it is compiled already"


@pytest.mark.parametrize(
    ("size", "free", "lockable", "what", "why"),
    [
        (2**20, 2**24 - 2**20, None, "not enough disk space in", "take 16 MiB, 15 MiB are free"),
        (2**20, 2**30, 2**23, "may not lock enough memory", "buffers are 16 MiB, a process of yours may lock 8 MiB"),
        (2**16, 2**30, None, "there is too little to offload", "each GPU has 256 KiB of masters"),
    ],
)
def test_no_room(monkeypatch: pytest.MonkeyPatch, size: int, free: int, lockable: int | None, what: str, why: str):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(zero_disk, "lockable_bytes", lambda: lockable)
    problem = refused(lambda: zero_disk.check_room(plan_on(Path("/d")), [size], Single()))
    assert what in problem.what and why in problem.why
    monkeypatch.setattr(zero_disk, "lockable_bytes", lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**24))
    zero_disk.check_room(plan_on(Path("/d")), [2**20], Single())


# ---- configuration ---------------------------------------------------------------------------------------------------


def test_configuration_and_groups():
    told = config_of(plan_on(Path("/d"), device="cuda"))["zero_optimization"]
    assert told["offload_optimizer"] == {"device": "nvme", "pin_memory": True, "nvme_path": "/d", "buffer_count": 4}
    assert told["sub_group_size"] == zero_config.SUB_GROUP and "offload_param" not in told
    limit = zero_config.SUB_GROUP
    assert sub_groups([limit - 1, 1]) == [limit] and sub_groups([limit, 1, 2]) == [limit, 3]
    assert sub_groups([limit - 1, limit, 5]) == [2 * limit - 1, 5]


def test_another_way_has_other_offload():
    """So that a run can go on in any of them."""
    recipe = recipes.build(NVME | dict(offload_params="cpu"))
    assert recipe.with_(lr=1e-3, parallel="zero3").as_dict() == recipe.as_dict() | dict(lr=1e-3)
    for way in ("zero2", "fsdp2", "auto"):
        assert recipe.with_(parallel=way) == recipes.build(dict(method="full", parallel=way))
    in_memory = recipes.build(dict(parallel="zero3", offload_optimizer="cpu", offload_params="cpu"))
    assert in_memory.with_(parallel="zero1") == recipes.build(dict(parallel="zero1", offload_optimizer="cpu"))
