"""The configurations that `benchmarks/measure.py` runs: groups that share a model's weights, and points in each.

A point is written `MICROxLENGTH[/BATCH][,rN|,keep][,cN]`: rows of a micro-batch, tokens of a row, records of an
optimizer step where it has several micro-batches, layers that recompute (default all, `keep`: none), loss chunk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

LLAMA_8B = "meta-llama/Llama-3.1-8B"


@dataclass(frozen=True)
class Group:
    """One model, method and format, whose weights are made once; `settings` are recipe settings."""

    name: str
    model: str
    settings: dict[str, Any] = field(hash=False)
    points: tuple[str, ...]

    def recipe_values(self, point: str) -> dict[str, Any]:
        """Recipe settings of one point."""
        return {"model": f"random:{self.model}", **self.settings, **point_settings(point)}

    def case(self, point: str) -> str:
        return f"{self.name}:{point}"


def point_settings(point: str) -> dict[str, Any]:
    """Recipe settings from a point's short form."""
    match = re.fullmatch(r"(\d+)x(\d+)(?:/(\d+))?((?:,\w+)*)", point)
    assert match, point
    rows, columns, batch, rest = match.groups()
    values: dict[str, Any] = dict(
        micro_batch=int(rows), batch=int(batch or rows), seq_len=int(columns), recompute="all"
    )
    for word in filter(None, rest.split(",")):
        if word == "keep":
            values["recompute"] = "none"
        elif word.startswith("r"):
            values["recompute"] = word[1:]
        elif word.startswith("c"):
            values["loss_chunk"] = int(word[1:])
        else:
            raise AssertionError(point)
    return values


def _nf4(**more: Any) -> dict[str, Any]:
    return dict(method="qlora", **more)


def _lora(**more: Any) -> dict[str, Any]:
    return dict(method="lora", **more)


def _full(**more: Any) -> dict[str, Any]:
    return dict(method="full", **more)


CALIBRATION = ("llama-8b-nf4", "llama-8b-bf16", "qwen3-0.6b-full")
"""Groups whose runs the constants may come from; every other run was predicted before it was made."""

