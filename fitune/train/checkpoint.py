"""Checkpoints of a run: trained parameters, optimizer state and position, without pickle, whole or absent.

checkpoints/step-00000040/state.safetensors   tensors by name
checkpoints/step-00000040/state.json          step, numbers, versions
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fitune.errors import UserError
from fitune.files import atomic_folder, size_on_disk

_NAME = re.compile(r"step-(\d{8})")
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back."""

    step: int
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


def save(
    folder: Path, step: int, tensors: dict[str, torch.Tensor], values: dict[str, Any], keep: int
) -> tuple[Path, int]:
    """Write the checkpoint after `step` optimizer steps, then remove all but the newest `keep`.

    Returns:
        (its folder, its size in bytes).
    Raises:
        UserError: it cannot be written; the earlier ones stay whole.
    """
    from safetensors.torch import save_file

    path = folder / f"step-{step:08d}"
    with atomic_folder(path) as temp:
        save_file(tensors, temp / "state.safetensors")
        content = {"format": _FORMAT, "step": step, "values": values}
        (temp / "state.json").write_text(json.dumps(content), encoding="utf-8")
    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / f"step-{old:08d}", ignore_errors=True)
    return path, size_on_disk(path)


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints there are, oldest first."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in found if match)


def load_latest(folder: Path, *, with_tensors: bool = True) -> Checkpoint | None:
    """The newest checkpoint (its numbers alone without `with_tensors`), or None when there is none.

    Raises:
        UserError: it is damaged (the way back to an earlier one is named).
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found = steps(folder)
    if not found:
        return None
    path = folder / f"step-{found[-1]:08d}"
    try:
        content = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise UserError(
                f"cannot resume from {path}",
                f"its format is {content['format']}, this fitune reads {_FORMAT}",
                "resume with the fitune that wrote it",
            )
        tensors = load_file(path / "state.safetensors") if with_tensors else {}
        return Checkpoint(content["step"], tensors, content["values"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        back = f"go back to step {found[-2]}" if len(found) > 1 else "start over"
        raise UserError(
            f"cannot resume from {path}", f"it is damaged ({error})", f"remove that folder to {back}"
        ) from None
