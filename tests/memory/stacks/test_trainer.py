"""The Trainer's terms against hand calculations, one setting changed at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitune.memory.stacks import constants, predict
from fitune.memory.stacks.losses import full_loss, liger_chunk_tokens
from fitune.memory.stacks.trainer import PRESETS, prepare
from fitune.units import GIB, MIB
from tests.memory.stacks.runs import FULL, LOOP, LORA, QLORA

TOKENS = 4 * 4096
V, H, LAYERS = 32000, 4096, 32


@pytest.mark.parametrize(
    ("version", "alive", "forward", "backward"),
    [
        ((4, 45), False, 12, 12),  # fp32 logits, shifted copy, log-softmax; three gradients-time tensors
        ((4, 48), False, 14, 12),  # the 16-bit logits live on in the caller
        ((4, 50), False, 10, 12),  # labels are shifted, not logits
        ((5, 8), True, 10, 14),  # a loop that holds the outputs
    ],
)
def test_logits_by_version(version, alive, forward, backward):
    units = full_loss(replace(LORA, transformers=version), logits_bytes=2, outputs_alive=alive)
    assert (units.forward, units.backward) == (forward, backward)


def test_fp32_logits_need_no_copy():
    units = full_loss(replace(LORA, transformers=(5, 8)), logits_bytes=4, outputs_alive=True)
    assert (units.forward, units.backward) == (8, 16)


def test_fast_cross_entropy_saves_the_log_softmax():
    run = replace(LORA, loss="full_logits_fastce")
    assert full_loss(run, logits_bytes=2, outputs_alive=False).forward == 10


@pytest.mark.parametrize(("tokens", "expected"), [(16384, 2048), (512, 64), (8, 1)])
def test_liger_chunks(tokens, expected):
    """32000 / 4096: eight chunks, rounded up to a power of two."""
    assert liger_chunk_tokens(tokens, V, H) == expected


def test_lora_peak_is_the_forward_loss():
    """Weights 2 bytes, fp32 adapters with two moments, 32 inputs of 2H, final norm 6H, logits 14V."""
    predicted = predict(LORA, "trl")
    adapters = LORA.adapter_params
    weights = 2 * LORA.shape.params
    activations = TOKENS * (LAYERS * 2 * H + 6 * H)
    assert predicted.phase == "forward loss"
    assert predicted.components["weights"] == weights
    assert predicted.components["adapters"] == 4 * adapters
    assert predicted.components["optimizer"] == 8 * adapters
    assert predicted.components["activations"] == activations
    assert predicted.components["logits"] == TOKENS * 14 * V
    whole = weights + 12 * adapters + activations + TOKENS * 14 * V + 8.125 * MIB
    assert predicted.peak_bytes == pytest.approx(whole, abs=16)


def test_full_peak_is_the_optimizer_step():
    """bf16 weights, gradients, two moments, and the foreach update's square roots: ten bytes a parameter."""
    predicted = predict(FULL, "trl")
    assert predicted.phase == "optimizer step"
    assert predicted.peak_bytes == pytest.approx(10 * FULL.shape.params, rel=0.001)
    fused = predict(replace(FULL, optimizer="adamw_torch_fused"), "trl")
    assert fused.phases["optimizer step"] == pytest.approx(8 * FULL.shape.params, rel=0.001)


def test_fp32_master_weights_take_twice_as_much():
    predicted = predict(replace(FULL, base_dtype="fp32 master + bf16 mixed"), "trl")
    assert predicted.phases["optimizer step"] == pytest.approx(20 * FULL.shape.params, rel=0.001)


def test_kbit_preparation_widens_the_stream():
    """TRL casts embedding and head back, the norms stay fp32: 31 inputs of 4H and one of 2H."""
    trl, fms = predict(QLORA, "trl"), predict(QLORA, "fms")
    wider = TOKENS * (31 * 2 * H + 2 * H)  # layer inputs, and the final norm's output
    assert trl.components["activations"] - fms.components["activations"] == wider
    assert trl.components["weights"] - fms.components["weights"] == 2 * QLORA.shape.norm_params


