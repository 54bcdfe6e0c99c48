"""Checkpoints that each rank writes a part of: any layout reads them, damage and full disks are told."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fitune.engine.engine import Engine
from fitune.errors import UserError
from fitune.export import export_run
from fitune.parallel.context import ContextEngine
from fitune.parallel.group import Group
from fitune.parallel.pipeline import PipelineEngine, open_stage
from fitune.parallel.replicated import share_of
from fitune.parallel.sharded_state import ShardedEngine
from fitune.parallel.slices import Parts, Slice
from fitune.parallel.tensor_engine import TensorEngine
from fitune.parallel.world import SAME_STATE, Single
from fitune.parallel.zero import ZeroEngine
from fitune.plan import Plan
from fitune.recipe import Parallel
from fitune.train import checkpoint, tensor_files, work
from fitune.train.run_folder import RunFolder
from fitune.train.saver import Saver
from fitune.train.tensor_files import TensorFiles, write_tensors
from tests.parallel.jobs import assert_same, batches_of, make_built, plan_of, records
from tests.parallel.ranks import run_ranks
from tests.parallel.runs import assert_same_run
from tests.parallel.runs import train as train_run
from tests.parallel.test_sharded import SHARDED, make
from tests.train.tiny_run import of_kind

FULL: dict[str, Any] = dict(method="full", adapter=None, micro_batch=1)


def engine_of(group: Single, plan: Plan) -> Engine:
    if plan.parallel == "fsdp2":
        return make(group, plan)  # type: ignore[arg-type]
    if plan.parallel == "pp":
        built = make_built(plan, before_fill=lambda made: open_stage(made, plan, group))
        return PipelineEngine(built, plan, group)  # type: ignore[arg-type]
    return Engine(make_built(plan), plan)


def steps(engine: Engine, group: Single, numbers: range) -> Any:
    """Some steps; losses and what is trained after them."""
    told = []
    for step in numbers:
        some = records(4, seed=step)
        if engine.plan.parallel == "fsdp2":
            some = share_of(some, group.rank, group.size)
        result = engine.step(batches_of(some, engine.plan), step=step, lr=engine.plan.lr)
        told.append((result.loss, result.grad_norm, result.num_targets))
    return told, {name: tensor.clone() for name, tensor in engine.trained_tensors().items()}


def begun(group: Single, plan: Plan, folder: Path) -> Any:
    """Two steps, saved behind the training's back, which goes on meanwhile."""
    torch.set_num_threads(1)
    engine = engine_of(group, plan)
    steps(engine, group, range(2))
    saver = Saver(folder, 2, group=group)
    saver.save(2, engine.state)
    told = steps(engine, group, range(2, 4))
    saver.wait()
    return told


def resumed(group: Single, plan: Plan, folder: Path) -> Any:
    """The two steps after it, and how many elements were read for them."""
    torch.set_num_threads(1)
    engine = engine_of(group, plan)
    saved = checkpoint.load_latest(folder, group=group)
    assert saved is not None and saved.step == 2
    read, real = [0], TensorFiles.elements

    def elements(self: Any, name: str, start: int, count: int) -> torch.Tensor:
        read[0] += count
        return real(self, name, start, count)

    TensorFiles.elements = elements  # type: ignore[method-assign]
    try:
        engine.load_state(saved.tensors, saved.values)
    finally:
        TensorFiles.elements = real  # type: ignore[method-assign]
    return steps(engine, group, range(2, 4)), read[0]


