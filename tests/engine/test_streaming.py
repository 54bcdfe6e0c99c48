"""Streamed weights, offloaded inputs and a head in host memory against the resident step: the same numbers."""

from __future__ import annotations

import pytest
import torch

from fitune.engine import ring as rings
from fitune.engine.engine import Engine
from fitune.engine.ring import Ring
from fitune.errors import UserError
from fitune.model.attention import uses_interface
from fitune.model.build import add_adapter, build, fill
from tests import tiny
from tests.engine.test_step import gradients

STREAMED = dict(stream_from="pinned", resident_layers=0)
MODELS = ["llama", "qwen3", "gemma3", "qwen3_moe"]
FORMATS = {"nf4": ("nf4", "bf16"), "bf16": ("bf16", "bf16"), "fp32": ("fp32", "fp32")}
RECS = tiny.records(6)
BATCHES = [tiny.padded(RECS[:2]), tiny.padded(RECS[2:4], 2), tiny.padded(RECS[4:], 4)]


@pytest.fixture(scope="module")
def models():
    return {name: tiny.reference(name) for name in MODELS}


def engine_for(model, **changes) -> Engine:
    """Adapters away from zero, so that both of a pair have gradients."""
    kernel = "cpu" if uses_interface(type(model)) else "native"
    plan = tiny.make_plan(num_layers=model.config.num_hidden_layers, attention=kernel, **changes)
    built = build(model.config, plan, "cpu")
    fill(built, model.state_dict().items(), plan)
    add_adapter(built, plan)
    for linear in built.linears.values():
        if linear.lora_B is not None:
            linear.lora_B.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(linear.module_key & 0xFFFF))
    return Engine(built, plan)


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    assert set(ours[1]) == set(theirs[1])
    for name, grad in theirs[1].items():
        assert torch.equal(ours[1][name], grad), name


def both(model, streamed, common=None, batches=BATCHES):
    """(streamed, resident): loss and gradients of a step."""
    common = common or {}
    return (
        gradients(engine_for(model, **common, **STREAMED | streamed), batches),
        gradients(engine_for(model, **common), batches),
    )


# -- the same to the bit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_streamed_equals_resident(models, name, format):
    base_format, precision = FORMATS[format]
    assert_same(*both(models[name], {}, dict(base_format=base_format, precision=precision)))


WAYS = {
    "ring of 3": (dict(ring_buffers=3), {}),
    "two layers resident": (dict(resident_layers=2), {}),
    "one layer streamed": (dict(resident_layers=3), {}),
    "pageable": (dict(stream_from="pageable"), {}),
    "nothing recomputed": ({}, dict(recompute_layers=0)),
    "some recomputed": ({}, dict(recompute_layers=2)),
    "layer-major": ({}, dict(accumulation_order="layer-major")),
    "inputs offloaded": (dict(offload_inputs=True), {}),
    "layer-major, some inputs offloaded": (
        dict(offload_inputs=True), dict(accumulation_order="layer-major", recompute_layers=3),
    ),
    "dropout": ({}, dict(adapter=tiny.Adapter(4, 8, 0.2, "none", ("all-linear",)))),
    "trained biases": ({}, dict(adapter=tiny.Adapter(4, 8, 0.0, "all", ("q_proj",)))),
    "dora": ({}, dict(adapter=tiny.Adapter(4, 8, 0.0, "none", ("all-linear",), dora=True))),
    "fp16": ({}, dict(base_format="fp16", precision="fp16", loss_scaling=True)),
    "int8": ({}, dict(base_format="int8", precision="bf16")),
    "fp4 without double quantisation": ({}, dict(base_format="fp4", double_quant=False)),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_every_way_equals_resident(models, name, way):
    streamed, common = WAYS[way]
    assert_same(*both(models[name], streamed, dict(base_format="nf4") | common))


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "qwen3_5", "deepseek_v3"])
def test_unusual_layers(name):
    """Transposed weights with biases; sinks, biases and dense fused experts; recurrent layers; grouped routers. All of
    them kept and not recomputed: what autograd saves of a ring buffer must be found again after it was overwritten."""
    assert_same(*both(tiny.reference(name), {}, dict(recompute_layers=1)))


