"""The work of a step has the right size: multiplications, bytes over the link, unpacked weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fitune.catalog import models
from fitune.speed.cards import card_rates
from fitune.speed.layer_work import LayerWork
from fitune.speed.roofline import predict_step
from fitune.speed.segments import Workload
from fitune.speed.shape import decoder_of
from fitune.speed.work import step_work, trained_params
from tests.speed.case import LEAN, LLAMA, LORA, decoder, plan

MOE = "Qwen/Qwen3-30B-A3B"
TINY_LORA = dataclasses.replace(LORA, r=1, targets=("q_proj",))


def products(work, *names: str) -> float:
    return sum(g.flops * s.times for s in work.segments if s.name in names for g in s.gemms)


def attention(work, name: str) -> float:
    return sum(s.attention_flops * s.times for s in work.segments if s.name == name)


def test_forward_of_8b_is_two_per_parameter_and_token():
    work = step_work(plan(adapter=TINY_LORA), decoder())
    layers = decoder().active_params - decoder().hidden * decoder().vocab
    assert products(work, "forward") == pytest.approx(2 * layers * 4 * 2048, rel=0.01)
    assert products(work, "loss") == pytest.approx(2 * 2 * decoder().hidden * decoder().vocab * 4 * 2048, rel=0.01)
    # two products of T x T x head size per head, half of them masked
    assert attention(work, "forward") == pytest.approx(32 * 4 * 32 * 2 * 2 * 2048**2 * 128 / 2, rel=0.01)


def test_frozen_base_has_no_weight_gradients_and_full_has():
    lora, full = (
        step_work(plan(base_format="bf16", **change), decoder())
        for change in (dict(adapter=TINY_LORA), dict(method="full", adapter=None))
    )
    assert products(lora, "backward") == pytest.approx(products(lora, "forward"), rel=0.02)
    assert products(lora, "backward") < products(lora, "forward")  # the first layer's input needs no gradient
    assert products(full, "backward") == pytest.approx(2 * products(full, "forward"), rel=0.001)


def test_recomputation_is_another_forward_of_those_layers():
    """Without the last product, which no backward pass reads: the MLP's way back to 4,096."""
    none, half, all_ = (step_work(plan(recompute_layers=n, adapter=TINY_LORA), decoder()) for n in (0, 16, 32))
    assert products(none, "recompute") == 0
    assert products(half, "recompute") == pytest.approx(products(all_, "recompute") / 2)
    assert products(all_, "forward") == products(none, "forward")
    spared = 32 * 2 * 14336 * 4096 * 4 * 2048
    assert products(all_, "forward") - products(all_, "recompute") == pytest.approx(spared)


def test_an_output_that_is_normalised_is_made_again():
    gemma = "google/gemma-3-1b-it"
    work = step_work(plan(1, 1024, gemma), decoder(gemma))
    assert products(work, "recompute") == products(work, "forward")


def total(work, what: str, *names: str) -> float:
    return sum(getattr(s, what) * s.times for s in work.segments if not names or s.name in names)


