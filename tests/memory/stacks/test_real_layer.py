"""The formula of one layer against torch: what a real Llama layer saves for backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitune.memory.stacks import StackSettings, StackShape
from fitune.memory.stacks.layers import Precision, layer_bytes

SHAPE = StackShape("tiny", 128, 2, 4, 4, 32, 352, 512, False)
ROWS, LENGTH = 2, 64


def saved_bytes_per_token(layers: int, *, lora: bool, autocast: bool, attention: str) -> float:
    """Bytes of the distinct storages that autograd keeps, without parameters and without the loss."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=4, attn_implementation=attention,
                         use_cache=False)  # fmt: skip
    model = LlamaModel(config).to(torch.bfloat16)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    fixed = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    found: dict[int, int] = {}
    kept = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed and tensor.numel() >= ROWS * LENGTH * 4:
            found[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    embedded = torch.randn(ROWS, LENGTH, 128, dtype=torch.bfloat16, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        model(inputs_embeds=embedded)
    return sum(found.values()) / (ROWS * LENGTH)


def per_layer(**how) -> float:
    """Difference of three layers and two: what one layer keeps."""
    return saved_bytes_per_token(3, **how) - saved_bytes_per_token(2, **how)


FULL = StackSettings(SHAPE, "full", checkpointing="no", attention="flash", micro_batch=ROWS, seq_len=LENGTH)
ADAPTED = replace(FULL, method="lora", adapter_rank=2, adapter_targets=("q", "v"))
PURE = Precision(residual=2, normed=2, adapter=2, autocast=False, dropout=0.0, trained_norms=True)
MIXED = Precision(residual=2, normed=2, adapter=4, autocast=True, dropout=0.0)


def test_full_fine_tuning_in_bf16():
    measured = per_layer(lora=False, autocast=False, attention="sdpa")
    assert layer_bytes(FULL, PURE).saved == pytest.approx(measured, rel=0.03)


def test_full_fine_tuning_with_eager_attention():
    measured = per_layer(lora=False, autocast=False, attention="eager")
    assert layer_bytes(replace(FULL, attention="eager"), PURE).saved == pytest.approx(measured, rel=0.05)


def test_adapters_under_autocast():
    """peft casts each adapter's input to fp32, autocast casts it back: two 16-bit copies of one tensor."""
    measured = per_layer(lora=True, autocast=True, attention="sdpa")
    assert layer_bytes(ADAPTED, MIXED).saved == pytest.approx(measured, rel=0.03)
