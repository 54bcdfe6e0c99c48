"""Published rows (a CSV with the columns of docs/stacks.md) as settings of a stack."""

from __future__ import annotations

import re
from typing import Any

from fitune.memory.stacks.settings import CHECKPOINTING, LOSSES, StackSettings, parse_targets
from fitune.memory.stacks.shapes import from_columns

# The column `stack` to this package's name.
STACK_NAMES = {
    "hf-trainer": "hf-trainer",
    "fms-acceleration": "fms",
    "fms-acceleration-foak": "fms",
    "transformers-peft loop": "peft-loop",
    "litgpt": "litgpt",
    "torchtune": "torchtune",
    "unsloth": "unsloth",
    "axolotl": "axolotl",
    "ms-swift": "ms-swift",
    "llamafactory": "llamafactory",
    "answerdotai-fsdp_qlora": "fsdp-qlora",
    "qwen-readme": "hf-trainer",
}

# What a figure is whose counter is not named: torchtune prints its allocator's active peak, the others' tables are
# what the driver showed.
UNNAMED_METRIC = {"torchtune": "allocated"}


def stack_of(row: dict[str, str]) -> str | None:
    """The stack of a row; a Trainer with TRL's version beside it is TRL's. None: no stack of this package."""
    stack = STACK_NAMES.get(row["stack"])
    return "trl" if stack == "hf-trainer" and "trl " in row["stack_version_or_date"] else stack


def settings_of(row: dict[str, str]) -> StackSettings:
    """The settings that a row describes.

    Raises:
        ValueError: a cell that is needed is blank or unknown.
        UserError: a setting that no stack models.
    """
    shape = from_columns(
        row["model"], hidden=int(row["hidden"]), layers=int(row["layers"]), heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]), intermediate=int(row["intermediate"]), vocab=int(row["vocab"]),
        tied=row["tie_embeddings"] == "yes", params_b=float(row["params_b"]) if row["params_b"] else None,
    )  # fmt: skip
    method: Any = row["method"]
    version = re.search(r"transformers (\d+)\.(\d+)", row["stack_version_or_date"])
    tool = re.search(r"trl (\d+)\.(\d+)", row["stack_version_or_date"])
    released = re.search(r"20\d\d(-\d\d)?", row["stack_version_or_date"])
    card = re.search(r"(\d+) ?GB", row["gpu"])
    notes = row["unit_note"]
    metric = row["metric"] if row["metric"] != "unknown" else UNNAMED_METRIC.get(row["stack"], "nvidia-smi")
    return StackSettings(
        shape, method, row["base_dtype"],
        adapter_rank=int(row["adapter_rank"]) if method != "full" else 0,
        adapter_targets=parse_targets(row["adapter_targets"]) if method != "full" else (),
        optimizer=row["optimizer"],
        checkpointing=row["grad_checkpointing"] if row["grad_checkpointing"] in CHECKPOINTING else "yes",
        attention=row["attention"], loss=row["loss"] if row["loss"] in LOSSES else "full_logits",
        packing=row["packing"] not in ("no", ""), micro_batch=int(row["micro_batch"]), seq_len=int(row["seq_len"]),
        grad_accum=int(row["grad_accum"] or 1), parallel=row["parallel"] or "single", n_gpus=int(row["n_gpus"]),
        offload=row["offload"], metric=metric,
        card_gib=float(card[1]) if card else None,
        released=released[0] if released else "",
        tool_version=(int(tool[1]), int(tool[2])) if tool else None,
        transformers=(int(version[1]), int(version[2])) if version else (5, 8),
        torch_compile="compile" in notes or "same flags" in notes,
        kernels={"fms-acceleration-foak": "foak", "unsloth": "unsloth"}.get(row["stack"], ""),
    )  # fmt: skip
