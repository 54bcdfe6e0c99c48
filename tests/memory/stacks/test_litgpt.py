"""LitGPT's terms against hand calculations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitune.memory.stacks import predict
from fitune.memory.stacks.litgpt import padded_vocab, saved_per_token
from tests.memory.stacks.runs import FALCON, LIT, LLAMA3

H, FFN, V, LAYERS, TOKENS = 4096, 11008, 32000, 32, 1024


def test_saved_activations_of_llama():
    """Two fp32 norms 8H; adapter's dropout and mask 3H; index_copy's source for q and v 4H; q, k, the whole qkv behind
    v, output 12H; softmax statistics; gate, its activation and up 6I. Counted with saved_tensors_hooks in litgpt
    0.4.13 (a layer of Llama-2-7B on a CPU, where dropout's mask has two bytes): 181,384 bytes a token."""
    saved, four_bit = saved_per_token(LIT)
    assert saved == 27 * H + 4 * 32 + 6 * FFN
    assert saved + H == pytest.approx(181_384, rel=0.003)
    assert four_bit == 0


def test_saved_activations_of_grouped_heads():
    """K and V expanded to all heads, and a v that is a copy of its own."""
    saved, _ = saved_per_token(replace(LIT, shape=LLAMA3))
    assert saved == 8 * H + 3 * H + 2 * (4096 + 1024) + 8 * H + 4 * 32 + 6 * 14336


def test_saved_activations_of_a_parallel_layer():
    """One fused LayerNorm keeps its 16-bit input; gelu keeps its own."""
    saved, _ = saved_per_token(replace(LIT, shape=FALCON))
    h, a, kv = 4544, 4544, 64
    assert saved == 2 * h + 3 * h + 2 * (a + kv) + 8 * a + 4 * 71 + 2 * 18176


def test_four_bit_matmul_keeps_its_inputs():
    """Two norm outputs, the re-assembled heads, the MLP's product, all in 16 bits."""
    _, four_bit = saved_per_token(replace(LIT, method="qlora", base_dtype="nf4"))
    assert four_bit == 2 * 2 * H + 2 * H + 2 * FFN


def test_inputs_of_the_previous_micro_batch_stay():
    now = replace(LIT, method="qlora", base_dtype="nf4")
    then = replace(now, released="2023-10")
    one_pass = LAYERS * TOKENS * (6 * H + 2 * FFN)
    gap = predict(now, "litgpt").phases["forward head"] - predict(then, "litgpt").phases["forward head"]
    assert gap == one_pass + 4 * V * TOKENS  # and the previous logits in fp32
    assert any("previous micro-batch stay" in note for note in predict(now, "litgpt").notes)


def test_peak_of_lora():
    predicted = predict(LIT, "litgpt")
    adapters = LIT.adapter_params
    kept = LAYERS * TOKENS * saved_per_token(LIT)[0]
    logits = 8 * V * TOKENS + 10 * V * 2 * 128
    assert predicted.phase == "backward"
    assert predicted.components["weights"] == 2 * LIT.shape.params
    assert predicted.components["optimizer"] == 4 * adapters and predicted.components["adapters"] == 2 * adapters
    assert predicted.components["activations"] == kept
    assert predicted.components["logits"] == logits


def test_head_is_quantised_and_dequantised_twice():
    """fp16 from the kernel, then a bf16 copy: four bytes an element."""
    predicted = predict(replace(LIT, method="qlora", base_dtype="nf4"), "litgpt")
    assert predicted.phase == "forward head"
    assert predicted.components["workspace"] == pytest.approx(4 * V * H, rel=0.02)
    linears = LIT.shape.linear_params + V * H
    assert predicted.components["weights"] == pytest.approx(0.5625 * linears + 2 * V * H, rel=1e-3)


def test_autocast_keeps_a_copy_of_the_head_per_chunk():
    mixed = replace(LIT, base_dtype="fp32 weights, bf16-mixed", micro_batch=1, seq_len=1034)
    more = predict(mixed, "litgpt").components["activations"] - 1034 * LAYERS * saved_per_token(mixed)[0]
    assert more == pytest.approx(2 * (LIT.shape.linear_params + 9 * V * H), rel=1e-6)


def test_vocabulary_is_padded():
    assert padded_vocab(32000) == 32000 and padded_vocab(50257) == 50304


def test_tied_head_is_stored_twice():
    shape = replace(LLAMA3, tied=True)
    assert predict(replace(LIT, shape=shape), "litgpt").components["weights"] == pytest.approx(
        2 * (shape.params + shape.embedding_params)
    )


def test_accumulated_gradients_are_whole_under_fsdp():
    run = replace(LIT, method="full", adapter_rank=0, adapter_targets=(), parallel="fsdp1", n_gpus=4,
                  loss="full_logits", grad_accum=4)  # fmt: skip
    assert predict(run, "litgpt").phases["optimizer step"] > 2 * LIT.shape.params
