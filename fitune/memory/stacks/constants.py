"""Every constant of the other tools' memory that does not follow from shapes, with what it is and where it is from."""

from __future__ import annotations

from fitune.units import MIB

# Bytes an element of each storage format (bitsandbytes 0.42 to 0.49, functional.quantize_4bit: blocks of 64 elements,
# one fp32 scale each; double quantisation: one byte a block and an fp32 scale for 256 blocks).
NF4_BYTES = 0.5 + 4 / 64
NF4_DOUBLE_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
GPTQ_BYTES = 0.5 + 2 / 128 + 0.5 / 128  # groups of 128: fp16 scale and packed zero point (AutoGPTQ's default)
INT8_BYTES = 1.0  # one fp32 scale a row is less than 0.1 %
QUANT_BLOCK_STATE_BYTES = 2 + 8 / 256  # 8-bit AdamW: two one-byte moments, an fp32 scale for each block of 256

# CUDA context with cuBLAS and attention kernels loaded: 0.45 to 0.65 GiB on A100 and H100 with CUDA 12 (nvidia-smi of
# an idle process that ran one matmul); published gaps between reserved and nvidia-smi agree. Not measured here.
CUDA_CONTEXT_BYTES = 560 * MIB
# NCCL's channels and buffers for one communicator on 2 to 8 GPUs of a node, in the driver's count. Not measured here.
NCCL_BYTES = 700 * MIB
# cuBLAS workspace: 8 MiB and 128 KiB a handle on sm_80 (torch.backends.cuda documentation, CUBLAS_WORKSPACE_CONFIG).
CUBLAS_WORKSPACE_BYTES = 8.125 * MIB

# Caching allocator (torch, CUDACachingAllocator: blocks of 2 and 20 MiB, larger ones rounded to 2 MiB).
ROUNDING = 1.01
# Of a card's printed size what a process can ever reserve (driver and ECC keep the rest of an A100 80 GB).
USABLE_SHARE = 0.985

# Tokens whose logits LitGPT computes at once (finetune/lora.py: lm_head_chunk_size=128).
LITGPT_HEAD_CHUNK = 128
# Chunks of torchtune's cross-entropy (modules/loss/CEWithChunkedOutputLoss: num_output_chunks=8).
TORCHTUNE_LOSS_CHUNKS = 8

# Measured over predicted, lowest and highest of the published rows with complete settings, rounded outwards
# (docs/stacks.md says which rows; benchmarks/other_stacks.py --rows prints them). By stack and metric on one GPU.
SCATTER: dict[str, dict[str, tuple[float, float]]] = {
    "litgpt": {"allocated": (0.95, 1.02)},
    "torchtune": {"allocated": (0.97, 1.07)},
    "hf-trainer": {"allocated": (0.97, 1.05), "reserved": (0.92, 1.25), "nvidia-smi": (0.92, 1.17)},
}
# Stacks that share the Trainer's terms and have complete rows.
MEASURED_LIKE_TRAINER = ("hf-trainer", "trl", "fms", "peft-loop", "fsdp-qlora")
# The same for every other stack and metric on one GPU (only rows with inferred settings exist), and for several GPUs.
UNCONFIRMED = (0.85, 1.25)
UNCONFIRMED_SEVERAL_GPUS = (0.7, 1.5)
SEVERAL_GPUS = {"allocated": (0.95, 1.10), "reserved": (0.83, 1.25), "nvidia-smi": (0.83, 1.42)}
