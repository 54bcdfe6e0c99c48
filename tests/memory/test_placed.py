"""Steps whose weights, inputs or head wait in host memory, or whose micro-batches pass the layers together."""

from __future__ import annotations

import functools

import pytest

from fitune.memory.pieces import Placement
from fitune.memory.replay import peaks
from fitune.memory.script import placement_of
from fitune.memory.trace import Tracer
from tests import tiny
from tests.memory.brute import WholeModel, cuda_plan
from tests.memory.test_script import first_difference, told

LAYERS, SHAPE = 6, (2, 64, 64)
STREAM = dict(stream_from="pinned", resident_layers=2)
TOGETHER = dict(accumulation_order="layer-major", batch=6, micro_batch=2)
# name: architecture, plan, (recomputed layers, micro-batches) of the runs
CASES = {
    "streamed, NF4": ("llama", dict(base_format="nf4", **STREAM), [(2, 2)]),
    "streamed, two kinds of layers": (
        "gemma3", dict(offload_inputs=True, stream_from="disk", resident_layers=3, ring_buffers=3), [(6, 1)]),
    "together": ("llama", dict(base_format="nf4", **STREAM, **TOGETHER), [(6, 3), (2, 3)]),
    "inputs in host memory": ("llama", dict(offload_inputs=True, **STREAM), [(6, 2), (1, 1), (4, 1), (0, 1)]),
    "inputs in host memory, together": (
        "llama", dict(offload_inputs=True, **STREAM, **TOGETHER), [(6, 3), (3, 3), (1, 3)]),
    "head in host memory": ("llama", dict(head_place="host", **STREAM), [(6, 2)]),
    "head and inputs in host memory": ("llama", dict(head_place="host", offload_inputs=True, **STREAM), [(5, 1)]),
}  # fmt: skip


@functools.cache
def pair(case):
    """(the case's tracer, the whole model): tracers of one program share its script."""
    name, changes, _ = CASES[case]
    config = tiny.config_of(name, num_hidden_layers=LAYERS)
    plan = cuda_plan(config, **changes)
    tracer = Tracer(config, plan)
    if "head" not in case:
        program = changes.get("base_format", "bf16"), changes.get("offload_inputs", False)
        tracer._script = script_of(name, *program).placed(placement_of(plan))
    return tracer, WholeModel(config, plan)


@functools.cache
def script_of(name, base_format, offload_inputs):
    config = tiny.config_of(name, num_hidden_layers=LAYERS)
    return Tracer(config, cuda_plan(config, base_format=base_format, offload_inputs=offload_inputs)).script()


@pytest.mark.parametrize("case", CASES)
def test_spliced_equals_whole(case):
    tracer, whole = pair(case)
    for recompute, micro_batches in CASES[case][2]:
        how = dict(recompute_layers=recompute, accumulates=micro_batches > 1, first_step=True)
        said, actual = tracer.step_events(*SHAPE, **how), whole.step(*SHAPE, recompute, micro_batches)
        assert told(said) == told(actual), (recompute, micro_batches, first_difference(said, actual))
        there = [e for e in said if e.part == "load"]
        assert sum(whole.rounded(e.num_bytes) for e in there) == whole.weight_bytes(SHAPE[2])
        assert sum(e.owner == "stream" for e in there) == tracer.plan.ring_buffers
        dead = {e.block for e in said if e.num_bytes < 0}
        left = {e.owner for e in said if e.num_bytes > 0 and e.block not in dead}
        assert left <= {"weights", "adapters", "workspace", "optimizer", "stream"}
    said, actual = tracer.eval_events(*SHAPE), whole.evaluation(*SHAPE)
    assert told(said) == told(actual), first_difference(said, actual)


@pytest.mark.parametrize("case", ["streamed, NF4", "together", "inputs in host memory"])
def test_terms_are_not_too_low(case):
    """Above by no more than the inputs that are not told apart, below only by rounding."""
    tracer, whole = pair(case)
    terms, hidden_bytes = tracer.terms(*SHAPE), SHAPE[0] * SHAPE[1] * 64 * 2
    for recompute, micro_batches in CASES[case][2]:
        found = peaks(terms, recompute, accumulates=micro_batches > 1 and case != "together")
        events = [e for e in whole.step(*SHAPE, recompute, micro_batches) if e.owner != "optimizer"]
        actual = whole.peak(events)
        spare = 4 * hidden_bytes + (micro_batches > 1) * max(t.trained_bytes for t in terms.layers.values())
        assert -0.002 * actual <= found.step - found.save - actual <= spare, recompute
        layers = [terms.layers[kind] for kind in terms.kinds]
        state = terms.other_state_bytes + sum(layer.state_bytes for layer in layers)
        assert found.save - state == whole.weight_bytes(SHAPE[2])


def test_one_trace_serves_every_number_of_streamed_layers():
    tracer, _ = pair("streamed, NF4")
    script = tracer.script()
    held = [script.placed(Placement(tuple(range(n)))).terms(*SHAPE) for n in (0, 1, 5, 6)]
    weights = [peaks(terms, 0).save for terms in held]
    # a ring of two comes with the first streamed layer, and goes for all others
    assert weights[1] > weights[0] > weights[2] > weights[3]
    frozen = script.layers["layer"].frozen_bytes
    assert weights[2] - weights[3] == pytest.approx(frozen, abs=20 * 512)
    assert weights[1] - weights[0] == pytest.approx(frozen, abs=20 * 512)


def test_a_step_is_placed_once():
    """Its sums are kept with it: a search asks for the same place again and again."""
    script = script_of("llama", "bf16", False)
    placement = Placement((2, 3, 4, 5), 2, 1)
    assert script.placed(placement) is script.placed(Placement((2, 3, 4, 5), 2, 1))
    assert script.placed(Placement((3, 4, 5), 2, 1)).terms(*SHAPE) != script.placed(placement).terms(*SHAPE)


