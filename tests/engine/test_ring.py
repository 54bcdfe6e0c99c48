"""The ring by itself: what is fetched when, how often, and what happens when something goes wrong."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch

from fitune.engine.ring import Resident, Ring, source_of
from fitune.model.build import build, fill
from tests import tiny

MODEL_LAYERS = 6


@pytest.fixture(scope="module")
def model():
    return tiny.reference("llama", num_hidden_layers=MODEL_LAYERS)


def built_for(model, **changes):
    values = dict(stream_from="pinned", resident_layers=0, base_format="nf4") | changes
    plan = tiny.make_plan(num_layers=MODEL_LAYERS, **values)
    built = build(model.config, plan, "cpu")
    fill(built, model.state_dict().items(), plan)
    return built


def ring_for(model, **changes) -> tuple[Ring, list[int]]:
    """A ring, and the layers it fetches, noted as it goes."""
    ring = Ring(built_for(model, **changes))
    fetched: list[int] = []
    fetch = ring._fetch

    def noted(item, slot):
        fetched.append(item[1])
        fetch(item, slot)

    ring._fetch = noted
    return ring, fetched


def is_view(tensor: torch.Tensor, ring: Ring) -> bool:
    """Whether a tensor is a view of a ring buffer."""
    buffers = {buffer.untyped_storage()._cdata for _, buffer in ring.device_tensors()}
    return tensor.untyped_storage()._cdata in buffers


def use(ring, order) -> None:
    ring.begin([("layer", i) for i in order])
    for index in order:
        with ring.layer(index):
            pass


def test_the_bytes_of_a_layer_are_what_its_modules_hold(model):
    resident = built_for(model, stream_from="none")
    built = built_for(model)
    ring = source_of(built)
    for index in (3, 0, 5):
        with ring.layer(index):
            for name, linear in resident.linears.items():
                if f".{index}." not in name:
                    continue
                for key, tensor in linear.packed.tensors.items():
                    ours = built.linears[name].packed.tensors[key]
                    assert torch.equal(ours, tensor) and ours.dtype == tensor.dtype, (name, key)
                    assert is_view(ours, ring)
            theirs = dict(resident.layers[index].named_parameters())
            assert theirs
            for name, parameter in built.layers[index].named_parameters():
                assert torch.equal(parameter, theirs[name]), name


def test_a_layer_that_comes_to_the_same_buffer_is_not_bound_again(model):
    """In any order and whatever buffer it comes to, a layer's modules hold its bytes."""
    built, resident = built_for(model), built_for(model, stream_from="none")
    ring = source_of(built)

    def held(index):
        return [t for n, lin in built.linears.items() if f".{index}." in n for t in lin.packed.tensors.values()]

    def wanted(index):
        return [t for n, lin in resident.linears.items() if f".{index}." in n for t in lin.packed.tensors.values()]

    generator = random.Random(1)
    buffers, again = {index: set() for index in range(MODEL_LAYERS)}, 0
    for _ in range(20):
        order = [generator.randrange(MODEL_LAYERS) for _ in range(8)]
        ring.begin([("layer", i) for i in order])
        for index in order:
            before = held(index)
            with ring.layer(index):
                ours = held(index)
                assert all(torch.equal(a, b) for a, b in zip(ours, wanted(index), strict=True))
                norm = built.layers[index].input_layernorm.weight
                assert torch.equal(norm, resident.layers[index].input_layernorm.weight) and is_view(norm, ring)
                place = ring._holder(("layer", index)).buffer.data_ptr()
                again += place in buffers[index] and all(a is b for a, b in zip(ours, before, strict=True))
                buffers[index].add(place)
    assert all(len(places) == 2 for places in buffers.values()) and again > 40


def test_what_is_fetched_ahead_is_looked_for_once_per_layer(model):
    ring, _ = ring_for(model)
    there_and_back = [*range(MODEL_LAYERS), *reversed(range(MODEL_LAYERS))]
    ahead, calls = ring._fetch_ahead, []
    ring._fetch_ahead = lambda: (calls.append(ring._at), ahead())
    use(ring, there_and_back)
    assert len(calls) == len(there_and_back) + 1, "at the beginning, and after each layer"
    ring.begin([("layer", i) for i in range(MODEL_LAYERS)])
    with ring.layer(0):
        pass
    ring.forget(1)  # its bytes have changed
    calls.clear()
    with ring.layer(1):
        assert calls == [1], "something has become free"


def test_forward_and_backward_keep_the_last_layers_over_the_turn(model):
    ring, fetched = ring_for(model)
    there_and_back = [*range(MODEL_LAYERS), *reversed(range(MODEL_LAYERS))]
    use(ring, there_and_back)
    assert fetched == [0, 1, 2, 3, 4, 5, 3, 2, 1, 0]
    fetched.clear()
    use(ring, there_and_back)
    assert fetched == [2, 3, 4, 5, 3, 2, 1, 0], "the first two were still there"


