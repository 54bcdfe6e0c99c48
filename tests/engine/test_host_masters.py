"""Masters, gradients and optimizer state in host memory against the same on the device: the same updates."""

from __future__ import annotations

import copy
import threading
import weakref

import pytest
import torch

from fitune.engine import host_parcels, place
from fitune.engine.engine import Engine
from fitune.engine.host_masters import HostMasters
from fitune.engine.parts import ENDS, require_host_update
from fitune.errors import UserError
from tests import tiny
from tests.engine.test_streaming import BATCHES, STREAMED, engine_for

HOST = dict(optimizer_place="host")
FULL = dict(method="full", base_format="bf16", precision="bf16")
NF4 = dict(base_format="nf4", precision="bf16")


@pytest.fixture(scope="module")
def models():
    return {name: tiny.reference(name) for name in ("llama", "gemma3", "qwen3_moe")}


def made(model, **changes) -> Engine:
    return engine_for(copy.deepcopy(model), **changes)  # full fine-tuning in fp32 trains the reference's own tensors


def trained(engine: Engine, num_steps: int = 3, batches=BATCHES):
    """Losses and norms of some steps, an evaluation, and the masters after them."""
    results = [engine.step(batches, step=step, lr=1e-2) for step in range(num_steps)]
    numbers = [(r.loss, r.grad_norm) for r in results] + [engine.evaluate(batches)]
    return numbers, {name: t.clone() for name, t in engine.trained_tensors().items()}


def assert_same_training(one, other, abs=0.0):
    (numbers, tensors), (expected, theirs) = one, other
    assert set(tensors) == set(theirs)
    if abs == 0.0:
        assert numbers == expected
    for name, tensor in theirs.items():
        assert (tensors[name] - tensor).abs().max() <= abs, name


ADAPTERS = {
    "update beside backward": dict(clip=0.0),
    "clipped": dict(clip=0.1),
    "16-bit working copies, layer-major": dict(clip=0.1, accumulation_order="layer-major", **NF4),
    "streamed base": dict(clip=0.1, **NF4, **STREAMED),
    "fp16": dict(clip=0.1, base_format="fp16", precision="fp16", loss_scaling=True),
    "8-bit state": dict(clip=0.1, optimizer="adamw8bit", **NF4),
    "dora": dict(adapter=tiny.Adapter(4, 8, 0.0, "none", ("all-linear",), dora=True), **NF4),
    "trained biases": dict(adapter=tiny.Adapter(4, 8, 0.0, "all", ("q_proj",)), clip=0.1, **NF4),
    "fused experts, streamed base": dict(
        adapter=tiny.Adapter(4, 8, 0.0, "none", ("q_proj", "experts")), clip=0.1, **NF4, **STREAMED),
}  # fmt: skip


@pytest.mark.parametrize("way", ADAPTERS)
def test_adapters_are_updated_as_on_the_device(models, way):
    """To the bit."""
    name = "qwen3_moe" if "streamed base" in way else "llama"
    model = tiny.reference("qwen2") if way == "trained biases" else models[name]
    device = {k: v for k, v in ADAPTERS[way].items() if k not in STREAMED}
    assert_same_training(trained(made(model, **ADAPTERS[way], **HOST)), trained(made(model, **device)))


FULLS = {
    "llama": dict(clip=0.1),
    "gemma3": dict(clip=0.1, recompute_layers=2, ring_buffers=3, resident_layers=1),
    "qwen3_moe": dict(clip=0.0, accumulation_order="layer-major"),
}


