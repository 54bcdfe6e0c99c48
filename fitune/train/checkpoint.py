"""Checkpoints of a run: trained parameters, optimizer state and position, without pickle, whole or absent, checksummed.

checkpoints/step-00000040/parameters.safetensors   what is trained, written first
                          state.safetensors        optimizer state and random generators
                          state.json               step, numbers
                          manifest.json            size and SHA-256 of each of them
checkpoints/best.json                              the step with the lowest held-out loss, which is kept

Where each rank holds a part of the state (`fsdp2`, `pp`), each writes files of its own into the same folder,
parameters-00001-of-00004.safetensors and so on, whatever the state's size: nothing is gathered. The first rank makes
the folder, writes numbers and manifest when all parts are on the disk, and gives the folder its name: what has that
name is whole. Any layout on any number of ranks reads the tensors or slices it needs out of these files; the ranks
share the work of comparing checksums.

`torch.distributed.checkpoint` (torch 2.13) is not used: the index of its own format (`.metadata`) is a pickle; its
safetensors format has none, but cuts tensors into n-dimensional boxes only, where a flat part of `fsdp2` ends anywhere.
Neither has checksums, nor a mark that all parts are there.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from fitune.errors import EXIT_FAILED, UserError, first_line
from fitune.files import (
    BINARY,
    atomic_folder,
    atomic_write,
    explained,
    is_disk_full,
    parse_json,
    remove_folder,
    sha256,
    size_on_disk,
    write_out,
)
from fitune.parallel.slices import Parts, Saved, Slice
from fitune.parallel.world import Single
from fitune.train.tensor_files import TensorFiles, write_tensors

_NAME = re.compile(r"step-(\d{8})")
_FILE = re.compile(r"(?P<kind>parameters|state)(-\d{5}-of-(?P<size>\d{5}))?\.safetensors")
_FORMAT, _FORMAT_IN_PARTS = 2, 3
_PARAMETER = "parameter|"
_KINDS = ("parameters", "state")
_VALUES, _MANIFEST = "state.json", "manifest.json"
_BEST = "best.json"
Tensors = Mapping[str, torch.Tensor | Slice]
T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back; its tensors are read when they are asked for. `notes` say which newer ones were damaged
    and left out."""

    step: int
    tensors: Saved
    values: dict[str, Any]
    notes: tuple[str, ...] = ()

    def trained(self) -> dict[str, torch.Tensor]:
        """What was trained, by the parameters' names."""
        return {n.removeprefix(_PARAMETER): self.tensors[n] for n in self.tensors if n.startswith(_PARAMETER)}


def num_bytes(tensors: Tensors) -> int:
    """Of a state, or of a rank's share of one."""
    stored = (t.part if isinstance(t, Slice) else t for t in tensors.values())
    return sum(t.numel() * t.element_size() for t in stored)


def save(
    folder: Path, step: int, tensors: Tensors, values: dict[str, Any], keep: int, group: Single | None = None
) -> tuple[Path, int]:
    """Write the checkpoint after `step` optimizer steps, then remove all but the newest `keep` and the best.

    On a full disk older ones make room, all but the newest: what is being written is worth more than they are.

    Args:
        group: where `tensors` are a rank's `Parts`: the ranks that call this together.

    Returns:
        (its folder, its size in bytes).
    Raises:
        UserError: it cannot be written, on any rank; the newest earlier one (and the best) stay whole.
    """
    path = folder / f"step-{step:08d}"
    group = group or Single()
    while True:
        try:
            if isinstance(tensors, Parts):
                _write_together(path, step, tensors, values, group)
            else:
                _write(path, step, tensors, values)
            break
        except UserError as problem:
            if not group.share(_has_made_room(folder, step, problem) if group.is_leader else None):
                raise
    if group.is_leader:
        prune(folder, keep, step)
    return path, size_on_disk(path)


def _has_made_room(folder: Path, step: int, problem: UserError) -> bool:
    """Whether a disk that was full has one checkpoint less now."""
    cause = problem.__cause__
    there, best_one = steps(folder), best_step(folder)
    left_behind = [old for old in there if old > step]  # see `prune`: the newest one is that before `step`
    spare = [old for old in (*left_behind, *[old for old in there if old < step][:-1]) if old != best_one]
    if cause is None or not is_disk_full(cause) or not spare:
        return False
    remove_folder(folder / f"step-{spare[0]:08d}")
    return spare[0] not in steps(folder)  # one that cannot be removed will not be next time