@pytest.mark.parametrize("changes", [FULL, {}], ids=["full", "lora"])
def test_any_layout_goes_on_from_the_parts(changes: dict[str, Any], tmp_path: Path):
    plan = plan_of(**changes)
    expected = begun(Single(), plan, tmp_path / "one")
    fsdp2, pp = plan_of(**changes, **SHARDED), plan_of(**changes, parallel="pp")
    for name, size, how in (("fsdp2", 3, fsdp2), ("pp", 2, pp)):
        told = run_ranks(size, begun, how.with_(world_size=size), tmp_path / name)
        assert_same(told[0], expected)
        files = sorted((tmp_path / name / "step-00000002").glob("parameters-*.safetensors"))
        assert len(files) == size
    for name, size, how in (("fsdp2", 2, fsdp2), ("one", 2, fsdp2), ("fsdp2", 2, pp), ("pp", 3, fsdp2)):
        told = run_ranks(size, resumed, how.with_(world_size=size), tmp_path / name)
        assert_same(told[0][0], expected)
        elements = sum(t.numel() for t in expected[1].values()) * 3  # with two moments
        if how is fsdp2:
            assert sum(read for _, read in told) == elements, "each rank reads its own and no more"
    for name in ("fsdp2", "pp"):
        assert_same(resumed(Single(), plan, tmp_path / name)[0], expected)


def loaded(group: Group, plan: Plan, folder: Path) -> Any:
    """What a rank has of the state after it was read."""
    torch.set_num_threads(1)
    engine = engine_of(group, plan)
    saved = checkpoint.load_latest(folder, group=group)
    assert saved is not None
    engine.load_state(saved.tensors, saved.values)
    tensors, _ = engine.state()
    return {name: (t.start, t.part.clone()) if isinstance(t, Slice) else t for name, t in tensors.items()}


@pytest.mark.parametrize("missing", ["some", "all"])
def test_parameters_that_have_had_no_update(missing: str, tmp_path: Path):
    """The first of a layer, say, as one that never gets a gradient; or a checkpoint before the first update."""
    plan = plan_of(**FULL)
    engine = engine_of(Single(), plan)
    steps(engine, Single(), range(1))
    tensors, values = engine.state()
    layer = [name for name in engine.names if ".layers.0." in name]
    gone = engine.names if missing == "all" else [layer[0], layer[-1]]
    tensors = {
        name: t for name, t in tensors.items() if not (name.startswith("optimizer") and name.split("|")[1] in gone)
    }
    checkpoint.save(tmp_path, 1, tensors, values, 1)
    ranks = run_ranks(2, loaded, plan_of(**FULL, **SHARDED, world_size=2), tmp_path)
    found = {name for rank in ranks for name in rank}
    assert {name for name in found if name.startswith("optimizer")} >= {n for n in tensors if n.startswith("optimizer")}
    for name in found:
        parts = sorted((rank[name] for rank in ranks if isinstance(rank.get(name), tuple)), key=lambda part: part[0])
        if parts:
            whole = torch.cat([part for _, part in parts])
            expected = tensors[name].reshape(-1) if name in tensors else torch.zeros_like(whole)
            assert torch.equal(whole, expected), name


def test_a_run_in_parts_is_kept_exported_and_read_by_the_library(job: Any, alone: Path, tmp_path: Path):
    run = tmp_path / "run"
    train_run(2, job(run, parallel="fsdp2", keep_checkpoints=1))
    assert_same_run(run, alone)
    folder = run / "checkpoints"
    best = checkpoint.best_step(folder)
    assert best is not None and checkpoint.steps(folder) == sorted({best, 6})
    assert {e["step"] for e in of_kind(run, "checkpoint")} >= {2, 4, 6}
    paths = sorted((folder / "step-00000006").glob("parameters-*.safetensors"))
    assert [path.stem for path in paths] == ["parameters-00001-of-00002", "parameters-00002-of-00002"]
    sizes = [path.stat().st_size for path in paths]
    assert max(sizes) < 1.2 * min(sizes), "each rank writes its half"
    trained = checkpoint.trained(folder, 6)
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    assert sorted(t.numel() for t in trained.values()) == sorted(t.numel() for t in adapter.values())
    with safe_open(str(paths[0]), framework="pt") as file:
        assert all(name.startswith("parameter|") for name in file.keys())  # noqa: SIM118
    export_run(RunFolder.open_existing(run), best=True, out=tmp_path / "best")
    exported = load_file(tmp_path / "best" / "adapter_model.safetensors")
    of_best = checkpoint.trained(folder, best)
    assert sorted(float(t.double().sum()) for t in exported.values()) == pytest.approx(
        sorted(float(t.double().sum()) for t in of_best.values())
    )