GROUPS = (
    Group("llama-8b-nf4", LLAMA_8B, _nf4(),
          ("1x512", "1x2048", "4x2048", "1x2048,keep", "4x2048,r16", "2x1024/8", "16x512", "1x8192", "1x16384")),
    Group("llama-8b-bf16", LLAMA_8B, _lora(), ("1x2048", "4x2048", "2x2048,r16", "4x512,keep", "1x8192")),
    Group("qwen3-0.6b-full", "Qwen/Qwen3-0.6B", _full(), ("4x1024", "1x2048,keep", "2x1024/4", "16x512", "1x16384")),
    Group("llama-8b-nf4-r64", LLAMA_8B, _nf4(lora_r=64), ("1x1024", "2x2048,r24", "8x1024", "1x4096/2")),
    Group("llama-8b-nf4-8bit", LLAMA_8B, _nf4(optimizer="adamw8bit"), ("1x2048", "4x1024,r8", "2x3072")),
    Group("llama-8b-nf4-qv", LLAMA_8B, _nf4(lora_targets=["q_proj", "v_proj"]), ("1x2048", "4x2048", "2x2048,keep")),
    Group("llama-8b-nf4-dropout", LLAMA_8B, _nf4(lora_dropout=0.05), ("1x2048", "4x1024", "2x1024,keep")),
    Group("llama-8b-fp4-plain", LLAMA_8B, _nf4(base_format="fp4", double_quant=False), ("1x2048", "4x1536", "8x512")),
    Group("llama-8b-int8", LLAMA_8B, _nf4(base_format="int8"), ("1x2048", "4x1024", "2x2048,r20", "1x8192")),
    Group("llama-8b-fp16", LLAMA_8B, _lora(precision="fp16"), ("1x2048", "4x1024", "2x2048,r16")),
    Group("llama-1b-full", "meta-llama/Llama-3.2-1B", _full(), ("1x2048", "4x2048", "8x512/16", "2x4096,keep")),
    Group("llama-3b-full", "meta-llama/Llama-3.2-3B", _full(), ("1x2048", "4x1024", "1x4096/2", "2x2048,keep")),
    Group("llama-3b-full-8bit", "meta-llama/Llama-3.2-3B", _full(optimizer="adamw8bit"),
          ("1x2048", "8x1024", "2x2048/4")),
    Group("llama-3b-full-adafactor", "meta-llama/Llama-3.2-3B", _full(optimizer="adafactor"), ("1x2048", "4x2048")),
    Group("llama-3b-full-sgd", "meta-llama/Llama-3.2-3B", _full(optimizer="sgd"), ("1x2048", "2x4096,r10")),
    Group("qwen2.5-7b-nf4", "Qwen/Qwen2.5-7B", _nf4(), ("1x2048", "4x2048", "2x1024,keep", "1x16384", "16x512")),
    Group("qwen2.5-7b-bf16", "Qwen/Qwen2.5-7B", _lora(), ("1x2048", "4x1024,r7", "2x4096")),
    Group("qwen2.5-0.5b-full", "Qwen/Qwen2.5-0.5B", _full(), ("16x512", "4x2048", "1x4096,keep")),
    Group("qwen3-4b-bf16", "Qwen/Qwen3-4B", _lora(), ("1x2048", "4x2048", "2x2048,keep", "1x8192/2")),
    Group("qwen3-14b-nf4", "Qwen/Qwen3-14B", _nf4(), ("1x2048", "4x1024", "2x2048,r20", "1x8192")),
    Group("qwen3-30b-a3b-nf4", "Qwen/Qwen3-30B-A3B", _nf4(), ("1x2048", "4x1024", "1x4096", "2x1024,r24")),
    Group("mistral-7b-nf4", "mistralai/Mistral-7B-v0.3", _nf4(), ("1x2048", "1x8192", "4x2048,r28", "8x1024")),
    Group("mistral-7b-bf16", "mistralai/Mistral-7B-v0.3", _lora(lora_r=8), ("1x2048", "4x1024", "2x2048,keep")),
    Group("gemma2-2b-bf16", "google/gemma-2-2b", _lora(), ("1x2048", "2x1024", "4x1024,r13", "1x8192", "2x1024,keep")),
    Group("gemma2-9b-nf4", "google/gemma-2-9b", _nf4(), ("1x2048", "4x1024", "1x4096,r21")),
    Group("gemma3-1b-bf16", "google/gemma-3-1b-it", _lora(), ("2x2048", "8x512", "1x8192", "1x2048,keep")),
    Group("gemma3-4b-nf4", "google/gemma-3-4b-it", _nf4(), ("1x2048", "4x1024", "2x2048,keep", "1x8192")),
    Group("phi4-nf4", "microsoft/phi-4", _nf4(), ("1x2048", "2x2048", "4x1024,r20")),
    Group("phi3-mini-nf4", "microsoft/Phi-3-mini-4k-instruct", _nf4(), ("1x2048", "4x2048", "2x2048,r8")),
    Group("olmo2-7b-nf4", "allenai/OLMo-2-1124-7B", _nf4(), ("1x2048", "4x1024", "2x2048,keep")),
    Group("smollm2-1.7b-full", "HuggingFaceTB/SmolLM2-1.7B", _full(), ("1x2048", "4x1024", "2x2048/4", "2x1024,keep")),
    Group("smollm2-135m-full", "HuggingFaceTB/SmolLM2-135M-Instruct", _full(), ("8x1024", "16x512,keep", "4x2048/16")),
    Group("smollm3-3b-nf4", "HuggingFaceTB/SmolLM3-3B", _nf4(), ("1x2048", "4x2048", "1x16384")),
    Group("llama2-13b-nf4", "meta-llama/Llama-2-13b-hf", _nf4(), ("1x2048", "4x1024", "2x2048,r30")),
    Group("qwen2.5-32b-nf4", "Qwen/Qwen2.5-32B", _nf4(), ("1x2048", "2x2048", "4x512,r40")),
)  # fmt: skip

BOUNDARY = (
    # (group name, cap in GiB, point family): the length is chosen so that the prediction lands on a share of the cap
    ("llama-8b-nf4", 8, "1x{}"),
    ("llama-8b-nf4", 10, "2x{}"),
    ("llama-8b-nf4", 12, "1x{},r24"),
    ("llama-8b-bf16", 20, "1x{}"),
    ("qwen2.5-7b-nf4", 10, "1x{}"),
    ("qwen3-14b-nf4", 14, "1x{}"),
    ("qwen3-4b-bf16", 12, "1x{},keep"),
    ("llama-1b-full", 24, "2x{}"),
)
BOUNDARY_SHARES = (0.955, 0.97, 0.985, 0.995, 1.005, 1.015, 1.03, 1.045)
"""Predicted driver-counted peak over the cap."""


def group(name: str) -> Group:
    return next(g for g in GROUPS if g.name == name)