def test_gpt_oss_in_4_bits():
    """Sinks, sliding windows and transposed fused experts with biases, packed and streamed."""
    assert_same(*both(tiny.reference("gpt_oss"), dict(offload_inputs=True), dict(base_format="nf4", precision="bf16")))


def test_evaluation_in_pieces_of_an_mlp(models):
    """Long rows are evaluated in pieces too."""
    whole, tiled = (engine_for(models["llama"], mlp_tiles=tiles) for tiles in (1, 4))
    seen = []
    for module in tiled.built.model.modules():
        if hasattr(module, "gate_proj"):
            module.gate_proj.register_forward_hook(lambda m, args, out: seen.append(out.shape[0]))
    total, count = tiled.evaluate(BATCHES[:1])
    assert total == pytest.approx(whole.evaluate(BATCHES[:1])[0], rel=1e-5)
    tokens = BATCHES[0].input_ids.size
    assert len(seen) == 4 * 4 and max(seen) == -(-tokens // 4), "four layers, four pieces"


def test_packed_rows(models):
    packed = tiny.batch_of([[(0, RECS[0]), (1, RECS[1]), (2, RECS[2])], [(3, RECS[3]), (4, RECS[4])]])
    assert_same(*both(models["llama"], dict(offload_inputs=True), batches=[packed]))


def test_rows_of_other_lengths_in_every_micro_batch(models):
    """Offloaded inputs of different sizes share one host buffer."""
    batches = [tiny.padded(tiny.records(2, longest=n, seed=n)) for n in (40, 9, 23)]
    common = dict(accumulation_order="layer-major")
    assert_same(*both(models["llama"], dict(offload_inputs=True), common, batches))


def test_some_steps_with_their_updates(models):
    made = [engine_for(models["llama"], base_format="nf4", clip=1.0, **changes) for changes in (STREAMED, {})]
    results = [
        [engine.step(BATCHES, step=step, lr=1e-2).loss for step in range(5)] + [engine.evaluate(BATCHES)]
        for engine in made
    ]
    assert results[0] == results[1]
    theirs = made[1].trained_tensors()
    assert all(torch.equal(t, theirs[n]) for n, t in made[0].trained_tensors().items())


def test_a_saved_state_goes_on_streamed(models):
    """A run that began resident can be resumed streamed, and the other way round."""
    plain = engine_for(models["llama"], base_format="nf4")
    plain.step(BATCHES, step=0, lr=1e-2)
    tensors, values = plain.state()
    streamed = engine_for(models["llama"], base_format="nf4", **STREAMED)
    streamed.load_state({n: t.clone() for n, t in tensors.items()}, values)
    after = [engine.step(BATCHES, step=1, lr=1e-2).loss for engine in (plain, streamed)]
    assert after[0] == after[1]
    assert all(torch.equal(t, streamed.trained_tensors()[n]) for n, t in plain.trained_tensors().items())


def test_a_step_that_failed_is_run_again(models):
    """Memory may run out anywhere: the ring and the inputs in host memory start again from the beginning."""
    engine = engine_for(models["llama"], offload_inputs=True, **STREAMED)
    run_layer, calls = engine.driver.run_layer, []

    def failing(index, *args, **kwargs):
        calls.append(index)
        if len(calls) == 7:
            raise RuntimeError("CUDA out of memory")
        return run_layer(index, *args, **kwargs)

    engine.driver.run_layer = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step(BATCHES, step=0, lr=0.0)
    engine.abandon()
    assert_same(gradients(engine, BATCHES), gradients(engine_for(models["llama"]), BATCHES))


# -- the head in host memory ----------------------------------------------------------------------------------------


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(rings, "HEAD_TILE_BYTES", 64 * 64 * 4)  # 64 vocabulary entries of 256, or 128 in 16 bit


@pytest.mark.parametrize("order", ["micro-batch-major", "layer-major"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere2"])
def test_head_in_tiles(small_tiles, name, precision, order):
    """Against the head whole: plain, soft-capped and scaled logits; tied to the embedding (gemma2, cohere2) or not. In
    fp32 only the sums' order differs; in bf16 the error against fp32 arithmetic is the whole head's own."""
    model = tiny.reference(name)
    common = dict(precision=precision, base_format=precision, accumulation_order=order)
    engine = engine_for(model, **common, **STREAMED, head_place="host", embedding_place="host")
    assert engine.driver.tiled_head is not None and engine.driver.tiled_head.num_tiles == (
        4 if precision == "fp32" else 2
    )
    assert engine.driver.plain_logits == (name == "llama")
    loss, ours = gradients(engine, BATCHES)
    expected, theirs = gradients(engine_for(model, **common), BATCHES)
    assert loss == pytest.approx(expected, rel=1e-6)
    _, exact = gradients(engine_for(model, **common | dict(precision="fp32")), BATCHES)
    for name, grad in exact.items():
        allowed = 3e-6 * grad.norm() if precision == "fp32" else 1.25 * (theirs[name] - grad).norm()
        assert (ours[name] - grad).norm() <= allowed + 1e-9, name
    total, count = engine.evaluate(BATCHES)
    assert total / count == pytest.approx(loss, rel=1e-6)


def test_head_alone_in_host_memory(small_tiles, models):
    """Layers resident, only the head streamed."""
    engine = engine_for(models["llama"], head_place="host")
    assert isinstance(engine.driver.weights, Ring)
    loss, ours = gradients(engine, BATCHES)
    expected, theirs = gradients(engine_for(models["llama"]), BATCHES)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert all((ours[n] - g).abs().max() <= 2e-6 * g.abs().max() + 1e-9 for n, g in theirs.items())


def test_logits_that_depend_on_each_other_are_made_whole(small_tiles, models, monkeypatch):
    """A model whose code after the head looks at all logits of a token: the head is streamed, the loss is not tiled."""
    model = models["llama"]
    plain = type(model).forward

    def centred(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        out.logits = out.logits - 0.5 * out.logits.amax(-1, keepdim=True)
        return out

    monkeypatch.setattr(type(model), "forward", centred)
    engine = engine_for(model, **STREAMED, head_place="host")
    assert engine.driver.tiled_head is None
    loss, ours = gradients(engine, BATCHES)
    expected, theirs = gradients(engine_for(model), BATCHES)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert all((ours[n] - g).abs().max() <= 2e-6 * g.abs().max() + 1e-9 for n, g in theirs.items())


def test_head_that_must_stay(monkeypatch):
    trains_bias = tiny.Adapter(4, 8, 0.0, "all", ("all-linear",))
    monkeypatch.setitem(tiny.ARCHITECTURES, "phi", ("PhiConfig", dict(partial_rotary_factor=0.5)))
    model = tiny.reference("phi")
    engine = engine_for(model, head_place="host", adapter=trains_bias)
    assert engine.built.host_head is None
    assert "the output head stays on the device: it is no plain linear layer, or its bias is trained" in (
        engine.built.notes
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(method="full"), "cannot stream the weights of full fine-tuning"),
        (dict(method="full", stream_from="none", head_place="host"), "cannot keep the output head of full fine-tuning"),
        (dict(ring_buffers=1), "cannot stream through 1 buffer"),
    ],
)
def test_plans_that_cannot_be_built(models, changes, message):
    with pytest.raises(UserError, match=message):
        engine_for(models["llama"], **STREAMED | changes)


def test_more_than_the_ram_there_is(models, monkeypatch):
    from fitune.hardware.host import Memory
    from fitune.model import streamed

    monkeypatch.setattr(streamed, "host_memory", lambda root: Memory(1 << 30, 1000, "machine"))
    with pytest.raises(UserError, match=r"not enough RAM for the weights that wait outside the GPU(.|\n)*from disk"):
        engine_for(models["llama"], **STREAMED)


def test_a_replan_takes_effect_in_the_middle_of_a_run(models):
    engine = engine_for(models["llama"], **STREAMED)
    before = gradients(engine, BATCHES)
    engine.plan = engine.plan.with_(offload_inputs=True, accumulation_order="layer-major")
    engine.plan = engine.plan.with_(recompute_layers=3)
    after = gradients(engine, BATCHES)
    assert before[0] == pytest.approx(after[0], rel=1e-6)
    assert engine._inputs_in_host.host_bytes() > 0


# -- what it costs and what it saves --------------------------------------------------------------------------------


def device_bytes(engine) -> int:
    """Storages of the model that would be on the GPU: everything but the host store."""
    built = engine.built
    tensors = [*built.model.parameters(), *built.model.buffers()]
    tensors += [t for linear in built.linears.values() for t in linear.packed.tensors.values()]
    tensors += [t for e in built.experts for packed in e.packed.values() for t in packed.tensors.values()]
    if isinstance(engine.driver.weights, Ring):
        tensors += [t for _, t in engine.driver.weights.device_tensors()]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("buffers", [2, 3])
def test_the_device_holds_the_ring_and_not_the_layers(buffers):
    model = tiny.reference("llama", num_hidden_layers=8)
    resident = engine_for(model, base_format="nf4", precision="bf16")
    streamed = engine_for(model, base_format="nf4", precision="bf16", ring_buffers=buffers, **STREAMED)
    half = engine_for(model, base_format="nf4", precision="bf16", **STREAMED | dict(resident_layers=4))
    store = streamed.built.streamed
    layer = store.largest_bytes
    assert store.total_bytes == 8 * layer
    saved = device_bytes(resident) - device_bytes(streamed)
    padding = 8 * 512 * len(store.layouts[0].pieces)
    assert (8 - buffers) * layer - padding <= saved <= (8 - buffers) * layer
    assert device_bytes(resident) - device_bytes(half) >= (4 - 2) * layer - padding


def test_what_a_buffer_is_filled_with_does_not_count_as_a_change_of_another_layer(models):
    """A thread fills one buffer while autograd holds the weights of the layer in the other one."""
    engine = engine_for(models["llama"], **STREAMED)
    ring = engine.driver.weights
    assert isinstance(ring, Ring)
    norms = [layer.input_layernorm.weight for layer in engine.built.layers]
    before = [weight._version for weight in norms]
    for slot in ring.slots:
        slot.buffer.zero_()
    assert [weight._version for weight in norms] == before


def test_the_head_leaves_the_device():
    model = tiny.reference("llama", vocab_size=4096)
    kept, gone = (
        engine_for(model, head_place=place, embedding_place="host", **STREAMED) for place in ("device", "host")
    )
    assert device_bytes(kept) - device_bytes(gone) >= 4096 * 64 * 4 - 64 * 64 * 4
    tied = tiny.reference("gemma2", vocab_size=4096)
    kept, gone = (
        engine_for(tied, head_place=place, embedding_place="host", **STREAMED) for place in ("device", "host")
    )
    assert device_bytes(kept) - device_bytes(gone) >= 4096 * 64 * 4 - 64 * 64 * 4


def test_layer_major_moves_every_weight_twice_per_step(models):
    """Once forward and once backward, less what is still in the ring: two layers at the turn, two at the start."""
    order = dict(accumulation_order="layer-major")
    engine = engine_for(models["llama"], **STREAMED, **order)
    layer = engine.built.streamed.largest_bytes
    first = engine.step(BATCHES, step=0, lr=1e-3).link
    later = engine.step(BATCHES, step=1, lr=1e-3).link
    assert (first.bytes_moved, later.bytes_moved) == ((4 + 2) * layer, (2 + 2) * layer)
    each = engine_for(models["llama"], **STREAMED)
    each.step(BATCHES, step=0, lr=1e-3)
    assert each.step(BATCHES, step=1, lr=1e-3).link.bytes_moved == 3 * (2 + 2) * layer
    assert later.copy_s > 0 and later.wait_s > 0 and later.link_bytes_per_s == later.bytes_moved / later.copy_s
    assert engine_for(models["llama"]).step(BATCHES, step=0, lr=1e-3).link is None


@pytest.mark.parametrize("changes", [dict(offload_inputs=True, head_place="host"), dict(stream_from="pageable")])
def test_nothing_grows_over_200_steps(changes):
    import gc

    model = tiny.reference("llama", num_hidden_layers=3, intermediate_size=64)
    engine = engine_for(model, recompute_layers=3, **STREAMED | changes)
    batches = [tiny.padded(tiny.records(1, longest=8))]

    def storages() -> int:
        gc.collect()
        return sum(1 for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))

    for step in range(3):
        engine.step(batches, step=step, lr=1e-4)
    before, buffers = storages(), [slot.buffer.data_ptr() for slot in engine.driver.weights.slots]
    for step in range(3, 200):
        engine.step(batches, step=step, lr=1e-4)
    assert storages() <= before + 2
    assert [slot.buffer.data_ptr() for slot in engine.driver.weights.slots] == buffers