# ---- damage, a full disk ---------------------------------------------------------------------------------------------


def parts_of(group: Single, value: float) -> Parts:
    row = torch.full((5,), value) * (group.rank + 1)
    return Parts({"parameter|a": Slice(row, 5 * group.rank, (group.size, 5)),
                  f"optimizer|a{group.rank}|step": torch.tensor(float(group.rank))})  # fmt: skip


def save(group: Single, folder: Path, step: int, keep: int = 5) -> None:
    checkpoint.save(folder, step, parts_of(group, step), {"optimizer": {f"{group.rank}|n": step}}, keep, group)


def damaged(group: Group, folder: Path) -> Any:
    for step in (1, 2):
        save(group, folder, step)
    if group.rank == 1:
        path = folder / "step-00000002" / "state-00003-of-00003.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(bytes(content))
    group.barrier()
    saved = checkpoint.load_latest(folder, group=group)
    assert saved is not None
    return saved.step, saved.notes, saved.tensors["parameter|a"], saved.values["optimizer"]


def test_damage_of_any_part_is_seen_by_all(tmp_path: Path):
    for step, notes, tensor, numbers in run_ranks(3, damaged, tmp_path):
        assert step == 1 and "SHA-256 of state-00003-of-00003.safetensors is not that" in notes[0]
        assert torch.equal(tensor, torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 5))
        assert numbers == {"0|n": 1, "1|n": 1, "2|n": 1}


def full_disk(group: Group, folder: Path, failures: int) -> Any:
    """The second rank's disk is full `failures` times."""
    for step in (1, 2, 3):
        save(group, folder, step)
    real, left = tensor_files.write_out, [failures if group.rank == 1 else 0]

    def write_out(descriptor: int, data: Any) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, data)

    tensor_files.write_out = write_out  # type: ignore[attr-defined]
    saver = Saver(folder, 5, group=group)
    try:
        saver.save(4, lambda: (parts_of(group, 4.0), {"optimizer": {}}))
        saved, problem = saver.wait(), None
    except UserError as error:
        saved, problem = [], error.why
    group.barrier()
    return [s.step for s in saved], problem, checkpoint.steps(folder), len(list(folder.iterdir()))


def test_a_disk_that_is_full_on_one_rank(tmp_path: Path):
    """Older checkpoints make room; without any left the first rank tells it for all."""
    assert run_ranks(2, full_disk, tmp_path / "once", 1) == [([4], None, [2, 3, 4], 3)] * 2
    first, second = run_ranks(2, full_disk, tmp_path / "full", 9)
    assert "the disk is full" in first[1] and second[:2] == ([], None)
    assert first[2:] == second[2:] == ([3], 1), "nothing half-written is left"


def killed(group: Group, folder: Path, victim: int, moment: str) -> Any:
    """Two checkpoints; while the second is being written the victim dies without a word."""
    save(group, folder, 1)

    def dies(*arguments: Any) -> None:
        os._exit(9)

    def watched(path: Path, tensors: Any) -> None:
        if path.name.startswith(moment):
            path.write_bytes(b"half")
            dies()
        write_tensors(path, tensors)

    if group.rank == victim:
        checkpoint.write_tensors = watched  # type: ignore[attr-defined]
        if moment in ("_write_numbers", "prune"):
            setattr(checkpoint, moment, dies)
    saver = Saver(folder, 5, group=group)
    saver.save(2, lambda: (parts_of(group, 2.0), {"optimizer": {}}))
    with pytest.raises(RuntimeError) if group.is_leader else nullcontext():
        saver.wait()