def _write(path: Path, step: int, tensors: Tensors, values: dict[str, Any]) -> None:
    with atomic_folder(path) as temp:
        files = _write_files(temp, tensors)
        _write_numbers(temp, _FORMAT, step, values, files)


def _write_together(path: Path, step: int, parts: Parts, values: dict[str, Any], group: Single) -> None:
    """Every rank its files; the first one names the folder when all are there."""
    with ExitStack() as stack:
        temp, *_ = _agreed(group, path, lambda: stack.enter_context(atomic_folder(path)) if group.is_leader else path)
        told = _agreed(group, path, lambda: (_write_files(temp, parts, group.rank, group.size), values["optimizer"]))

        def finish() -> None:
            if group.is_leader:
                numbers = {name: number for _, some in told for name, number in some.items()}
                files = {name: entry for some, _ in told for name, entry in some.items()}
                _write_numbers(temp, _FORMAT_IN_PARTS, step, values | {"optimizer": numbers}, files)
                stack.close()

        _agreed(group, path, finish)


def _agreed(group: Single, path: Path, work: Callable[[], T]) -> list[T]:
    """What `work` gave on each rank.

    Raises:
        UserError: it failed on any; the same error on all of them.
    """
    result, problem = None, None
    try:
        with explained("write", path):
            result = work()
    except UserError as error:
        full = error.__cause__ is not None and is_disk_full(error.__cause__)
        problem = (error.what, error.why, error.fix, error.exit_code), full
    except Exception as error:  # noqa: BLE001 not silenced: told to all, who would else wait for this rank
        why = first_line(error)
        problem = (f"cannot write {path}", why, "free memory on this machine", EXIT_FAILED), False
    told = group.gather((result, problem))
    failed = next((found for _, found in told if found is not None), None)
    if failed is not None:
        raise UserError(*failed[0]) from (OSError(errno.ENOSPC, "No space left on device") if failed[1] else None)
    return [found for found, _ in told]  # type: ignore[misc]


def _file_names(kind: str, size: int) -> list[str]:
    """The files of a kind, by rank; of a state that is whole (`size` 0) the only one."""
    parts = [f"-{number:05d}-of-{size:05d}" for number in range(1, size + 1)] or [""]
    return [f"{kind}{part}.safetensors" for part in parts]


def _write_files(folder: Path, tensors: Tensors, rank: int = 0, size: int = 0) -> dict[str, dict[str, Any]]:
    """The files of these tensors: name to size and SHA-256."""
    trained = {name: tensor for name, tensor in tensors.items() if name.startswith(_PARAMETER)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in trained}
    files = {}
    for kind, some in zip(_KINDS, (trained, rest), strict=True):
        name = _file_names(kind, size)[rank]
        write_tensors(folder / name, some)
        files[name] = _entry(folder / name)
    return files