def test_kbit_preparation_keeps_head_and_embedding_in_fp32_outside_trl():
    plain, trl = predict(QLORA, "hf-trainer"), predict(QLORA, "trl")
    assert plain.components["weights"] - trl.components["weights"] == 2 * 2 * V * H
    assert any(note.startswith("k-bit preparation upcasts embedding, head and norms to fp32") for note in plain.notes)
    assert not any("upcasts embedding" in note for note in trl.notes)
    assert "k-bit preparation" in plain.phases and "k-bit preparation" not in predict(QLORA, "fms").phases


def test_autocast_copies_an_fp32_head():
    """Two bytes an element beside the fp32 head, from its forward to its backward."""
    plain, trl = predict(QLORA, "hf-trainer"), predict(QLORA, "trl")
    assert plain.components["workspace"] - trl.components["workspace"] == 2 * V * H
    assert predict(replace(LOOP, method="qlora", base_dtype="nf4"), "peft-loop").components["workspace"] < 10 * MIB


def test_autocast_caches_all_trained_weights():
    mixed = replace(FULL, base_dtype="fp32 master + bf16 mixed")
    grown = predict(mixed, "trl").phases["forward loss"] - predict(FULL, "trl").phases["forward loss"]
    stream = TOKENS * (LAYERS * 2 * H + 2 * H)  # fp32 between the layers, and the final norm's output
    assert grown == pytest.approx((2 + 4 + 2) * FULL.shape.params + stream, rel=1e-6)


def test_kbit_preparation_can_be_said():
    asked = predict(replace(QLORA, kbit_preparation=False), "hf-trainer")
    assert asked.components["weights"] == predict(QLORA, "fms").components["weights"]


def test_trl_dropped_the_preparation_at_1_0():
    """trl 1.16: no preparation, adapters of a quantised base in bf16; evaluation goes through the fused head too."""
    now = predict(replace(QLORA, tool_version=None), "trl")
    then = predict(QLORA, "trl")
    assert "k-bit preparation" in then.phases and "k-bit preparation" not in now.phases
    assert now.components["adapters"] == then.components["adapters"] / 2
    asked = replace(QLORA, tool_version=None, loss="fused", evaluation=True, eval_batch=8)
    assert predict(asked, "trl").phase != "evaluation" and predict(asked, "axolotl").phase == "evaluation"


def test_liger_kernels_write_over_gate_and_up():
    """Two tensors kept and one gradient instead of three each, in two bytes; a norm keeps only its input."""
    run = replace(QLORA, kernels="liger")
    with_, without = (prepare(each, PRESETS["fms"]).layer for each in (run, QLORA))
    assert without.peak - with_.peak == 3 * 2 * 14336 + (8 - 2) * H


def test_gptq_is_not_upcast():
    run = prepare(replace(QLORA, base_dtype="gptq-int4"), PRESETS["hf-trainer"])
    assert not run.kbit and run.precision.residual == 2


def test_paged_moments_are_not_counted():
    assert predict(LOOP, "peft-loop").components["optimizer"] == 0


def test_no_checkpointing_keeps_every_layer():
    kept = predict(replace(LORA, checkpointing="no"), "trl")
    assert kept.components["activations"] > 5 * predict(LORA, "trl").components["activations"]


def test_unsloth_keeps_no_inputs_on_the_gpu():
    run = replace(QLORA, loss="fused", checkpointing="unsloth", kernels="unsloth")
    grown = predict(replace(run, micro_batch=8), "unsloth").peak_bytes - predict(run, "unsloth").peak_bytes
    usual = replace(run, checkpointing="yes")
    with_inputs = predict(replace(usual, micro_batch=8), "unsloth").peak_bytes - predict(usual, "unsloth").peak_bytes
    assert with_inputs - grown == pytest.approx(TOKENS * LAYERS * 2 * H, rel=0.04)


def test_fused_loss_takes_the_logits_away():
    assert predict(replace(LORA, loss="fused"), "trl").phases["forward loss"] < 0.75 * predict(LORA, "trl").peak_bytes


def test_evaluation_computes_whole_logits_whatever_the_loss():
    """14 bytes for each entry, eight rows."""
    run = replace(LORA, loss="fused", evaluation=True, eval_batch=8)
    predicted = predict(run, "trl")
    assert "evaluation" not in predict(LORA, "trl").phases
    assert predicted.phase == "evaluation"
    assert predicted.components["logits"] == 8 * 4096 * 14 * V
    assert any(note.startswith("evaluation computes whole logits, 8x4096x32000") for note in predicted.notes)


