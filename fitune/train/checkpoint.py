"""Checkpoints of a run: trained parameters, optimizer state and position, without pickle, whole or absent, checksummed.

checkpoints/step-00000040/parameters.safetensors   what is trained, written first
                          state.safetensors        optimizer state and random generators
                          state.json               step, numbers
                          manifest.json            size and SHA-256 of each of them
checkpoints/best.json                              the step with the lowest held-out loss, which is kept
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fitune.errors import EXIT_FAILED, UserError
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

_NAME = re.compile(r"step-(\d{8})")
_FORMAT = 2
_PARAMETER = "parameter|"
_PARAMETERS, _STATE, _VALUES, _MANIFEST = "parameters.safetensors", "state.safetensors", "state.json", "manifest.json"
_BEST = "best.json"
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back. `notes` say which newer ones were damaged and left out."""

    step: int
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    notes: tuple[str, ...] = ()


def save(
    folder: Path, step: int, tensors: dict[str, torch.Tensor], values: dict[str, Any], keep: int
) -> tuple[Path, int]:
    """Write the checkpoint after `step` optimizer steps, then remove all but the newest `keep` and the best.

    On a full disk older ones make room, all but the newest: what is being written is worth more than they are.

    Returns:
        (its folder, its size in bytes).
    Raises:
        UserError: it cannot be written; the newest earlier one (and the best) stay whole.
    """
    path = folder / f"step-{step:08d}"
    while True:
        try:
            _write(path, step, tensors, values)
            break
        except UserError as problem:
            cause = problem.__cause__
            kept = step, best_step(folder)
            spare = [old for old in steps(folder)[:-1] if old not in kept]
            if cause is None or not is_disk_full(cause) or not spare:
                raise
            remove_folder(folder / f"step-{spare[0]:08d}")
            if spare[0] in steps(folder):  # it cannot be removed: nor will it be next time
                raise
    prune(folder, keep)
    return path, size_on_disk(path)


def _write(path: Path, step: int, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    trained = {name: tensor for name, tensor in tensors.items() if name.startswith(_PARAMETER)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in trained}
    with atomic_folder(path) as temp:
        write_tensors(temp / _PARAMETERS, trained)
        write_tensors(temp / _STATE, rest)
        content = {"format": _FORMAT, "step": step, "values": values}
        _write_file(temp / _VALUES, json.dumps(content).encode())
        names = (_PARAMETERS, _STATE, _VALUES)
        files = {name: {"bytes": (temp / name).stat().st_size, "sha256": sha256(temp / name)} for name in names}
        _write_file(temp / _MANIFEST, json.dumps({"format": _FORMAT, "step": step, "files": files}, indent=1).encode())


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file, tensor by tensor: nothing is copied (https://github.com/huggingface/safetensors, "Format").

    Raises:
        OSError: it cannot be written; a part may be there.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Wide elements first, so that every tensor starts at a multiple of its element's size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in order:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _TYPES[tensors[name].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
    try:
        write_out(descriptor, len(text).to_bytes(8, "little") + text)
        for name in order:
            if tensors[name].numel():
                flat = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
                write_out(descriptor, memoryview(flat.numpy()))
    finally:
        os.close(descriptor)


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


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest `keep` and the best one."""
    best_one = best_step(folder)
    for old in steps(folder)[:-keep]:
        if old != best_one:
            remove_folder(folder / f"step-{old:08d}")


def mark_best(folder: Path, step: int, eval_loss: float) -> None:
    """Remember this step's checkpoint as the best, so that it is kept. Raises UserError when that cannot be written."""
    with explained("create", folder):
        folder.mkdir(parents=True, exist_ok=True)  # the first checkpoint may be on its way there
    atomic_write(folder / _BEST, json.dumps({"step": step, "eval_loss": eval_loss}) + "\n")


def best(folder: Path) -> tuple[int, float] | None:
    """(step, held-out loss) of the best checkpoint that is there, or None."""
    try:
        found = parse_json((folder / _BEST).read_text(encoding="utf-8"))
        step, loss = int(found["step"]), float(found["eval_loss"])
    except (OSError, ValueError, KeyError, TypeError):  # no file, or one that somebody changed: there is no best then
        return None
    return (step, loss) if (folder / f"step-{step:08d}").is_dir() else None


def best_step(folder: Path) -> int | None:
    """The step of `best`, or None."""
    found = best(folder)
    return None if found is None else found[0]


def load_latest(folder: Path, *, with_tensors: bool = True) -> Checkpoint | None:
    """The newest checkpoint that is whole (its numbers alone without `with_tensors`), or None when there is none.

    With tensors every file's SHA-256 is compared with the manifest. A damaged checkpoint is left where it is and the
    one before it is taken; `notes` say so.

    Raises:
        UserError: all of them are damaged, or the newest was written by another version.
    """
    from safetensors import SafetensorError

    notes: list[str] = []
    last = None
    for step in reversed(steps(folder)):
        path = folder / f"step-{step:08d}"
        try:
            values, tensors = _read(path, (_PARAMETERS, _STATE) if with_tensors else ())
            return Checkpoint(step, tensors, values, tuple(notes))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
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
    from safetensors import SafetensorError

    path = folder / f"step-{step:08d}"
    try:
        _, tensors = _read(path, (_PARAMETERS,))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"cannot read {path}", f"it is damaged ({why})", "leave --best out, or copy the run again",
                        EXIT_FAILED) from None  # fmt: skip
    return {n.removeprefix(_PARAMETER): t for n, t in tensors.items() if n.startswith(_PARAMETER)}


def _read(path: Path, files: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(the numbers, the tensors of these files). Where tensors are read, all of it is compared with the manifest."""
    from safetensors.torch import load_file

    content = parse_json((path / _VALUES).read_text(encoding="utf-8"))
    if content["format"] != _FORMAT:
        raise UserError(
            f"cannot resume from {path}",
            f"its format is {content['format']}, this fitune reads {_FORMAT}",
            "resume with the fitune that wrote it",
        )
    if not files:
        return content["values"], {}
    listed = parse_json((path / _MANIFEST).read_text(encoding="utf-8"))["files"]
    for name in (*files, _VALUES):
        if (path / name).stat().st_size != listed[name]["bytes"]:
            raise ValueError(f"{name} has {(path / name).stat().st_size} bytes instead of {listed[name]['bytes']}")
        if sha256(path / name) != listed[name]["sha256"]:
            raise ValueError(f"the SHA-256 of {name} is not that of the manifest")
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        tensors |= load_file(path / name)
    return content["values"], tensors
