"""A run's result for other tools: its adapter as it is, or one model with the adapter merged in. See `export_run`."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune import recipe as recipes
from fitune.errors import EXIT_FAILED, UserError
from fitune.files import atomic_folder, explained, size_on_disk

if TYPE_CHECKING:
    from fitune.model.source import ModelSource
    from fitune.train.run_folder import RunFolder

DTYPES = ("bf16", "fp16", "fp32")
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class Exported:
    """What was written. `kind`: adapter, merged or model; `ram_bytes`: the most that a merge's tensors took at once;
    `step`: the checkpoint it was made from, None for the run's result."""

    kind: str
    path: Path
    size_bytes: int
    ram_bytes: int | None = None
    step: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"path": str(self.path)}


def export_run(
    run: RunFolder,
    *,
    merged: bool = False,
    best: bool = False,
    dtype: str = "bf16",
    out: Path | None = None,
    ram_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write a run's result into a folder of its own, whole or not at all.

    Args:
        merged: the whole model with the adapter in its original weights, also where the run's base was quantised.
        best: of the checkpoint with the lowest held-out loss instead of the last step; the run need not be finished.
        dtype: format of merged weights: bf16, fp16 or fp32.
        out: a new or empty folder; by default `RUN/merged` for a merge, `RUN/export` otherwise (`RUN/best-...` of the
            best checkpoint).
        ram_bytes: the most memory that a merge's tensors may take at once.
        progress: called with (bytes written, bytes in all) during a merge.

    Raises:
        UserError: the run has no result yet (no best checkpoint), `out` is not empty, or what
            `fitune.model.merge.merge` refuses.
    """
    out = out or run.path / (("best-" if best else "") + ("merged" if merged else "export"))
    if best:
        from fitune.export.best import export_best

        _must_be_empty(out)
        return export_best(run, out, dtype, ram_bytes, progress, merged=merged)
    if run.adapter_path.is_dir():
        if merged:
            _must_be_empty(out)
            return merge_adapter(run, run.adapter_path, out, dtype, ram_bytes, progress)
        return _copy(run.adapter_path, out, "adapter")
    if run.model_path.is_dir():
        if merged:
            raise UserError(f"there is no adapter to merge in {run.path}", "the run trained every weight",
                            "leave --merged out: its model is whole already")  # fmt: skip
        return _copy(run.model_path, out, "model")
    raise UserError(f"nothing to export from {run.path}", f"it has no adapter and no model yet ({run.info().status})",
                    f"finish it first: fitune train --resume {run.argument}")  # fmt: skip


def _copy(folder: Path, out: Path, kind: str) -> Exported:
    _must_be_empty(out)
    with explained("write", out), atomic_folder(out) as temporary:
        shutil.copytree(folder, temporary, dirs_exist_ok=True)
    return Exported(kind, out, size_on_disk(out))


def merge_adapter(
    run: RunFolder, adapter: Path, out: Path, dtype: str, ram_bytes: int | None,
    progress: Callable[[int, int], None] | None,
) -> Exported:  # fmt: skip
    """An adapter of the run, with the tokenizer beside it, as one model with the run's base.

    Where the memory runs out the merge begins again with smaller pieces, put together on the disk.
    """
    from fitune.model.merge import merge
    from fitune.train.oom import classify

    source = source_of(run)
    frugal = False
    while True:
        try:
            written = merge(source, adapter, out, dtype=dtype, ram_cap_bytes=ram_bytes, frugal=frugal,
                            progress=progress)  # fmt: skip
            break
        except (RuntimeError, MemoryError, OSError) as problem:
            failure = classify(problem)
            if failure is None:
                raise
            if frugal:
                raise UserError("out of memory in the merge", failure.line,
                                f"use the adapter as it is ({adapter}), or merge it on a machine with more memory",
                                EXIT_FAILED) from problem  # fmt: skip
        frugal = True
    _copy_tokenizer(adapter, out)
    return Exported("merged", out, size_on_disk(out), written.ram_bytes)


def source_of(run: RunFolder) -> ModelSource:
    """The model that the run started from."""
    from fitune.model.build import with_rope_scaling
    from fitune.model.source import resolve

    recipe = recipes.build(recipes.load(run.recipe_path), str(run.recipe_path))
    source = resolve(
        recipe.model, hub=recipe.hub, trust_remote_code=recipe.trust_remote_code, weights=True, seed=recipe.seed
    )
    if recipe.rope_scaling:
        source = dataclasses.replace(source, config=with_rope_scaling(source.config, recipe.rope_scaling))
    return source


def _copy_tokenizer(adapter: Path, out: Path) -> None:
    """The run's own tokenizer files: with a chat template where the model had none and training used a default."""
    with explained("write", out):
        for file in adapter.iterdir():
            if file.suffix in _TOKENIZER_SUFFIXES and file.name not in ADAPTER_FILES:
                shutil.copyfile(file, out / file.name)


def _must_be_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"cannot export to {out}", "it exists and is not empty", "choose a new folder with --out")
