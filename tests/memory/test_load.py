"""Loading: what is on the card while weights arrive, against what was measured and against sums by hand."""

from __future__ import annotations

import itertools

import pytest

from fitune.memory.events import Event
from fitune.memory.sequence import Arrival, _loading
from tests import tiny
from tests.memory.test_matrix import ALL, predicted_again

FIRST = {record["group"]: record for record in reversed(ALL)}  # of a group: before any other run in its process


@pytest.mark.skipif(not ALL, reason="no matrix records in benchmarks/results")
@pytest.mark.parametrize("group", sorted(FIRST))
def test_seeded_weights_as_measured(group):
    measured = FIRST[group]["measured"]["phases"].get("load")
    if not measured:
        pytest.skip("loading was not measured")
    _, predicted = predicted_again(FIRST[group])
    off = predicted["phases"]["load"]["peak_allocated_bytes"] / measured["peak_allocated_bytes"] - 1
    assert -0.005 <= off <= 0.01, f"{off:+.2%}"


def born(number, label, num_bytes, layer=0):
    return Event(number, num_bytes, "weights", label, "load", layer)


def loading(*arguments):
    """All events, on the way and once the weights are there."""
    arriving, there = _loading(*arguments)
    return arriving + there


def peak(events):
    return max(itertools.accumulate(event.num_bytes for event in events))


DENSE = [born(0, "layers.0.a.weight", 200), born(1, "layers.0.b.weight", 100), born(2, "head.weight", 400, -1)]
PACKED = [born(0, "layers.0.a.codes", 5_000), born(1, "layers.0.a.absmax", 100), born(2, "head.weight", 4_000, -1)]


@pytest.mark.parametrize(
    ("arrival", "highest"),
    [
        (Arrival(2, 2, converts=False), 700),
        (Arrival(2, 2, converts=False, made_there=True), 700),
        (Arrival(2, 2, converts=True), 700),  # a layer's weight twice for a moment: less than the head, read in RAM
        (Arrival(4, 2, converts=True, made_there=True), 300 + 200 + 800 + 400 - 200),  # the head as fp32, and its own
    ],
)
def test_dense_weights(arrival, highest):
    events = loading(DENSE, tiny.make_plan(base_format="bf16", precision="bf16"), arrival)
    assert peak(events) == highest
    assert sum(event.num_bytes for event in events) == 700, "nothing else stays"


@pytest.mark.parametrize(
    ("base_format", "double_quant", "beside"),
    [("nf4", False, 20_000 + 5_100), ("nf4", True, 20_000 + 2 * 625 + 5_100), ("int8", True, 10_000 + 40_000)],
)
def test_packed_weights_are_there_twice_while_they_are_packed(base_format, double_quant, beside):
    """10,000 values in 4 bits or 5,000 in 8, stored in 16; int8 holds the fp32 quotient and its rounded copy, double
    quantisation the fp32 scales twice."""
    plan = tiny.make_plan(base_format=base_format, double_quant=double_quant, precision="bf16")
    for made_there in (False, True):
        assert peak(loading(PACKED, plan, Arrival(2, 2, False, made_there))) == beside


def test_fused_experts_are_made_together():
    """Both tensors of a module, as they are stored, before the first is packed."""
    names = "layers.0.mlp.experts.gate_up_proj.codes", "layers.0.mlp.experts.down_proj.codes"
    experts = [born(number, name, 600 // (number + 1)) for number, name in enumerate(names)]
    plan = tiny.make_plan(base_format="nf4", double_quant=False, precision="bf16")
    assert peak(loading(experts, plan, Arrival(2, 2, False, made_there=True))) == 2400 + 1200 + 600
    assert peak(loading(experts, plan, Arrival(2, 2, False))) == 2400 + 600


def test_the_table_on_its_way_to_the_host_and_the_first_workspace():
    plan = tiny.make_plan(base_format="bf16", precision="bf16")
    warm = [Event(-1, 50, "workspace", "workspace", "load", -1)]
    events = loading(DENSE[:1], plan, Arrival(2, 2, False, True, table_bytes=1000), warm)
    assert peak(events) == 1000 and events[-1] is warm[0]
    assert sum(event.num_bytes for event in events) == 250
