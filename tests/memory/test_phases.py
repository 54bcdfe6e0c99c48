"""Phases of a plan on a small model: what they consist of, what the allocator adds, and that they agree with replay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitune.memory import additive, phases
from fitune.memory.accuracy import CARD_ERROR, interval
from fitune.memory.constants import overheads
from fitune.memory.host import Facts
from fitune.memory.moments import highest
from fitune.memory.replay import peaks
from fitune.memory.trace import Tracer
from tests import tiny

ROWS, COLUMNS = 2, 64
FACTS = Facts(
    num_parameters=1_000_000, num_trained=10_000, state_bytes=80_000, vocab_size=256, hidden_size=64,
    largest_values=16_384, largest_linear_values=8_192,
    stored_width=2, download_bytes=0, data_tokens=None, keep_checkpoints=2, platform="linux",
)  # fmt: skip
HOPPER = overheads("cuda", (9, 0))
POLICIES = [("lora", 0), ("lora", 2), ("lora", 4), ("full", 0), ("full", 4)]


def plan_of(method: str, recompute: int = 0, batch: int = ROWS, device: str = "cuda"):
    precision = "bf16" if device == "cuda" else "fp32"
    return tiny.make_plan(
        method=method, precision=precision, base_format=precision, recompute_layers=recompute, device=device,
        attention="flash" if device == "cuda" else "cpu", micro_batch=ROWS, batch=batch, seq_len=COLUMNS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tracers():
    made = {}

    def tracer(plan):
        key = (plan.method, plan.device)
        if key not in made:
            made[key] = Tracer(tiny.config_of("llama"), plan)
        return made[key]

    return tracer


@pytest.mark.parametrize(("method", "recompute"), POLICIES)
@pytest.mark.parametrize("batch", [ROWS, 3 * ROWS])
def test_sums_by_owner_are_the_peaks_of_replay(tracers, method, recompute, batch):
    """Kept apart by owner, the bytes add up to the same peak: nothing is counted twice or left out."""
    plan = plan_of(method, recompute, batch)
    terms = tracers(plan).terms(ROWS, COLUMNS, plan.loss_chunk)
    reached = peaks(terms, recompute, accumulates=batch > ROWS)
    assert highest(additive.step_moments(terms, plan)).num_bytes == reached.step
    assert highest(additive.eval_moments(terms, plan)).num_bytes == reached.eval
    assert all(size > 0 for m in additive.step_moments(terms, plan) for size in m.owners.values())


@pytest.mark.parametrize(("method", "recompute"), POLICIES)
def test_events_and_sums_agree(tracers, method, recompute):
    """What is allocated in a step is the same by events (with names) and by sums of terms (without a script)."""
    plan = plan_of(method, recompute)
    tracer = tracers(plan)
    terms = tracer.terms(ROWS, COLUMNS, plan.loss_chunk)
    named = phases.predict(terms, plan, HOPPER, FACTS, tracer)
    summed = phases.predict(terms, plan, HOPPER, FACTS)
    for name in ("first_step", "step", "eval", "save"):
        assert named.phase(name).allocated_bytes == pytest.approx(summed.phase(name).allocated_bytes, rel=0.002), name
    assert summed.phase("step").device_bytes is None  # no allocator without events: not computed, never guessed


def test_what_the_driver_counts_is_reserved_and_context(tracers):
    plan = plan_of("lora")
    tracer = tracers(plan)
    made = phases.predict(tracer.terms(ROWS, COLUMNS, plan.loss_chunk), plan, HOPPER, FACTS, tracer)
    for phase in made.phases:
        if phase.name == "merge":
            continue
        assert phase.device_bytes == phase.reserved_bytes + HOPPER.context_bytes
        assert phase.reserved_bytes >= phase.allocated_bytes > 0
        assert phase.reserved_bytes % (2 * 2**20) == 0, "segments are whole pages"
    assert made.phase("save").reserved_bytes == made.phase("step").reserved_bytes, "the allocator keeps what it has"
    assert made.phase("save").allocated_bytes < made.phase("step").allocated_bytes
    assert made.most.name == "step"


def test_the_first_step_has_no_state_while_activations_are_there(tracers):
    plan = plan_of("lora")
    tracer = tracers(plan)
    made = phases.predict(tracer.terms(ROWS, COLUMNS, plan.loss_chunk), plan, HOPPER, FACTS, tracer)
    assert "optimizer" not in made.phase("load").device
    assert made.phase("step").device["optimizer"] > made.phase("first_step").device.get("optimizer", 0)


def test_merge_is_a_process_of_the_cpu_and_full_has_none(tracers):
    plan = plan_of("lora")
    terms = tracers(plan).terms(ROWS, COLUMNS, plan.loss_chunk)
    merge = phases.predict(terms, plan, HOPPER, FACTS).phase("merge").as_dict()
    assert merge["device_bytes"] == 0 and merge["disk_bytes"] > 2 * FACTS.num_parameters
    full = plan_of("full")
    terms = tracers(full).terms(ROWS, COLUMNS, full.loss_chunk)
    assert phases.predict(terms, full, HOPPER, FACTS).phase("merge").as_dict()["disk_bytes"] is None


def test_on_the_cpu_tensors_are_ram(tracers):
    plan = plan_of("lora", device="cpu")
    tracer = tracers(plan)
    made = phases.predict(tracer.terms(ROWS, COLUMNS, plan.loss_chunk), plan, overheads("cpu", None), FACTS, tracer)
    step = made.phase("step")
    assert step.device == {} and step.as_dict()["device_bytes"] is None
    assert step.host["saved"] > 0 and step.host["process"] > 100 * 2**20
    assert made.as_dict()["host_bytes"] == max(sum(p.host.values()) for p in made.phases)


def test_interval_is_as_wide_as_what_is_not_known(tracers):
    plan = plan_of("lora")
    tracer = tracers(plan)
    terms = tracer.terms(ROWS, COLUMNS, plan.loss_chunk)
    measured = phases.predict(terms, plan, HOPPER, FACTS, tracer).most
    known = interval(measured, HOPPER)
    older = overheads("cuda", (8, 6))
    assumed = interval(phases.predict(terms, plan, older, FACTS, tracer).most, older)
    assert known.low_bytes < phases.needed_bytes(measured) < known.high_bytes
    assert assumed.high_bytes - assumed.low_bytes > 3 * (known.high_bytes - known.low_bytes)
    assert "assumed" in assumed.source and "measured" in known.source
    assert CARD_ERROR[0] <= 0 <= CARD_ERROR[1]


def test_disk_holds_one_checkpoint_more_while_it_is_written():
    from fitune.memory import host

    plan = plan_of("lora")
    one = FACTS.checkpoint_bytes
    assert one == 4 * FACTS.num_trained + FACTS.state_bytes
    assert host.disk("save", plan, FACTS)["checkpoints"] == 3 * one
    assert host.disk("resume", plan, FACTS)["checkpoints"] == 2 * one
    assert host.disk("load", plan, replace(FACTS, download_bytes=None)) is None  # not known is null


def test_what_waits_in_ram_for_a_card(tracers):
    """Streamed layers, a head on the host and layer inputs that were sent away are RAM, pinned where the plan pins."""
    from fitune.memory import host

    facts = replace(FACTS, streamed_bytes=5000, row_width=COLUMNS)
    plan = plan_of("lora", recompute=2).with_(stream_from="pinned", head_place="host", offload_inputs=True)
    beside = host.beside_card(plan, facts)
    assert beside == {"head": 256 * 64 * 2, "streamed weights": 5000, "inputs": 2 * ROWS * COLUMNS * 64 * 2}
    assert host.pinned(plan, facts) == beside
    pageable = plan.with_(stream_from="pageable")
    assert set(host.pinned(pageable, facts)) == {"inputs", "staging"}
    from_disk = plan.with_(stream_from="disk")
    assert "streamed weights" not in host.beside_card(from_disk, facts)
    assert host.disk("load", from_disk, facts)["packed weights"] == 5000
    assert host.pinned(plan_of("lora"), facts) == {}