def test_three_buffers_keep_three(model):
    ring, fetched = ring_for(model, ring_buffers=3)
    use(ring, [*range(MODEL_LAYERS), *reversed(range(MODEL_LAYERS))])
    assert fetched == [0, 1, 2, 3, 4, 5, 2, 1, 0]


def test_the_next_layer_is_fetched_while_one_computes(model):
    ring, fetched = ring_for(model)
    ring.begin([("layer", i) for i in range(MODEL_LAYERS)])
    for index in range(MODEL_LAYERS):
        with ring.layer(index):
            assert fetched[-1] == min(index + 1, MODEL_LAYERS - 1)


def test_resident_layers_are_passed_over(model):
    ring, fetched = ring_for(model, resident_layers=3)
    use(ring, range(MODEL_LAYERS))
    assert fetched == [0, 2, 4] == list(ring.streamed.layouts)


def best_possible(order, num_slots) -> int:
    """Fewest fetches for an order of uses, by trying everything. An item is fetched while the one before it computes,
    whose buffer may not be taken."""
    best = {frozenset(): 0}
    for before, item in zip([None, *order], order, strict=False):
        after: dict[frozenset, int] = {}
        for held, cost in best.items():
            options = [held] if item in held else []
            if item not in held:
                kept = itertools.combinations(held, min(len(held), num_slots - 1))
                options = [frozenset((*k, item)) for k in kept if before is None or before in k]
            for option in options:
                price = cost + (item not in held)
                if price < after.get(option, 10**9):
                    after[option] = price
        best = after
    return min(best.values())


def test_no_order_of_fetches_would_be_cheaper(model):
    """Any schedule, against every possible choice of what to overwrite. (With more than two buffers, fetching several
    items ahead can cost a fetch in a schedule that jumps about; in the sweeps of a step it does not.)"""
    generator = random.Random(3)
    sweeps = [*range(MODEL_LAYERS), *reversed(range(MODEL_LAYERS))] * 2
    any_order = [[generator.randrange(MODEL_LAYERS) for _ in range(12)] for _ in range(15)]
    for order, num_slots in [*((order, 2) for order in any_order), *((sweeps, n) for n in (2, 3, 4))]:
        ring, fetched = ring_for(model, ring_buffers=num_slots)
        use(ring, order)
        assert len(fetched) <= best_possible(order, num_slots), (order, fetched)


def test_an_order_that_was_not_announced_works_too(model):
    """Generation calls layers as it likes, also in the middle of an announced pass that was given up."""
    built = built_for(model)
    ring = source_of(built)
    ring.begin([("layer", i) for i in range(MODEL_LAYERS)])
    with ring.layer(0):
        pass
    with ring.layer(4):
        norm = built.layers[4].input_layernorm.weight
        assert torch.equal(norm, model.model.layers[4].input_layernorm.weight)
    with ring.layer(1):
        assert torch.equal(built.layers[1].input_layernorm.weight, model.model.layers[1].input_layernorm.weight)


def test_one_source_per_model(model):
    built = built_for(model)
    assert isinstance(source_of(built), Ring) and source_of(built) is source_of(built)
    assert isinstance(source_of(built_for(model, stream_from="none")), Resident)


def test_what_the_reading_thread_meets_is_raised_where_the_layer_is_used(model):
    built = built_for(model, stream_from="disk")
    ring = source_of(built)

    def broken(layer, start, target):
        raise OSError("the disk is gone")

    ring.begin([("layer", 0)])
    with ring.layer(0):
        pass
    built.streamed.backing.read_into = broken
    ring.begin([("layer", 3)])
    with pytest.raises(OSError, match="the disk is gone"), ring.layer(3):
        pass


def test_the_thread_ends(model):
    ring = source_of(built_for(model, stream_from="disk"))
    use(ring, range(MODEL_LAYERS))
    assert any(t.name == "weights ahead" for t in threading.enumerate())
    thread = ring._feeder._thread
    ring.close()
    assert not thread.is_alive()


def test_a_forgotten_ring_ends_its_thread(model):
    import gc

    ring = source_of(built_for(model, stream_from="disk"))
    use(ring, range(MODEL_LAYERS))
    thread = ring._feeder._thread
    del ring
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_on_meta_the_buffers_are_there_and_nothing_moves(model):
    plan = tiny.make_plan(num_layers=MODEL_LAYERS, stream_from="pinned", resident_layers=0, base_format="nf4")
    from fitune.model.build import meta_weights

    built = build(model.config, plan, "meta")
    fill(built, meta_weights(built), plan)
    ring = source_of(built)
    use(ring, range(MODEL_LAYERS))
    tensors = [t for linear in built.linears.values() for t in linear.packed.tensors.values()]
    tensors += [p for layer in built.layers for p in layer.parameters()]
    assert tensors and all(is_view(t, ring) for t in tensors)
    assert built.streamed.backing is None and ring.meter.take().bytes_moved == 0
    on_cpu = source_of(built_for(model))
    assert [s.buffer.numel() for s in ring.slots] == [s.buffer.numel() for s in on_cpu.slots]