def test_zero_keeps_fp32_partitions():
    """Eight GPUs, stage 3: bf16 weights and gradients, fp32 master and moments, an eighth of each; stage 2 keeps all
    weights and a bucket of 5e8 elements."""
    full = replace(FULL, base_dtype="fp32 master + bf16 mixed", parallel="zero3", n_gpus=8)
    third = predict(full, "trl")
    assert third.components["weights"] == pytest.approx(2 * FULL.shape.params / 8)
    assert third.components["optimizer"] >= 12 * FULL.shape.params / 8
    second = predict(replace(full, parallel="zero2"), "trl")
    assert second.components["weights"] == 2 * FULL.shape.params
    assert second.components["workspace"] == pytest.approx(2 * 5e8, rel=0.02)
    first = predict(replace(full, parallel="zero1"), "trl")
    assert first.phases["optimizer step"] - second.phases["optimizer step"] == pytest.approx(
        2 * FULL.shape.params * 7 / 8, rel=1e-6
    )


def test_zero_offload_leaves_the_weights():
    run = replace(FULL, parallel="zero2", n_gpus=8, offload="cpu optimizer")
    assert predict(run, "trl").components["optimizer"] == 0


def test_zero3_holds_up_to_a_billion_gathered_elements():
    run = replace(LORA, parallel="zero3", n_gpus=8, loss="fused")
    assert predict(run, "trl").phase == "backward, last layer"
    assert predict(run, "trl").components["workspace"] == pytest.approx(2e9, rel=0.05)


def test_eager_attention_keeps_the_scores():
    flash = prepare(LORA, PRESETS["trl"]).layer
    eager = prepare(replace(LORA, attention="eager"), PRESETS["trl"]).layer
    # fp32 softmax and its 16-bit copy, and K and V repeated for all heads
    assert eager.saved - flash.saved == 6 * 32 * 4096 + 2 * 2 * (4096 - 1024)


def test_accumulation_keeps_gradients_through_the_loss():
    once, twice = predict(FULL, "trl"), predict(replace(FULL, grad_accum=2), "trl")
    grown = twice.phases["forward loss"] - once.phases["forward loss"]
    assert grown == pytest.approx(2 * FULL.shape.params, rel=1e-6)


def test_fsdp_shards_states_and_gathers_layers():
    one = predict(FULL, "trl")
    two = predict(replace(FULL, parallel="fsdp1", n_gpus=2, micro_batch=2), "trl")
    assert two.phases["optimizer step"] == pytest.approx(one.phases["optimizer step"] / 2, rel=0.001)
    offloaded = predict(replace(FULL, parallel="fsdp1", n_gpus=2, offload="cpu params+optimizer"), "trl")
    assert offloaded.components["weights"] == 0 and offloaded.components["optimizer"] == 0


def test_components_add_up_and_context_is_apart():
    for run in (FULL, LORA, QLORA):
        predicted = predict(run, "trl")
        inside = sum(size for name, size in predicted.components.items() if name != "context")
        assert inside == pytest.approx(predicted.peaks["allocated"], abs=16)
        driver = predicted.peaks["nvidia-smi"] - predicted.peaks["reserved"]
        assert driver == predicted.components["context"] == constants.CUDA_CONTEXT_BYTES


def test_reserved_lies_between_allocated_and_card():
    """8x4096 full would cache more than the card has: the allocator gives back and starts over."""
    wide = predict(replace(FULL, micro_batch=8), "trl")
    capped = predict(replace(FULL, micro_batch=8, card_gib=80.0), "trl")
    assert wide.peaks["nvidia-smi"] > 80 * GIB > capped.peaks["nvidia-smi"] > capped.peaks["allocated"]


def test_logits_and_layers_lie_side_by_side_in_the_cache():
    whole, fused = predict(LORA, "trl"), predict(replace(LORA, loss="fused"), "trl")
    assert whole.peaks["reserved"] > 1.1 * whole.peaks["allocated"]
    assert fused.peaks["reserved"] < 1.08 * fused.peaks["allocated"]