@pytest.mark.parametrize("name", FULLS)
def test_full_fine_tuning_with_streamed_weights(models, name):
    """Gemma's head is tied. Gradients of the head and embedding are added up in another order over micro-batches."""
    streamed = STREAMED | FULLS[name]
    resident = {k: v for k, v in FULLS[name].items() if k not in ("ring_buffers", "resident_layers")}
    engine = made(models[name], **FULL, **streamed, **HOST)
    assert engine.in_host is not None and len(engine.in_host.stores) > 20
    assert_same_training(trained(engine), trained(made(models[name], **FULL, **resident)), abs=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_full_fine_tuning_in_fp32(models, clip):
    """The weights that stream are the masters themselves; one micro-batch: to the bit."""
    common = dict(method="full", base_format="fp32", clip=clip)
    engine = made(models["llama"], **common, **STREAMED, **HOST)
    ours = trained(engine, batches=BATCHES[:1])
    assert_same_training(ours, trained(made(models["llama"], **common), batches=BATCHES[:1]))
    name = "model.layers.1.mlp.up_proj.weight"
    assert engine.in_host.stores[name].data_ptr() == engine.in_host.pairs[name][1].data_ptr()


def test_8_bit_state_of_streamed_weights(models):
    common = dict(FULL, clip=0.1, optimizer="adamw8bit")
    ours = trained(made(models["llama"], **common, **STREAMED, optimizer_place="streamed"))
    assert_same_training(ours, trained(made(models["llama"], **common)), abs=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_resumed_to_the_bit(models, method, clip):
    """Saved from the middle, the update still going on; also into an engine whose state is on the device."""
    common = dict(clip=clip, **(FULL if method == "full" else NF4))
    one = made(models["llama"], **common, **STREAMED, **HOST)
    one.step(BATCHES, step=0, lr=1e-2)
    tensors, values = one.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    others = [made(models["llama"], **common, **STREAMED, **HOST), made(models["llama"], **common)]
    for other in others:
        other.load_state({name: tensor.clone() for name, tensor in tensors.items()}, values)
    first, *rest = [trained(engine) for engine in (one, *others)]
    assert_same_training(rest[0], first)
    assert_same_training(rest[1], first, abs=0.0 if method == "lora" else 1e-6)


def test_another_runs_state_is_refused(models):
    one = made(models["llama"], **NF4, **HOST)
    one.step(BATCHES, step=0, lr=1e-2)
    tensors, values = one.state()
    other = made(models["llama"], **NF4 | HOST, adapter=tiny.Adapter(4, 8, 0.0, "none", ("q_proj",)))
    with pytest.raises(UserError, match="the checkpoint does not fit this run"):
        other.load_state(tensors, values)


def test_whole_weights_are_those_that_stream(models):
    engine = made(models["gemma3"], **FULL, **STREAMED, **HOST)
    engine.step(BATCHES, step=0, lr=1e-2)
    whole = engine.whole_weights()
    masters = engine.trained_tensors()
    assert set(masters) <= set(whole)
    assert all(torch.equal(whole[name], master.bfloat16()) for name, master in masters.items())
    assert all(whole[name] is store for name, store in engine.in_host.stores.items()), "no second copy"


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_that_failed_is_run_again(models, clip):
    """What had left already is dropped."""
    engine, plain = (made(models["llama"], clip=clip, **NF4, **more) for more in (STREAMED | HOST, {}))
    run_layer, calls = engine.driver.run_layer, []

    def failing(index, *args, **kwargs):
        calls.append(index)
        if len(calls) == 7:  # in the first group's backward pass
            raise RuntimeError("CUDA out of memory")
        return run_layer(index, *args, **kwargs)

    engine.driver.run_layer = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step(BATCHES, step=0, lr=1e-2)
    assert not engine.updating
    engine.abandon()
    assert_same_training(trained(engine), trained(plain))


def test_a_failure_after_the_first_update_cannot_be_replayed(models):
    engine = made(models["llama"], **NF4, **HOST)
    backward = engine.in_host.send

    def failing(part, *, last):
        backward(part, last=last)
        if part == 1:
            engine.in_host.wait(1)
            raise RuntimeError("CUDA out of memory")

    engine.in_host.send = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step(BATCHES[:1], step=0, lr=1e-2)
    assert engine.updating


def test_a_step_that_updates_is_not_given_up(models):
    """An observer that stops the run may do so before the first update only: the state stays that of a whole step."""
    engine, plain = made(models["llama"], **NF4, **HOST), made(models["llama"], **NF4)

    def stop(part, index):
        if part == "backward" and index == 2:
            engine.in_host.wait(3)
        if part == "optimizer" or (part == "backward" and index < 2):
            raise InterruptedError

    for one, observe in ((engine, stop), (plain, lambda part, index: None)):
        one.step(BATCHES[:1], step=0, lr=1e-2, observe=observe)
    assert all(torch.equal(t, plain.trained_tensors()[n]) for n, t in engine.trained_tensors().items())


def test_the_next_pass_waits_for_one_layer_at_a_time(models):
    """A clipped update goes on beside the next forward pass: layer 0 has run before layer 3 is updated."""
    engine = made(models["llama"], **FULL, clip=1.0, **STREAMED, **HOST)
    plain = trained(made(models["llama"], **FULL, clip=1.0), num_steps=2)
    engine.step(BATCHES, step=0, lr=1e-2)  # the first one waits for its updates
    masters, gate, order = engine.in_host, threading.Event(), []
    apply, run_layer = masters._apply, engine.driver.run_layer

    def slow(part, *args):
        if part == 3:
            gate.wait(20)
        apply(part, *args)
        order.append(("updated", part))

    def seen(index, *args, **kwargs):
        order.append(("runs", index))
        if index == 0:
            gate.set()
        return run_layer(index, *args, **kwargs)

    masters._apply = slow
    second = engine.step(BATCHES, step=1, lr=1e-2)
    assert masters.is_pending(3) and not gate.is_set()
    engine.driver.run_layer = seen
    engine.step(BATCHES, step=2, lr=1e-2)
    assert order.index(("runs", 0)) < order.index(("updated", 3)) < order.index(("runs", 3))
    assert (second.loss, second.grad_norm) == plain[0][1]


def test_gradients_do_not_stay_on_the_device(models):
    """After a layer's backward pass only one layer's gradients are there; without this, those of all."""
    alive: dict[bool, list[int]] = {}
    for in_host in (True, False):
        engine = made(models["llama"], **NF4, clip=1.0, **(HOST if in_host else {}))
        counts: list[int] = []

        def observe(part, index, engine=engine, counts=counts):
            if part == "backward":
                grads = [p.grad for p in engine.built.trainable().values() if p.grad is not None]
                masters = [m.grad for _, m in engine.masters.pairs.values() if m.grad is not None]
                counts.append(sum(g.numel() for g in {id(t): t for t in grads + masters}.values()))

        engine.step(BATCHES, step=0, lr=1e-2, observe=observe)
        alive[in_host] = counts
    assert max(alive[True]) == 0 and max(alive[False]) > 0


def test_working_copies_take_half(models):
    engine, plain = made(models["llama"], **NF4, **HOST), made(models["llama"], **NF4)
    size = {e: sum(p.numel() * p.element_size() for p in e.built.trainable().values()) for e in (engine, plain)}
    assert size[engine] * 2 == size[plain]


def test_full_fine_tuning_keeps_two_layers_on_the_device(models):
    """Of the weights: the ring's two buffers and the ends; no master or state; gradients of at most two parts."""
    engine = made(models["llama"], **FULL, clip=1.0, **STREAMED, **HOST)
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in engine.built.model.parameters()}
    storages |= {t.untyped_storage()._cdata: t.numel() for _, t in engine.built.source.device_tensors()}
    ends = sum(p.numel() * 2 for n, p in engine.built.trainable().items() if ".layers." not in n)
    assert sum(storages.values()) == 2 * engine.built.source.buffer_bytes + ends
    layer = max(sum(p.numel() for p in layer.parameters()) for layer in engine.built.layers)
    most = 0

    def observe(part, index):
        nonlocal most
        if part == "backward":
            most = max(most, sum(t.numel() for t in engine.in_host._held.values()))

    engine.step(BATCHES, step=0, lr=1e-2, observe=observe)
    assert most <= layer


def test_buffers_of_gradients_are_used_again(models):
    """Host memory does not grow from step to step; updated beside backward, all layers share a few buffers."""
    sizes = {}
    for clip in (0.0, 1.0):
        engine = made(models["llama"], **FULL, clip=clip, **STREAMED, **HOST)
        grown = []
        for step in range(4):
            engine.step(BATCHES, step=step, lr=1e-2)
            engine.settle()
            grown.append(engine.in_host.host_bytes())
        assert grown[1] == grown[3]
        sizes[clip] = engine.in_host
    assert isinstance(sizes[1.0], HostMasters)
    waiting = sizes[1.0].host_bytes() - sum(m.numel() * 4 for _, m in sizes[1.0].pairs.values())
    assert waiting >= 4 * sum(m.numel() for _, m in sizes[1.0].pairs.values()), "every gradient waits in fp32"


def test_the_thread_ends_with_the_engine(models):
    engine = made(models["llama"], **NF4, **HOST)
    engine.step(BATCHES[:1], step=0, lr=1e-2)
    (thread,) = engine.in_host._worker._threads
    gone = weakref.ref(engine.in_host)
    engine.driver.ready = None
    del engine
    import gc

    gc.collect()
    thread.join(60)
    assert gone() is None and not thread.is_alive()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5_000_001,), (300, 100), (7,), (2**14,)])