def test_placement_of_a_plan():
    config = tiny.config_of("llama", num_hidden_layers=LAYERS)
    plan = cuda_plan(config, **STREAM, **TOGETHER)
    assert placement_of(plan) == Placement((0, 1, 3, 4), 2, 3)
    assert placement_of(cuda_plan(config)) == Placement()


def test_a_head_in_host_memory_and_micro_batches_together():
    """The tails of all of them are as one micro-batch's of all their rows: no more than a chunk's difference."""
    config = tiny.config_of("llama", num_hidden_layers=LAYERS)
    plan = cuda_plan(config, head_place="host", **STREAM, **TOGETHER)
    tracer, whole = Tracer(config, plan), WholeModel(config, plan)
    actual = whole.peak(whole.step(*SHAPE, 6, 3))
    events = tracer.step_events(*SHAPE, recompute_layers=6, accumulates=True, first_step=True)
    assert whole.peak([e for e in events if e.part != "load"]) == pytest.approx(actual, rel=0.005)
    assert not {e.part for e in events if e.label.startswith("hidden states")} - {
        "forward",
        "embed",
        "tail",
        "backward",
    }
    dead = {e.block for e in events if e.num_bytes < 0}
    left = {e.owner for e in events if e.num_bytes > 0 and e.block not in dead}
    assert left <= {"weights", "adapters", "workspace", "optimizer", "stream", "inputs"}
    found = peaks(tracer.terms(*SHAPE), 6)
    assert found.step - found.save == pytest.approx(actual, rel=0.01)


# ---- full fine-tuning with masters in host memory --------------------------------------------------------------------

FULL = dict(method="full", adapter=None, optimizer_place="host", clip=1.0)
STREAM_ALL = dict(stream_from="pinned", resident_layers=0)
LAST = "the last layer is not like the last one traced"
# name: architecture, plan, (recomputed layers, micro-batches) of the runs: first all layers, two of each kind at least
IN_HOST = {
    "resident weights": ("llama", {}, [(6, 1), (6, 3), (2, 2), (0, 1)]),
    "streamed": ("llama", STREAM_ALL, [(6, 1), (6, 2), (3, 1)]),
    "inputs in host memory, one layer stays": (
        "llama", dict(offload_inputs=True, stream_from="pageable", resident_layers=1, clip=0.0), [(6, 1), (4, 2)]),
    "together": ("llama", STREAM_ALL | TOGETHER, [(6, 3), (2, 3)]),
    "inputs in host memory, together": ("llama", dict(offload_inputs=True, **STREAM_ALL, **TOGETHER), [(6, 3), (1, 3)]),
    "two kinds of layers, a tied head": ("gemma3", dict(offload_inputs=True, **STREAM_ALL, **TOGETHER), [(12, 3)]),
    LAST: ("gemma3", dict(offload_inputs=True, **STREAM_ALL, **TOGETHER), [(14, 3)]),
    "experts": ("qwen3_moe", dict(**STREAM_ALL, **TOGETHER), [(6, 3)]),
    "8-bit state": ("llama", dict(optimizer="adamw8bit", offload_inputs=True, **STREAM_ALL), [(6, 1)]),
    "fp16": ("llama", dict(precision="fp16", base_format="fp16", loss_scaling=True, **STREAM_ALL), [(6, 1)]),
    "fp32": ("llama", dict(precision="fp32", base_format="fp32", attention="efficient", **STREAM_ALL), [(6, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("case", IN_HOST)
def test_spliced_equals_whole_with_masters_in_host_memory(case):
    name, changes, runs = IN_HOST[case]
    layers = runs[0][0]
    config = tiny.config_of(name, num_hidden_layers=layers)
    for recompute, micro_batches in runs:
        batch = SHAPE[0] * micro_batches
        plan = cuda_plan(config, **(FULL | changes | dict(batch=batch, micro_batch=SHAPE[0])))
        tracer, whole = Tracer(config, plan), WholeModel(config, plan)
        how = dict(recompute_layers=recompute, accumulates=micro_batches > 1, first_step=True)
        script = tracer.script_at(*SHAPE, keeps=recompute < layers)
        said = script.step_events(*SHAPE, **how)
        if micro_batches > 2 and plan.accumulation_order == "micro-batch-major":
            micro_batches = 2  # as many are told
        actual = whole.step(*SHAPE, recompute, micro_batches)
        assert told(said) == told(actual), (recompute, micro_batches, first_difference(said, actual))
        there = [e for e in said if e.part == "load"]
        masters = whole.gradient_bytes()  # in host memory; on meta among what is there
        assert sum(whole.rounded(e.num_bytes) for e in there) == whole.weight_bytes(SHAPE[2]) - masters
        dead = {e.block for e in said if e.num_bytes < 0}
        left = {e.owner for e in said if e.num_bytes > 0 and e.block not in dead}
        assert left <= {"weights", "workspace", "stream"}
        found = peaks(script.terms(*SHAPE), recompute)
        actual_peak, inputs = whole.peak(actual), batch * SHAPE[1] * 64 * (4 if plan.precision == "fp32" else 2)
        assert -0.002 * actual_peak <= found.step - found.save - actual_peak <= 3 * inputs, recompute
        said, actual = script.eval_events(*SHAPE), whole.evaluation(*SHAPE)
        if case == LAST:  # an evaluation is told higher than it is, and lower than the step
            assert whole.peak(actual) <= whole.peak(said) < actual_peak
            continue
        assert told(said) == told(actual), first_difference(said, actual)
