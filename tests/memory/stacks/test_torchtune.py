"""torchtune's terms against hand calculations and its own ladder of flags."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitune.memory.stacks import predict
from fitune.memory.stacks.torchtune import saved_per_token
from tests.memory.stacks.runs import TUNE

H, FFN, V, TOKENS, KV = 3072, 8192, 128256, 8192, 1024


def test_saved_when_compiled():
    """Two stream sums, two norm outputs, q and output 12H; k and v; gate, up, product 6I."""
    assert saved_per_token(TUNE) == 12 * H + 4 * KV + 4 * 24 + 6 * FFN


def test_saved_when_eager():
    """Norms 16H, q, k and v for all heads, output 8H; gate, its activation, up, product 8I."""
    assert saved_per_token(replace(TUNE, torch_compile=False)) == 24 * H + 4 * 24 + 8 * FFN


def test_fused_optimizer_has_no_temporaries():
    assert predict(TUNE, "torchtune").phases["optimizer step"] == pytest.approx(8 * TUNE.shape.params, rel=0.001)


def test_optimizer_in_backward_frees_the_gradients():
    in_backward = predict(replace(TUNE, optimizer="adamw_torch in backward"), "torchtune")
    assert in_backward.peak_bytes < predict(TUNE, "torchtune").peak_bytes
    assert in_backward.phase == "backward loss"


def test_activation_offload_takes_the_layer_inputs():
    run = replace(TUNE, optimizer="adamw_torch in backward")
    offloaded = predict(replace(run, offload="activations"), "torchtune")
    gap = predict(run, "torchtune").peak_bytes - offloaded.peak_bytes
    assert gap == 28 * 2 * H * TOKENS


def test_chunked_loss_keeps_16_bit_logits():
    chunked, whole = predict(TUNE, "torchtune"), predict(replace(TUNE, loss="full_logits"), "torchtune")
    gap = whole.phases["backward loss"] - chunked.phases["backward loss"]
    assert gap == (10 - 2) * V * TOKENS
    assert any("16-bit logits all exist at once" in note for note in chunked.notes)


def test_nf4_is_always_doubly_quantised():
    run = replace(TUNE, method="qlora", base_dtype="nf4", adapter_rank=8, adapter_targets=("q", "v"))
    again = replace(run, base_dtype="nf4 (double quant)")
    assert predict(run, "torchtune").peak_bytes == predict(again, "torchtune").peak_bytes