def test_every_streamed_layer_and_tile_is_ordered_by_the_host():
    """Once per pass of a micro-batch; once per pass of the whole step where accumulation is layer-major."""
    streaming = dict(stream_from="pinned", resident_layers=0)
    assert total(step_work(plan(), decoder()), "transfers") == 0
    assert total(step_work(plan(**streaming), decoder()), "transfers") == 64
    assert total(step_work(plan(micro_batch=1, **streaming), decoder()), "transfers") == 4 * 64
    major = step_work(plan(micro_batch=1, accumulation_order="layer-major", **streaming), decoder())
    assert total(major, "transfers") == pytest.approx(64)
    assert total(step_work(plan(**streaming, offload_inputs=True), decoder()), "transfers") == 128
    lean = step_work(plan(1, 2048, **LEAN), decoder())
    tiles = -(-128256 * 4096 * 2 // 2**26)
    assert total(lean, "transfers") == 128 + tiles
    half = step_work(plan(**(streaming | dict(resident_layers=16))), decoder())
    assert total(half, "transfers") == 32


def test_pieces_of_an_mlp_are_launched_one_by_one():
    """Each with its adapters and its unpacked weights; in backward each runs forward again, where the whole MLP's
    recomputation is not made."""
    whole, tiled = (step_work(plan(1, 2048, mlp_tiles=n), decoder()) for n in (1, 4))
    assert total(tiled, "kernels", "forward") > 1.8 * total(whole, "kernels", "forward")
    assert total(tiled, "kernels", "backward") > 2 * total(whole, "kernels", "backward")
    assert total(tiled, "kernels", "recompute") < total(whole, "kernels", "recompute")
    assert total(tiled, "unpacks", "forward") == (4 + 3 * 4) * 32
    assert products(tiled, "forward") == pytest.approx(products(whole, "forward"))


def test_a_heads_product_of_few_tokens_counts():
    """64 tokens at a time (a vocabulary of 262,144) are no adapter's narrow product."""
    gemma = "google/gemma-3-1b-it"
    work = step_work(plan(1, 8192, gemma, loss_chunk=64), decoder(gemma))
    (tail,) = [s for s in work.segments if s.name == "loss"]
    assert not any(g.narrow for g in tail.gemms)
    assert products(work, "loss") == pytest.approx(2 * 2 * decoder(gemma).hidden * decoder(gemma).vocab * 8192)
    times = [predict_step(w, card_rates("cuda", "NVIDIA H200")).parts["matmul"]
             for w in (work, step_work(plan(1, 8192, gemma, loss_chunk=128), decoder(gemma)))]  # fmt: skip
    assert times[0] > times[1], "the weight passes through memory twice as often"


def test_experts_fill_whole_tiles():
    """2,048 tokens x 8 of 128 experts are 128 tokens each: one tile of them, and half a tile that is not full."""
    work = step_work(plan(1, 2048, MOE, adapter=TINY_LORA), decoder(MOE))
    grouped = {g.m for s in work.segments if s.name == "forward" for g in s.gemms if g.grouped}
    assert grouped == {128 + 64}


def test_queries_and_keys_that_are_rotated_in_fp32():
    olmo, llama = (step_work(plan(2, 2048, model=name), decoder(name)) for name in ("allenai/OLMo-2-1124-7B", LLAMA))
    assert total(llama, "wide_rotated") == 0
    assert total(olmo, "wide_rotated", "forward") == 32 * 2 * 2048 * (32 + 32) * 128


def test_moe_multiplies_active_experts_and_reads_all():
    model = decoder(MOE)
    work = step_work(plan(1, 2048, MOE, adapter=TINY_LORA), model)
    dense = sum(sum(m.params for m in layer.linears) for layer in model.layers)
    experts = model.active_params - model.hidden * model.vocab - dense
    filled = (128 + 64) / 128  # see `test_experts_fill_whole_tiles`
    assert products(work, "forward") == pytest.approx(2 * (dense + filled * experts) * 2048, rel=0.02)
    unpacked = total(work, "unpack_bytes", "forward")
    stored = sum(layer.params for layer in model.layers)
    assert unpacked == pytest.approx(stored * 2.5, rel=0.01)


@pytest.mark.parametrize("seq_len", [4096, 8192])
def test_windowed_attention_grows_with_length_and_causal_with_its_square(seq_len):
    gemma = "google/gemma-3-1b-it"  # 512 tokens of window in 5 of 6 layers
    per_kind = {}
    for length in (seq_len, 2 * seq_len):
        work = step_work(plan(1, length, gemma), decoder(gemma))
        forward = [s for s in work.segments if s.name == "forward" and s.attention_flops]
        per_kind[length] = sorted({s.attention_flops for s in forward})
    (window, whole), (window2, whole2) = per_kind[seq_len], per_kind[2 * seq_len]
    assert whole2 / whole == pytest.approx(4)
    assert window2 / window == pytest.approx(2, rel=0.1)


def test_documents_and_targets_of_the_data_are_counted():
    full = step_work(plan(), decoder())
    packed = step_work(plan(), decoder(), Workload(2048, target_share=0.25, doc_tokens=512))
    assert attention(packed, "forward") == pytest.approx(attention(full, "forward") / 4)
    assert products(packed, "loss") == pytest.approx(products(full, "loss") / 4)
    assert products(packed, "forward") == products(full, "forward")
    short = step_work(plan(), decoder(), Workload(1024))
    assert short.tokens == full.tokens / 2


def test_every_use_of_a_4_bit_weight_unpacks_it():
    work = step_work(plan(), decoder())
    first_layer_inputs = 3  # q, k and v of layer 0 are not needed for an input gradient
    spared = 32  # of the last product in recomputation
    assert sum(s.unpacks * s.times for s in work.segments) == 7 * 3 * 32 - first_layer_inputs - spared
    assert sum(s.unpacks * s.times for s in step_work(plan(base_format="bf16"), decoder()).segments) == 0


def test_link_bytes_of_streamed_weights():
    resident = step_work(plan(embedding_place="device"), decoder())
    assert resident.link_bytes == 0
    streaming = dict(stream_from="pinned", resident_layers=0, embedding_place="device")
    layer_bytes = decoder().layers[0].params * (0.5 + (1 + 4 / 256) / 64)
    once = step_work(plan(**streaming), decoder())
    assert once.link_bytes == pytest.approx(2 * 30 * layer_bytes)  # a ring of 2 holds two layers over each turn
    four = step_work(plan(micro_batch=1, **streaming), decoder())
    assert four.link_bytes == pytest.approx(4 * once.link_bytes)
    major = step_work(plan(micro_batch=1, accumulation_order="layer-major", **streaming), decoder())
    assert major.link_bytes == pytest.approx(once.link_bytes)
    half = step_work(plan(**(streaming | dict(resident_layers=16))), decoder())
    assert half.link_bytes == pytest.approx(2 * 14 * layer_bytes)


def test_link_bytes_of_inputs_and_head():
    inputs = step_work(plan(offload_inputs=True, embedding_place="device"), decoder())
    assert inputs.link_bytes == 2 * 32 * 4 * 2048 * 4096 * 2
    head = step_work(plan(head_place="host", embedding_place="device"), decoder())
    assert head.link_bytes == 2 * 128256 * 4096 * 2
    assert step_work(plan(8, 2048, **LEAN, embedding_place="device"), decoder()).link_bytes > head.link_bytes


def test_the_update_reads_what_is_trained():
    lora, full = step_work(plan(), decoder()), step_work(plan(method="full", adapter=None), decoder())
    moved = [next(s for s in w.segments if s.phase == "optimizer").memory_bytes for w in (lora, full)]
    assert moved[0] == 40 * 41_943_040  # peft's count of trainable parameters of Llama-3.1-8B at r = 16
    assert moved[1] == pytest.approx(46 * 8.03e9, rel=0.001)


def test_what_is_trained():
    """Adapters of rank 1 on a 4096 x 4096 product in 32 layers; half of them where a plan runs half of the layers."""
    assert trained_params(plan(adapter=TINY_LORA), decoder()) == 32 * (4096 + 4096)
    assert trained_params(plan(adapter=TINY_LORA, num_layers=16), decoder()) == 16 * (4096 + 4096)
    assert trained_params(plan(base_format="bf16", method="full", adapter=None), decoder()) == decoder().params


def test_what_is_counted_once_is_what_every_plan_would_count_by_itself():
    """Plans that differ in one setting each, of a decoder that keeps its layers' work and of new ones."""
    changes: list[dict[str, Any]] = [
        {}, dict(batch=8), dict(micro_batch=2), dict(seq_len=1024), dict(base_format="bf16"), dict(base_format="int8"),
        dict(method="full", adapter=None, base_format="bf16"), dict(double_quant=False), dict(adapter=TINY_LORA),
        dict(adapter=dataclasses.replace(LORA, dropout=0.1)), dict(adapter=dataclasses.replace(LORA, dora=True)),
        dict(device="cpu"), dict(precision="fp32"), dict(attention="efficient"), dict(attention="native"),
        dict(accumulation_order="layer-major", micro_batch=1), dict(recompute_layers=5), dict(mlp_tiles=4),
        dict(stream_from="pinned", resident_layers=9), dict(offload_inputs=True), dict(loss_chunk=64), LEAN,
        dict(num_layers=3), dict(optimizer="lion"),
    ]  # fmt: skip
    loads = None, Workload(2048, target_share=0.5), Workload(2048, doc_tokens=512)
    for name in (LLAMA, MOE, "google/gemma-2-2b"):
        kept = decoder_of(models.find(name))
        for change in changes:
            for load in loads:
                made = plan(**({"model": name} | change))
                assert step_work(made, kept, load) == step_work(made, decoder_of(models.find(name)), load), change


def test_layers_are_counted_once_for_plans_that_differ_in_their_copies_only(monkeypatch):
    counted: list[int] = []
    real = LayerWork.backward
    monkeypatch.setattr(LayerWork, "backward", lambda self, *how: counted.append(1) or real(self, *how))
    model = decoder_of(models.find(LLAMA))
    for resident in (0, 8, 16):
        for order in ("micro-batch-major", "layer-major"):
            where = dict(stream_from="pinned", resident_layers=resident, accumulation_order=order)
            step_work(plan(micro_batch=2, **where), model)
    assert len(counted) == 2, "the first layer, and one of the others"
