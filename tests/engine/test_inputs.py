"""Layer inputs in host memory: what is put is what is taken, in exactly the room that it needs."""

from __future__ import annotations

import pytest
import torch

from fitune.engine.inputs import OffloadedInputs
from tests import tiny
from tests.live import pass_peak_bytes

CPU = torch.device("cpu")


def travel(offload, hidden, num_layers):
    """Puts `hidden[m] + layer`, takes them back, returns how they came."""
    offload.begin(hidden, num_layers)
    for layer in range(num_layers):
        for member, h in enumerate(hidden):
            offload.put(layer, member, h + layer)
    offload.turn()
    found = {}
    for layer in reversed(range(num_layers)):
        for member in range(len(hidden)):
            found[layer, member] = offload.take(layer, member).clone()
    offload.end()
    return found


@pytest.mark.parametrize("shapes", [[(2, 5, 8)], [(2, 5, 8), (1, 3, 8), (4, 7, 8)]])
def test_what_is_put_comes_back(shapes):
    offload = OffloadedInputs(CPU)
    for _ in range(2):
        hidden = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
        found = travel(offload, hidden, 5)
        assert len(found) == 5 * len(hidden)
        for (layer, member), tensor in found.items():
            assert torch.equal(tensor, hidden[member] + layer) and tensor.shape == hidden[member].shape


def test_host_memory_is_what_the_largest_step_needs():
    offload = OffloadedInputs(CPU)
    assert offload.host_bytes() == 0
    travel(offload, [torch.zeros(1, 10, 8)], 3)
    assert offload.host_bytes() == 3 * 10 * 8 * 4
    travel(offload, [torch.zeros(1, 30, 8), torch.zeros(1, 1, 8)], 3)
    assert offload.host_bytes() == 3 * 31 * 8 * 4
    travel(offload, [torch.zeros(1, 2, 8)], 3)
    assert offload.host_bytes() == 3 * 31 * 8 * 4, "kept for the steps to come"


def test_steps_of_other_shapes_one_after_the_other():
    """Shapes, numbers of layers and of micro-batches change, back and forth, and so does the buffer."""
    offload = OffloadedInputs(CPU)
    for shapes, layers in (
        ([(1, 10, 8)], 3), ([(1, 10, 8), (1, 4, 8)], 3), ([(1, 4, 8), (1, 10, 8)], 3), ([(1, 10, 8)], 2),
        ([(2, 30, 8)], 5), ([(1, 10, 8)], 3),
    ):  # fmt: skip
        hidden = [torch.randn(shape) for shape in shapes]
        found = travel(offload, hidden, layers)
        assert all(torch.equal(t, hidden[member] + layer) for (layer, member), t in found.items())
        assert len(found) == layers * len(shapes)


def test_two_buffers_on_the_device_whatever_the_depth():
    offload = OffloadedInputs(CPU)
    hidden = torch.randn(1, 10, 8)
    offload.begin([hidden], 7)
    for layer in range(7):
        offload.put(layer, 0, hidden)
    offload.turn()
    places = {offload.take(layer, 0).untyped_storage().data_ptr() for layer in reversed(range(7))}
    assert len(places) == 2


def test_a_wrong_order_is_noticed():
    offload = OffloadedInputs(CPU)
    offload.begin([torch.zeros(1, 2, 4)], 2)
    for layer in range(2):
        offload.put(layer, 0, torch.zeros(1, 2, 4))
    offload.turn()
    with pytest.raises(AssertionError, match="layer 0 of 0 is not due"):
        offload.take(0, 0)


@pytest.mark.parametrize("num_batches", [1, 3])
def test_the_device_holds_two_inputs_instead_of_all(num_batches):
    """16 layers of one input [1, 512, 64] each per micro-batch; a recomputed layer's output goes earlier as well."""
    config = tiny.config_of("llama", num_hidden_layers=16, max_position_embeddings=1024)
    hidden = 512 * 64 * 2
    common = dict(num_batches=num_batches, adapter=tiny.Adapter(1, 1, 0.0, "none", ("q_proj",)))  # hardly any gradients
    kept, sent = (pass_peak_bytes(config, 512, offload_inputs=o, **common) for o in (False, True))
    assert (16 * num_batches - 3) * hidden <= kept - sent <= 16 * num_batches * hidden


def test_streaming_adds_nothing_to_the_pass():
    """The ring is there before; nothing that a pass allocates depends on where the weights are."""
    config = tiny.config_of("llama", num_hidden_layers=6)
    resident, streamed = (
        pass_peak_bytes(config, 128, **changes) for changes in ({}, dict(stream_from="pinned", resident_layers=0))
    )
    assert streamed == resident