def _write_numbers(folder: Path, form: int, step: int, values: dict[str, Any], files: dict[str, Any]) -> None:
    _write_file(folder / _VALUES, json.dumps({"format": form, "step": step, "values": values}).encode())
    content = {"format": form, "step": step, "files": files | {_VALUES: _entry(folder / _VALUES)}}
    _write_file(folder / _MANIFEST, json.dumps(content, indent=1).encode())


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _write_file(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
    try:
        write_out(descriptor, content)
    finally:
        os.close(descriptor)


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints there are, oldest first."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in found if match)


def prune(folder: Path, keep: int, newest: int) -> None:
    """Remove all checkpoints but the newest `keep` up to step `newest`, and the best one.

    Later ones were damaged, and the run went on from an earlier one: they do not count among those that are kept. They
    stay until their step comes again, or room is needed.
    """
    best_one = best_step(folder)
    for old in [step for step in steps(folder) if step <= newest][:-keep]:
        if old != best_one:
            remove_folder(folder / f"step-{old:08d}")


def mark_best(folder: Path, step: int, eval_loss: float) -> None:
    """Remember this step's checkpoint as the best, so that it is kept. It may be on its way to the disk: until it is
    there the best one before it stays that. Raises UserError when this cannot be written."""
    with explained("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"step": step, "eval_loss": eval_loss}
    before = best(folder)
    if before is not None and before[0] != step:
        content["before"] = {"step": before[0], "eval_loss": before[1]}
    atomic_write(folder / _BEST, json.dumps(content) + "\n")


def best(folder: Path) -> tuple[int, float] | None:
    """(step, held-out loss) of the best checkpoint that is there, or None."""
    try:
        found = parse_json((folder / _BEST).read_text(encoding="utf-8"))
        entries = [entry for entry in (found, found.get("before")) if entry is not None]
        marked = [(int(entry["step"]), float(entry["eval_loss"])) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or changed by somebody: no best then
        return None
    return next(((step, loss) for step, loss in marked if (folder / f"step-{step:08d}").is_dir()), None)


def best_step(folder: Path) -> int | None:
    """The step of `best`, or None."""
    found = best(folder)
    return None if found is None else found[0]


def load_latest(folder: Path, *, with_tensors: bool = True, group: Single | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole (its numbers alone without `with_tensors`), or None when there is none.

    With tensors every file's SHA-256 is compared with the manifest. A damaged checkpoint is left where it is and the
    one before it is taken; `notes` say so.

    Args:
        group: ranks that call this together; each compares its share of the files, all take the same checkpoint.

    Raises:
        UserError: all of them are damaged, or the newest was written by another version.
    """
    group = group or Single()
    notes: list[str] = []
    last = None
    for step in reversed(group.share(steps(folder))):
        path = folder / f"step-{step:08d}"
        (values, tensors), problem = _tried(path, _KINDS if with_tensors else (), group)
        why = next((found for found in group.gather(problem) if found is not None), None)
        if why is None:
            return Checkpoint(step, tensors, values, tuple(notes))
        notes.append(f"the checkpoint of step {step} is damaged ({why}) and is left out")
        last = last or (path, why)
    if last is None:
        return None
    raise UserError(f"cannot resume from {last[0]}", f"it is damaged ({last[1]}), and there is no earlier whole one",
                    f"remove {folder} to start over with --resume, or start a new run")  # fmt: skip


def trained(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """What was trained, as it was after a step, by the parameters' names.

    Raises:
        UserError: this checkpoint is damaged.
    """
    path = folder / f"step-{step:08d}"
    (values, tensors), why = _tried(path, ("parameters",), Single())
    if why is not None:
        raise UserError(f"cannot read {path}", f"it is damaged ({why})", "leave --best out, or copy the run again",
                        EXIT_FAILED)  # fmt: skip
    return Checkpoint(step, tensors, values).trained()


def _tried(path: Path, kinds: tuple[str, ...], group: Single) -> tuple[tuple[dict[str, Any], Saved], str | None]:
    """What `_read` gives, and what is wrong with the checkpoint, if anything is."""
    from safetensors import SafetensorError

    try:
        return _read(path, kinds, group), None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        return ({}, TensorFiles(())), why


def _read(path: Path, kinds: tuple[str, ...], group: Single) -> tuple[dict[str, Any], Saved]:
    """(the numbers, the tensors of these kinds of files). Where tensors are read, all of it is compared with the
    manifest: sizes by every rank, checksums by one."""
    content = parse_json((path / _VALUES).read_text(encoding="utf-8"))
    if content["format"] not in (_FORMAT, _FORMAT_IN_PARTS):
        raise UserError(
            f"cannot resume from {path}",
            f"its format is {content['format']}, this fitune reads {_FORMAT} and {_FORMAT_IN_PARTS}",
            "resume with the fitune that wrote it",
        )
    if not kinds:
        return content["values"], TensorFiles(())
    manifest = parse_json((path / _MANIFEST).read_text(encoding="utf-8"))
    listed = manifest["files"]
    if not path.name == f"step-{manifest['step']:08d}" == f"step-{content['step']:08d}":
        raise ValueError(f"it was written after step {manifest['step']}")
    wanted = [name for kind in kinds for name in _listed(kind, listed)]
    for number, name in enumerate((*wanted, _VALUES)):
        if (path / name).stat().st_size != listed[name]["bytes"]:
            raise ValueError(f"{name} has {(path / name).stat().st_size} bytes instead of {listed[name]['bytes']}")
        if number % group.size == group.rank and sha256(path / name) != listed[name]["sha256"]:
            raise ValueError(f"the SHA-256 of {name} is not that of the manifest")
    return content["values"], TensorFiles(path / name for name in wanted)


def _listed(kind: str, listed: Mapping[str, Any]) -> list[str]:
    """The files of a kind that a manifest lists. Raises ValueError where that is not all of them."""
    found = [match for match in map(_FILE.fullmatch, listed) if match is not None and match["kind"] == kind]
    names = _file_names(kind, int(found[0]["size"] or 0)) if found else []
    if not names or set(names) != {match[0] for match in found}:
        raise ValueError("the manifest does not list all files")
    return names
