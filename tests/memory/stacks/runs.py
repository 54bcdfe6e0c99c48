"""Shapes and published runs that the tests share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fitune.memory.stacks import StackSettings, StackShape, from_columns
from fitune.memory.stacks.settings import TARGETS

ATTENTION = ("q", "k", "v", "o")
ALL_LINEAR = TARGETS[:7]

MISTRAL = from_columns("mistralai/Mistral-7B-v0.1", hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336,
                       vocab=32000, tied=False, params_b=7.242)  # fmt: skip
LLAMA2 = from_columns("meta-llama/Llama-2-7b-hf", hidden=4096, layers=32, heads=32, kv_heads=32, intermediate=11008,
                      vocab=32000, tied=False, params_b=6.738)  # fmt: skip
LLAMA3 = from_columns("meta-llama/Llama-3.1-8B", hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336,
                      vocab=128256, tied=False, params_b=8.03)  # fmt: skip
LLAMA32_3B = from_columns("meta-llama/Llama-3.2-3B", hidden=3072, layers=28, heads=24, kv_heads=8, intermediate=8192,
                          vocab=128256, tied=True, params_b=3.213)  # fmt: skip
GEMMA2B = from_columns("google/gemma-2b", hidden=2048, layers=18, heads=8, kv_heads=1, intermediate=16384,
                       vocab=256000, tied=True, params_b=2.506)  # fmt: skip
FALCON = from_columns("tiiuae/falcon-7b", hidden=4544, layers=32, heads=71, kv_heads=1, intermediate=18176,
                      vocab=65024, tied=False, params_b=7.217)  # fmt: skip
QWEN_HALF = from_columns("Qwen/Qwen2.5-0.5B-Instruct", hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864,
                         vocab=151936, tied=True, params_b=0.494)  # fmt: skip
QWEN_7B = from_columns("Qwen/Qwen2.5-7B-Instruct", hidden=3584, layers=28, heads=28, kv_heads=4, intermediate=18944,
                       vocab=152064, tied=False, params_b=7.616)  # fmt: skip

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
