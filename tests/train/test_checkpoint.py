"""Checkpoints: whole or absent, verified, pruned, and what a full disk leaves."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fitune import files
from fitune.errors import UserError
from fitune.parallel.slices import Gathered, Parts, Slice
from fitune.train import checkpoint, tensor_files
from fitune.train.saver import Saver

TENSORS = {
    "parameter|a": torch.randn(3, 5), "parameter|b": torch.randn(7).to(torch.bfloat16),
    "optimizer|a|step": torch.tensor(3.0), "optimizer|a|state1": torch.arange(5, dtype=torch.uint8),
    "rng|cpu": torch.get_rng_state(),
    "optimizer|empty": torch.empty(0, 4), "flag": torch.tensor([True, False]), "count": torch.arange(3),
}  # fmt: skip


def save(folder: Path, step: int, keep: int = 2, tensors=TENSORS) -> Path:
    return checkpoint.save(folder, step, tensors, {"scale": 1.0, "step_of": step}, keep)[0]


def test_what_is_written_is_read(tmp_path: Path):
    path = save(tmp_path, 4)
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json", "parameters.safetensors", "state.json", "state.safetensors",
    ]  # fmt: skip
    found = checkpoint.load_latest(tmp_path)
    assert found is not None and (found.step, found.values["step_of"], found.notes) == (4, 4, ())
    assert found.tensors.keys() == TENSORS.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in TENSORS.items())
    assert load_file(path / "parameters.safetensors").keys() == {"parameter|a", "parameter|b"}, "by the library itself"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"]["state.json"]["sha256"] == files.sha256(path / "state.json")


def test_the_newest_and_the_best_stay(tmp_path: Path):
    for step in range(1, 7):
        save(tmp_path, step, keep=2)
        if step == 2:
            checkpoint.mark_best(tmp_path, 2, 1.5)
    assert checkpoint.steps(tmp_path) == [2, 5, 6] and checkpoint.best(tmp_path) == (2, 1.5)
    checkpoint.mark_best(tmp_path, 6, 1.25)
    save(tmp_path, 7, keep=1)
    assert checkpoint.steps(tmp_path) == [6, 7]
    for content in ("{", "[]", "7", '{"step": 6, "eval_loss": 1, "before": 3}'):
        (tmp_path / "best.json").write_text(content)
        assert checkpoint.best(tmp_path) is None


def test_the_best_stays_until_the_next_best_is_there(tmp_path: Path, monkeypatch):
    """It is marked while it is being written: where that fails, or the process is killed, there is still a best one."""
    for step in (1, 2, 3):
        save(tmp_path, step, keep=1)
        if step == 1:
            checkpoint.mark_best(tmp_path, 1, 1.5)
    checkpoint.mark_best(tmp_path, 4, 1.25)
    with monkeypatch.context() as patched, pytest.raises(UserError, match="the disk is full"):
        FullDisk(patched, 100)
        save(tmp_path, 4, keep=1)
    assert checkpoint.steps(tmp_path) == [1, 3] and checkpoint.best(tmp_path) == (1, 1.5)
    save(tmp_path, 4, keep=1)
    assert checkpoint.steps(tmp_path) == [4] and checkpoint.best(tmp_path) == (4, 1.25)


def test_a_damaged_newer_one_takes_the_place_of_none(tmp_path: Path, monkeypatch):
    """The run went on from the one before: neither that nor what it saves next is removed in favour of the damaged."""
    save(tmp_path, 20, keep=1)
    (save(tmp_path, 40, keep=2) / "state.json").write_text("{")
    assert checkpoint.load_latest(tmp_path).step == 20
    with monkeypatch.context() as patched, pytest.raises(UserError, match="the disk is full"):
        patched.setattr(checkpoint, "remove_folder", lambda path: path.name.endswith("40") or files.remove_folder(path))
        FullDisk(patched, 100)
        save(tmp_path, 30, keep=1)
    assert checkpoint.steps(tmp_path) == [20, 40]
    save(tmp_path, 30, keep=1)
    assert checkpoint.load_latest(tmp_path).step == 30 and checkpoint.steps(tmp_path) == [30, 40]
    save(tmp_path, 40, keep=1)
    assert checkpoint.steps(tmp_path) == [40] and checkpoint.load_latest(tmp_path).notes == ()


def test_killed_while_an_old_one_is_removed(tmp_path: Path, monkeypatch):
    """What is left of it has no name any more, and is gone with the next write."""

    def killed(path, **options):
        next(Path(path).iterdir()).unlink()
        raise KeyboardInterrupt

    save(tmp_path, 1)
    save(tmp_path, 2)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(files.shutil, "rmtree", killed)
        checkpoint.prune(tmp_path, 1, 2)
    assert checkpoint.steps(tmp_path) == [2] and len(list(tmp_path.iterdir())) == 2
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("name", ["parameters.safetensors", "state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_one_is_left_out(name: str, damage: str, tmp_path: Path):
    save(tmp_path, 1)
    broken = save(tmp_path, 2) / name
    content = broken.read_bytes()
    if damage == "gone":
        broken.unlink()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        broken.write_bytes(content[:-3] if damage == "cut" else flipped)
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    if (name, damage) == ("manifest.json", "flipped") and found.step == 2:
        return  # a byte of the indentation
    assert found.step == 1
    assert found.notes[0].startswith("the checkpoint of step 2 is damaged (")


@pytest.mark.parametrize("listed", [
    ["state.safetensors"], ["parameters.safetensors", "state-00001-of-00002.safetensors"], [],
    ["parameters.safetensors", "state-/../../other/state.safetensors"],
    ["parameters-00001-of-00001.safetensors", "parameters.safetensors", "state.safetensors"],
])  # fmt: skip
def test_a_manifest_that_lists_other_files(listed: list[str], tmp_path: Path):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "manifest.json"
    content = json.loads(path.read_text())
    entries = content["files"]
    content["files"] = dict.fromkeys(listed, entries["parameters.safetensors"]) | {"state.json": entries["state.json"]}
    path.write_text(json.dumps(content))
    found = checkpoint.load_latest(tmp_path)
    assert found.step == 1 and "does not list all files" in found.notes[0]


def test_a_folder_under_another_name(tmp_path: Path):
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / "step-00000005")
    found = checkpoint.load_latest(tmp_path)
    assert found.step == 1 and "it was written after step 2" in found.notes[0]


class FullDisk:
    """Lets `room` bytes through `write_out`, then the disk is full; what is removed does not come back."""

    def __init__(self, monkeypatch, room: int):
        self.room, self.written, real = room, 0, files.write_out

        def write_out(descriptor, data):
            size = memoryview(data).nbytes
            if self.written + size > self.room:
                real(descriptor, memoryview(data).cast("B")[: max(0, self.room - self.written)])
                self.written = self.room
                raise OSError(errno.ENOSPC, "No space left on device")
            self.written += size
            real(descriptor, data)

        for module in (files, checkpoint, tensor_files):
            monkeypatch.setattr(module, "write_out", write_out)


def test_a_disk_that_is_full_at_any_byte(tmp_path: Path, monkeypatch):
    """At every write of a checkpoint: the earlier one is whole, nothing half-written is left, the message is clear."""
    save(tmp_path / "sizes", 1)
    size = files.size_on_disk(tmp_path / "sizes")
    for room in range(0, size, size // 12):
        folder = tmp_path / f"disk-{room}"
        save(folder, 1)
        with monkeypatch.context() as patched, pytest.raises(UserError) as caught:
            FullDisk(patched, room)
            save(folder, 2)
        assert caught.value.what == f"cannot write {folder / 'step-00000002'}"
        assert "the disk is full" in caught.value.why
        assert [p.name for p in folder.iterdir()] == ["step-00000001"]
        assert checkpoint.load_latest(folder).step == 1


def test_older_ones_make_room(tmp_path: Path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=5)
    checkpoint.mark_best(tmp_path, 1, 0.5)
    real, failures = checkpoint._write, []

    def full_twice(*arguments):
        if len(failures) < 1:
            failures.append(checkpoint.steps(tmp_path))
            raise files.file_error("write", tmp_path, OSError(errno.ENOSPC, "full")) from OSError(errno.ENOSPC, "full")
        real(*arguments)

    monkeypatch.setattr(checkpoint, "_write", full_twice)
    save(tmp_path, 4, keep=5)
    assert failures == [[1, 2, 3]] and checkpoint.steps(tmp_path) == [1, 3, 4], "the best and the newest stay"


def test_what_cannot_be_removed_makes_no_room(tmp_path: Path, monkeypatch):
    """One message, not a loop without an end."""
    for step in (1, 2, 3):
        save(tmp_path, step, keep=5)
    monkeypatch.setattr(checkpoint, "remove_folder", lambda path: None)
    FullDisk(monkeypatch, 100)
    with pytest.raises(UserError) as caught:
        save(tmp_path, 4, keep=5)
    assert "the disk is full" in caught.value.why and checkpoint.steps(tmp_path) == [1, 2, 3]


def test_writing_behind_the_trainings_back(tmp_path: Path, monkeypatch):
    """The state may change at once; the next save waits; each is reported once."""
    import threading

    may_write, real = threading.Event(), checkpoint.write_tensors

    def slow(path, tensors):
        may_write.wait(20)
        real(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", slow)
    saver, state = Saver(tmp_path, 2), {"parameter|a": torch.ones(4)}
    assert saver.save(1, lambda: (state, {})) == [] and checkpoint.steps(tmp_path) == []
    state["parameter|a"].zero_()
    assert saver.poll() == []
    may_write.set()
    finished = saver.save(2, lambda: (state, {}))
    assert [s.step for s in finished] == [1] and [s.step for s in saver.wait()] == [2]
    assert saver.poll() == []
    assert load_file(tmp_path / "step-00000001/parameters.safetensors")["parameter|a"].tolist() == [1.0] * 4
    assert load_file(tmp_path / "step-00000002/parameters.safetensors")["parameter|a"].tolist() == [0.0] * 4


class Watched(torch.Tensor):
    """Stands for a tensor on another device: what is made of it is noted."""

    made: list[tuple[str, tuple, dict]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.made.append((func.__name__, args[1:], kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_copy_goes_to_host_memory_once(tmp_path: Path):
    """Never a second one on the device; what was put together from other ranks is such a copy already."""
    own, part = torch.arange(4.0).as_subclass(Watched), torch.ones(2).as_subclass(Watched)
    saver = Saver(tmp_path, 2)
    for state in ({"parameter|a": own}, Parts({"parameter|a": Slice(part, 0, (2,))})):
        Watched.made.clear()
        copy = saver._copy(state)
        copies = [call for call in Watched.made if call[0] in ("to", "cpu", "clone", "contiguous", "copy_", "detach")]
        assert copy is not None and copies == [("to", ("cpu",), {"copy": True})]
    gathered = Gathered({"parameter|a": torch.ones(4)})
    assert saver._copy(gathered) is gathered


def test_without_room_for_a_copy_it_is_written_at_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("fitune.train.saver.COPY_SHARE", 0.0)
    saver = Saver(tmp_path, 2)
    (saved,) = saver.save(1, lambda: (TENSORS, {}))
    assert saved.step == 1 and saved.blocked_s == saved.seconds and checkpoint.steps(tmp_path) == [1]


def test_a_limit_of_the_recipe_counts(tmp_path: Path):
    """`--ram` holds for the copy too: this process alone is larger than that."""
    (saved,) = Saver(tmp_path, 2, ram_bytes=1 << 20).save(1, lambda: ({"parameter|a": torch.ones(4)}, {}))
    assert saved.step == 1 and saved.blocked_s == saved.seconds


def test_a_format_that_cannot_be_written_is_told(tmp_path: Path):
    """Whatever goes wrong behind the training's back: no checkpoint is missing without a word."""
    saver = Saver(tmp_path, 2)
    saver.save(1, lambda: ({"parameter|a": torch.zeros(2, dtype=torch.complex64)}, {}))
    with pytest.raises(KeyError, match="complex64"):
        saver.wait()


def test_a_failure_in_the_background_is_told(tmp_path: Path, monkeypatch):
    saver = Saver(tmp_path / "checkpoints", 2)
    FullDisk(monkeypatch, 10)
    saver.save(1, lambda: (TENSORS, {}))
    with pytest.raises(UserError, match="the disk is full"):
        saver.wait()
    assert saver.wait() == []
