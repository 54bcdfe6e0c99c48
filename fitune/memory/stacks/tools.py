"""The tools that can be predicted, and what each does about settings that a recipe leaves open."""

from __future__ import annotations

from dataclasses import dataclass

STACKS: dict[str, str] = {
    "hf-trainer": "transformers Trainer + peft + bitsandbytes, with peft's k-bit preparation",
    "trl": "TRL SFTTrainer 1.16: loads in fp32 unless told otherwise, loss fused with the head",
    "llamafactory": "LLaMA-Factory: Trainer without k-bit preparation, fp32 trained weights",
    "axolotl": "Axolotl: Trainer with flash attention, norms and head kept in 16 bits",
    "fms": "IBM fms-acceleration: Trainer with its fused kernels or 4-bit plugins",
    "ms-swift": "ms-swift: Trainer without k-bit preparation",
    "peft-loop": "a hand-written transformers + peft loop without autocast",
    "fsdp-qlora": "Answer.AI fsdp_qlora: FSDP with quantised shards",
    "litgpt": "LitGPT finetune: 16-bit true precision, no activation checkpointing on one GPU",
    "torchtune": "torchtune single-device recipes: all in bf16, chunked cross-entropy, torch.compile",
    "unsloth": "Unsloth: checkpoints in host memory, fused loss, 4-bit base",
}


@dataclass(frozen=True)
class Defaults:
    """What a tool does when nothing is said. Fields as in :class:`~fitune.memory.stacks.settings.StackSettings`.

    ``eval_batch`` 8 is per_device_eval_batch_size of transformers' TrainingArguments; None: as in training.
    ``full_dtype``: storage of weights that are trained, ``adapter_dtype`` of a base under adapters, ``rest_in_fp32``:
    what a quantised base leaves is fp32. ``optimizer_8bit``: what the tool calls an 8-bit AdamW.
    """

    optimizer: str = "adamw_torch_fused"
    full_optimizer: str = ""
    optimizer_8bit: str = "adamw_bnb_8bit"
    full_dtype: str = "bf16"
    adapter_dtype: str = "bf16"
    rest_in_fp32: bool = False
    checkpointing: str = "yes"
    attention: str = "sdpa"
    loss: str = "full_logits"
    dropout: float = 0.0
    torch_compile: bool = False
    kernels: str = ""
    eval_batch: int | None = 8


# transformers 5: TrainingArguments.optim is adamw_torch_fused; from_pretrained keeps the checkpoint's dtype. TRL loads
# a model named by its id in fp32 (trl 1.16.0 trainer/utils.py and model_config.py; huggingface/trl#3168), computes
# under bf16 autocast and fuses head and loss since 1.15; LLaMA-Factory casts trained weights to fp32 unless pure_bf16.
# torchtune, LitGPT: the published configurations of their 8B models.
DEFAULTS: dict[str, Defaults] = {
    "hf-trainer": Defaults(),
    "trl": Defaults(
        full_dtype="fp32 master + bf16 mixed", adapter_dtype="fp32 weights, bf16-mixed", rest_in_fp32=True,
        loss="fused",
    ),
    "llamafactory": Defaults(optimizer="adamw_torch", full_dtype="fp32 master + bf16 mixed"),
    "axolotl": Defaults(attention="flash"),
    "fms": Defaults(optimizer="adamw_torch", attention="flash"),
    "ms-swift": Defaults(),
    "peft-loop": Defaults(optimizer="adamw_torch", eval_batch=None),
    "fsdp-qlora": Defaults(optimizer="adamw_torch", eval_batch=None),
    "litgpt": Defaults(optimizer="adamw_torch", checkpointing="no", loss="chunked", dropout=0.05, eval_batch=None),
    "torchtune": Defaults(
        optimizer="adamw_torch_fused", full_optimizer="paged_adamw_8bit in backward", optimizer_8bit="paged_adamw_8bit",
        attention="flex", loss="chunked", eval_batch=None,
    ),
    "unsloth": Defaults(optimizer="adamw_8bit", checkpointing="unsloth", attention="flash", loss="fused",
                        kernels="unsloth"),
}  # fmt: skip
