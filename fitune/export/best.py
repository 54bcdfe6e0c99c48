"""The checkpoint with the lowest held-out loss as a result of its own. See `export_best`."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune import plan as plans
from fitune.errors import UserError
from fitune.export import ADAPTER_FILES, Exported, merge_adapter, source_of
from fitune.files import atomic_folder, size_on_disk
from fitune.plan import Plan

if TYPE_CHECKING:
    import torch

    from fitune.train.run_folder import RunFolder

_WEIGHTS = (".safetensors", ".safetensors.index.json")


def export_best(
    run: RunFolder, out: Path, dtype: str, ram_bytes: int | None, progress: Callable[[int, int], None] | None, *,
    merged: bool,
) -> Exported:  # fmt: skip
    """Write what was trained as it was after the best step.

    Raises:
        UserError: no evaluation was made after a step, the checkpoint is damaged, or what `export_run` refuses.
    """
    from fitune.train import checkpoint

    step = checkpoint.best_step(run.checkpoints_path)
    if step is None:
        raise UserError(f"{run.path} has no best checkpoint", "no evaluation was made after a step, or it is gone",
                        "leave --best out, or train with held-out records (--eval-share, --eval-every)")  # fmt: skip
    plan = plans.from_json(run.plan_path.read_text(encoding="utf-8"))
    if merged and plan.adapter is None:
        raise UserError(f"there is no adapter to merge in {run.path}", "the run trained every weight",
                        "leave --merged out: its model is whole already")  # fmt: skip
    tensors = checkpoint.trained(run.checkpoints_path, step)
    if not merged:
        with atomic_folder(out) as temp:
            _write(run, plan, tensors, temp)
        return Exported("adapter" if plan.adapter else "model", out, size_on_disk(out), step=step)
    with tempfile.TemporaryDirectory(prefix="fitune-") as folder:
        adapter = Path(folder) / "adapter"
        with atomic_folder(adapter) as temp:  # for its words when that disk is full
            _write(run, plan, tensors, temp)
        written = merge_adapter(run, adapter, out, dtype, ram_bytes, progress)
    return dataclasses.replace(written, step=step)


def _write(run: RunFolder, plan: Plan, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """The files of the result: those that do not depend on the step are the run's own where it has them."""
    from fitune.train.result import put_adapter

    source = source_of(run)
    result = run.adapter_path if plan.adapter is not None else run.model_path
    if result.is_dir():
        for file in result.iterdir():
            if file.is_dir():  # further chat templates
                shutil.copytree(file, folder / file.name)
            elif file.name not in ADAPTER_FILES and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, folder / file.name)
    else:
        _tokenizer(run, source).save_pretrained(folder)
    if plan.adapter is not None:
        put_adapter(folder, plan.adapter, tensors, source.reference)
    else:
        _put_model(source, plan, tensors, folder)


def _tokenizer(run: RunFolder, source: Any) -> Any:
    """The base model's, with the template that the run chose where the model has none."""
    from fitune.data.template import choose_template

    tokenizer = source.tokenizer()
    is_chat = any(event.get("event") == "data" and event.get("template") for event in run.events())
    template = choose_template(tokenizer).template if is_chat else None
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _put_model(source: Any, plan: Plan, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """A model that was trained in full, in the format that the run held it in."""
    from fitune.model.checkpoint import torch_dtype

    dtype = torch_dtype(plan.base_format)
    model = source.meta_model()
    weights = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    saved = model.state_dict().keys()
    buffers = {name for name, _ in model.named_buffers() if name in saved}  # no training changes them
    weights |= dict(source.iter_weights(buffers)) if buffers else {}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    still = sorted(n for n, p in model.named_parameters() if p.is_meta)
    if still:
        raise UserError("the best checkpoint does not hold the whole model",
                        f"{len(still)} of its weights are not in it ({still[0]})",
                        "leave --best out")  # fmt: skip
    model.config.dtype = dtype
    model.save_pretrained(folder)