def test_the_norm_of_a_large_gradient(shape, dtype):
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert host_parcels.norm_of(grad).item() == pytest.approx(grad.double().norm().item(), rel=2e-6)


def test_gradients_that_are_not_finite(models):
    """Clipped: nothing of the step is applied. Without, layers before it may have been: the run must not go on."""
    engine = made(models["llama"], **NF4, clip=1.0, **HOST)
    before = {n: t.clone() for n, t in engine.trained_tensors().items()}
    collect = engine.in_host.collect

    def poisoned(names):
        for name in names:
            if ".layers.1." in name and engine.in_host.pairs[name][0].grad is not None:
                engine.in_host.pairs[name][0].grad.fill_(float("nan"))
        collect(names)

    engine.in_host.collect = poisoned
    with pytest.raises(UserError, match="the gradients are not finite at step 1"):
        engine.step(BATCHES, step=0, lr=1e-2)
    assert all(torch.equal(t, before[n]) for n, t in engine.trained_tensors().items())
    engine = made(models["llama"], **NF4, **HOST)
    collect, engine.in_host.collect = engine.in_host.collect, poisoned
    with pytest.raises(UserError, match="some layers have been updated with the others"):
        engine.step(BATCHES, step=0, lr=1e-2)
    assert engine.updating