@pytest.mark.parametrize(("victim", "moment"), [
    (1, "parameters"), (1, "state"), (0, "state"), (0, "_write_numbers"), (0, "prune"),
])  # fmt: skip
def test_a_rank_that_is_killed_while_all_write(victim: int, moment: str, tmp_path: Path):
    """The earlier checkpoint is whole, a half one has no name; what is left of it goes with the next write."""
    folder = tmp_path / "checkpoints"
    with pytest.raises(AssertionError, match=f"rank {victim} ended without a word"):
        run_ranks(2, killed, folder, victim, moment)
    newest = 2 if moment == "prune" else 1
    assert checkpoint.steps(folder) == list(range(1, newest + 1))
    found = checkpoint.load_latest(folder)
    assert found is not None and (found.step, found.notes) == (newest, ())
    assert found.tensors["parameter|a"].tolist() == [[newest] * 5, [newest * 2] * 5]
    checkpoint.save(folder, 3, {"parameter|a": torch.zeros(1)}, {}, 5)
    assert {path.name for path in folder.iterdir()} == {f"step-0000000{step}" for step in {1, newest, 3}}


def test_a_part_that_is_gone(tmp_path: Path):
    """Whether its tensors are whole (`pp`) or in slices."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"parameter|a": torch.zeros(3)}, {}, 5)
    folder = tmp_path / "step-00000002"
    content = json.loads((folder / "manifest.json").read_text())
    for name in ("parameters", "state"):
        (folder / f"{name}.safetensors").rename(folder / f"{name}-00001-of-00002.safetensors")
        content["files"][f"{name}-00001-of-00002.safetensors"] = content["files"].pop(f"{name}.safetensors")
    (folder / "manifest.json").write_text(json.dumps(content))
    found = checkpoint.load_latest(tmp_path)
    assert found is not None and found.step == 1 and "does not list all files" in found.notes[0]
    content["files"] |= {name.replace("-00001", "-00002"): entry for name, entry in content["files"].items()}
    (folder / "manifest.json").write_text(json.dumps(content))
    found = checkpoint.load_latest(tmp_path)
    assert found is not None and found.step == 1 and "-00002-of-00002.safetensors" in found.notes[0]


def unwritable(group: Group, folder: Path) -> Any:
    """A rank that cannot write what it has, for whatever reason."""
    parts = parts_of(group, 1.0)
    if group.rank == 1:
        parts["parameter|odd"] = torch.zeros(2, dtype=torch.complex64)
    try:
        checkpoint.save(folder, 1, parts, {"optimizer": {}}, 5, group)
    except UserError as error:
        return error.why, list(folder.iterdir())
    return None


def test_an_error_of_one_rank_is_told_to_all(tmp_path: Path):
    """No rank waits half an hour for one that has failed."""
    assert run_ranks(2, unwritable, tmp_path) == [("torch.complex64", [])] * 2


@pytest.mark.parametrize("way", SAME_STATE)
def test_what_every_rank_has_is_copied_by_the_first(way: str):
    """The others would make a copy of weights and optimizer state in the same host's RAM, for nobody."""
    follower: Any = SimpleNamespace(group=SimpleNamespace(is_leader=False), plan=plan_of(parallel=way))
    untouched: Any = None
    assert work._state(follower, untouched) == ({}, {})


def test_ways_whose_ranks_all_take_part_in_saving():
    assert ContextEngine.state is Engine.state, "cp, as ddp and streamed"
    for engine in (ShardedEngine, PipelineEngine, TensorEngine, ZeroEngine):
        assert engine.state is not Engine.state
    assert {*SAME_STATE, "fsdp2", "pp", "tp", "zero1", "zero2", "zero3", "auto", "none"} == set(get_args(Parallel))


def test_what_is_not_whole_is_no_tensor(tmp_path: Path):
    write_tensors(tmp_path / "a", {"x": Slice(torch.arange(3.0), 2, (5,))})
    with pytest.raises(ValueError, match="x is not there in whole"):
        TensorFiles([tmp_path / "a"])
    write_tensors(tmp_path / "b", {"x": Slice(torch.arange(2.0), 0, (5,))})
    assert TensorFiles([tmp_path / "a", tmp_path / "b"])["x"].tolist() == [0, 1, 0, 1, 2]
    assert TensorFiles([tmp_path / "a", tmp_path / "b"]).elements("x", 1, 3).tolist() == [1, 0, 1]
