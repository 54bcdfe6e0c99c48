"""What a run comes to: the numbers at its end, and the adapter or model that it leaves."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import EXIT_DONE
from fitune.memory.host import EXPORT_SHARD_BYTES
from fitune.plan import Adapter, Plan
from fitune.train.link_sums import link_fields
from fitune.train.run_folder import RunFolder

if TYPE_CHECKING:
    import torch

    from fitune.engine.engine import Engine
    from fitune.train.session import Session


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. `exit_code` is the process' one; losses are means over target tokens.

    `link_*`: weights that crossed the link over the whole run, how fast, and the part of the time spent waiting for
    them; None where none streamed.
    """

    run_folder: Path
    status: str
    exit_code: int
    steps: int
    loss: float | None
    eval_loss_before: float | None
    eval_loss_after: float | None
    link_bytes: int | None = None
    link_bytes_per_s: float | None = None
    link_wait_share: float | None = None


def finished_result(folder: RunFolder) -> TrainResult | None:
    """The result of a run that ended well and still has what it made; None for every other run."""
    events = folder.events()
    ended = bool(events) and events[-1].get("event") == "end" and events[-1].get("status") == "done"
    if not ended or not (folder.adapter_path.is_dir() or folder.model_path.is_dir()):
        return None
    last: dict[str, Any] = next((e for e in reversed(events) if e.get("event") == "step"), {})
    before, after = eval_losses(events)
    return TrainResult(folder.path, "done", EXIT_DONE, last.get("step", 0), last.get("loss"), before, after,
                       **link_fields(events))  # fmt: skip


def eval_losses(events: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Held-out loss before the first step and of the last evaluation after it."""
    evals = [e for e in events if e.get("event") == "eval"]
    before = next((e["eval_loss"] for e in evals if e["step"] == 0), None)
    return before, evals[-1]["eval_loss"] if evals and evals[-1]["step"] > 0 else None


def write_result(run: RunFolder, session: Session, plan: Plan, engine: Engine) -> None:
    """The result, whole or absent: `adapter/` in PEFT format, or `model/` after full fine-tuning; with a tokenizer.

    Raises:
        UserError: it cannot be written, for example on a full disk (exit code 1).
    """
    from fitune.files import atomic_folder

    tokenizer, template, source = session.tokenizer, session.data.template, session.source
    if template is not None and template.template is not None:
        tokenizer.chat_template = template.template
    adapter = plan.adapter
    with atomic_folder(run.model_path if adapter is None else run.adapter_path) as temp:
        tokenizer.save_pretrained(temp)
        if adapter is not None:
            put_adapter(temp, adapter, engine.trained_tensors(), source.reference)
            return
        model = engine.built.model
        trains_with, model.config.use_cache = model.config.use_cache, getattr(source.config, "use_cache", True)
        try:
            # safetensors makes a copy of each file in RAM
            model.save_pretrained(temp, state_dict=engine.whole_weights(), max_shard_size=EXPORT_SHARD_BYTES)
        finally:
            model.config.use_cache = trains_with  # an evaluation may follow
        if source.path is not None and (source.path / "generation_config.json").is_file():
            shutil.copyfile(source.path / "generation_config.json", temp / "generation_config.json")


def put_adapter(folder: Path, adapter: Adapter, tensors: dict[str, torch.Tensor], base_model: str) -> None:
    """An adapter's two files, put into a folder that holds other files already.

    Raises:
        UserError: they cannot be written.
    """
    from fitune.model.adapter_io import write_adapter

    written = folder / "written"
    write_adapter(written, adapter, tensors, base_model=base_model)
    for file in written.iterdir():
        file.rename(folder / file.name)
    written.rmdir()