# -- what cannot be ---------------------------------------------------------------------------------------------------

REFUSED = [
    (dict(optimizer_place="cloud"), "unknown optimizer_place 'cloud'"),
    (
        dict(optimizer_place="host", optimizer="paged_adamw"),
        "optimizer paged_adamw cannot have its state in host memory",
    ),
    (dict(optimizer_place="streamed", optimizer="sgd"), "optimizer sgd cannot be updated on the GPU"),
    (dict(optimizer_place="host", world_size=2), "in host memory with several GPUs"),
    (dict(FULL, **STREAMED), "cannot stream the weights of full fine-tuning"),
    (dict(FULL, optimizer_place="host", stream_from="disk", resident_layers=0), "cannot stream the weights of full"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused(models, number):
    changes, what = REFUSED[number]
    with pytest.raises(UserError, match=what):
        made(models["llama"], **changes)


def test_too_little_ram(models, monkeypatch):
    class Little:
        available_bytes = 1000

    monkeypatch.setattr(place, "host_memory", lambda path: Little())
    with pytest.raises(UserError, match="not enough RAM for the masters, gradients and optimizer state"):
        made(models["llama"], **HOST)


def test_host_bytes_of_an_8b_model():
    """fp32 masters, 8-bit state and fp32 gradients of 8.03 B parameters; with the 16-bit weights below 100 GiB."""
    plan = tiny.make_plan(method="full", optimizer="adamw8bit", optimizer_place="streamed")
    assert place.host_bytes(plan, 8_030_261_248) + 2 * 8_030_261_248 < 100 * 2**30
    assert place.host_bytes(plan.with_(optimizer="adamw"), 1000) == 16_000
    require_host_update("adamw8bit", "streamed")
    assert ENDS < 0
