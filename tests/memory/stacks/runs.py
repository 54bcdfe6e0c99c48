"""Shapes and published runs that the tests share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fitune.memory.stacks import StackSettings, StackShape, from_columns
from fitune.memory.stacks.settings import TARGETS

ATTENTION = ("q", "k", "v", "o")
ALL_LINEAR = TARGETS[:7]


def shape(name, hidden, layers, heads, kv_heads, intermediate, vocab, params_b, tied=False) -> StackShape:
    return from_columns(name, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, intermediate=intermediate,
                        vocab=vocab, tied=tied, params_b=params_b)  # fmt: skip


MISTRAL = shape("mistralai/Mistral-7B-v0.1", 4096, 32, 32, 8, 14336, 32000, 7.242)
LLAMA2 = shape("meta-llama/Llama-2-7b-hf", 4096, 32, 32, 32, 11008, 32000, 6.738)
LLAMA3 = shape("meta-llama/Llama-3.1-8B", 4096, 32, 32, 8, 14336, 128256, 8.03)
LLAMA32_3B = shape("meta-llama/Llama-3.2-3B", 3072, 28, 24, 8, 8192, 128256, 3.213, tied=True)
GEMMA2B = shape("google/gemma-2b", 2048, 18, 8, 1, 16384, 256000, 2.506, tied=True)
FALCON = shape("tiiuae/falcon-7b", 4544, 32, 71, 1, 18176, 65024, 7.217)
QWEN_HALF = shape("Qwen/Qwen2.5-0.5B-Instruct", 896, 24, 14, 2, 4864, 151936, 0.494, tied=True)
QWEN_7B = shape("Qwen/Qwen2.5-7B-Instruct", 3584, 28, 28, 4, 18944, 152064, 7.616)

FULL = StackSettings(MISTRAL, "full", attention="flash", packing=True, micro_batch=4, seq_len=4096,
                     transformers=(4, 48), tool_version=(0, 13))  # fmt: skip
LORA = replace(FULL, method="lora", adapter_rank=16, adapter_targets=ATTENTION)
QLORA = replace(LORA, method="qlora", base_dtype="nf4 (double quant)")
LIT = StackSettings(LLAMA2, "lora", adapter_rank=32, adapter_targets=("q", "v"), checkpointing="no", loss="chunked",
                    micro_batch=2, seq_len=512)  # fmt: skip
TUNE = StackSettings(LLAMA32_3B, "full", optimizer="adamw_torch (bf16 states)", attention="flex", loss="chunked",
                     packing=True, micro_batch=2, seq_len=4096, torch_compile=True)  # fmt: skip
LOOP = StackSettings(QWEN_HALF, "lora", adapter_rank=16, adapter_targets=ATTENTION, optimizer="paged_adamw_8bit",
                     micro_batch=1, seq_len=1024)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A peak that somebody measured and published: GiB, and where."""

    name: str
    stack: str
    settings: StackSettings
    gib: float
    source: str


def lit(shape: StackShape, micro_batch: int, **changes) -> StackSettings:
    return replace(LIT, shape=shape, micro_batch=micro_batch, **changes)


FMS = "foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv (2025-02)"
LIGER = "foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb_liger.csv (2024-11)"
HUB = "Lightning-AI/litgpt, config_hub/finetune/README.md (GB of 1e9 bytes, converted)"
LADDER = "pytorch/torchtune, README.md, table of memory optimisations (active memory)"
CIFT = "can-i-finetune-this, validation table (RTX 4080, transformers 5.8.1, peft 0.19.1)"
HEAD = (*ALL_LINEAR, "lm_head")
NF4 = {"method": "qlora", "base_dtype": "nf4"}
IN_BACKWARD = replace(TUNE, optimizer="adamw_torch in backward")
OFFLOADED = replace(TUNE, adapter_rank=64, adapter_targets=("q", "v", "o", "gate", "up", "down"),
                    optimizer="adamw_torch", offload="activations")  # fmt: skip

PUBLISHED = (
    Published("full", "trl", FULL, 67.46, FMS),
    Published("LoRA 4x4096", "trl", LORA, 24.871, FMS),
    Published("LoRA 8x4096", "trl", replace(LORA, micro_batch=8), 36.082, FMS),
    Published("QLoRA 4x4096", "trl", QLORA, 19.25, FMS),
    Published("QLoRA 8x4096", "trl", replace(QLORA, micro_batch=8), 34.461, FMS),
    Published("QLoRA 8x4096 plugin", "fms", replace(QLORA, micro_batch=8), 26.461, FMS),
    Published("LoRA nvidia-smi", "trl", replace(LORA, metric="nvidia-smi", card_gib=80.0), 28.883, FMS),
    Published("LoRA fused loss", "fms", replace(LORA, loss="fused", transformers=(4, 45), kernels="foak"), 21.914,
              LIGER),
    Published("full fused loss 16x4096", "fms",
              replace(FULL, loss="fused", micro_batch=16, transformers=(4, 45), kernels="foak"), 71.847, LIGER),
    Published("Llama-2-7B LoRA", "litgpt", LIT, 18.412, HUB),
    Published("Llama-2-7B QLoRA", "litgpt", replace(LIT, **NF4), 12.740, HUB),
    Published("Llama-3.1-8B LoRA", "litgpt", lit(LLAMA3, 1), 18.375, HUB),
    Published("Llama-3.1-8B QLoRA", "litgpt", lit(LLAMA3, 2, **NF4), 16.214, HUB),
    Published("falcon-7b QLoRA", "litgpt", lit(FALCON, 1, **NF4), 8.792, HUB),
    Published("gemma-2b LoRA", "litgpt", lit(GEMMA2B, 2, adapter_rank=8, adapter_targets=HEAD), 11.753, HUB),
    Published("ladder: compile", "torchtune", replace(TUNE, loss="full_logits", checkpointing="no"), 51.0, LADDER),
    Published("ladder: checkpointing", "torchtune", TUNE, 24.9, LADDER),
    Published("ladder: in backward", "torchtune", IN_BACKWARD, 23.1, LADDER),
    Published("ladder: LoRA", "torchtune", replace(OFFLOADED, method="lora"), 8.5, LADDER),
    Published("ladder: QLoRA", "torchtune", replace(OFFLOADED, **NF4), 4.6, LADDER),
    Published("0.5B LoRA", "peft-loop", LOOP, 3.032, CIFT),
    Published("0.5B QLoRA 2048", "peft-loop",
              replace(LOOP, method="qlora", base_dtype="nf4 (double quant)", seq_len=2048), 5.522, CIFT),
    Published("7B QLoRA", "peft-loop",
              replace(LOOP, shape=QWEN_7B, method="qlora", base_dtype="nf4 (double quant)"), 10.002, CIFT),
)  # fmt: skip
