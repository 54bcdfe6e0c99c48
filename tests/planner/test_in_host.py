"""Full fine-tuning with masters and optimizer state in RAM: when a plan takes it, what it needs, what is missing."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from fitune.memory.constants import COPY_STREAMS_BYTES
from fitune.planner import in_host, make_plan
from fitune.planner.notch import next_notch
from fitune.planner.sentences import translated
from fitune.planner.target import RAM_SHARE
from tests.planner.case import GIB, MIB, card, card_for, config, machine, reason, recipe

ROOM = 32 * GIB
TRAINED = 31_793_664  # parameters of the small model


@functools.cache
def full(limit_mib, ram_mib=ROOM // MIB, **values):
    """The plan of a card on which tensors may take so much beside copies from RAM; replayed as `fitune plan` makes
    it."""
    where = machine(card_for(int(limit_mib * MIB) + COPY_STREAMS_BYTES), ram_bytes=int(ram_mib * MIB))
    return make_plan(recipe(method="full", **(dict(batch=1) | values)), where, config=config(), detailed=True)


def test_masters_wait_in_ram_where_they_do_not_fit_then_weights_too():
    """On the card are 16-bit weights and two layers' gradients, then two layers' weights."""
    on_card = make_plan(recipe(method="full"), machine(card(), ram_bytes=ROOM), config=config()).plan
    assert on_card.optimizer_place == "device"
    found = []
    for limit in (300, 150):
        result = full(limit, optimizer="adamw")
        plan, phases = result.plan, result.predicted["phases"]
        assert result.fits and result.predicted["device_bytes"] <= plan.budget_bytes
        assert plan.optimizer_place == "host" and plan.optimizer == "adamw"
        assert plan.recompute_layers == plan.num_layers and all(entry.exact for entry in result.reasons)
        assert "in RAM, updated on the CPU" in reason(result, "optimizer").value
        assert phases["step"]["host"]["masters"] == 4 * TRAINED == phases["load"]["host"]["masters"]
        assert phases["step"]["host"]["optimizer state"] == pytest.approx(8 * TRAINED, rel=1e-4)
        assert not {"gradients", "optimizer state"} & set(phases["load"]["host"])
        found.append(plan.stream_from)
    assert found == ["none", "pinned"]


def test_waiting_gradients_are_counted():
    """With clipping all of them wait; without it two layers' and the ends'."""
    waiting, passing = (full(150, optimizer="adamw", clip=clip).predicted["phases"]["step"]["host"]
                        for clip in (1.0, 0.0))  # fmt: skip
    layers, ends = TRAINED - 2 * 8000 * 512 - 512, 2 * 8000 * 512
    assert waiting["gradients"] == pytest.approx(2 * layers + 4 * ends, rel=1e-3)
    assert passing["gradients"] == pytest.approx(2 * layers / 8 * 2 + 4 * ends, rel=1e-3)
    assert {k: v for k, v in waiting.items() if k != "gradients"} == {
        k: v for k, v in passing.items() if k != "gradients"
    }


def test_the_state_is_in_8_bits_where_ram_has_no_room_for_more():
    """Only where the optimizer is left open, and said."""
    enough = full(150)
    assert enough.plan.optimizer == "adamw"
    least = max(sum(p["host"].values()) for n, p in enough.predicted["phases"].items() if n != "merge") / MIB
    result = full(150, (least - 100) / RAM_SHARE)
    assert result.fits and result.plan.optimizer == "adamw8bit"
    why = reason(result, "optimizer")
    assert not why.exact and why.why.startswith("fp32 state needs ") and " of RAM and " in why.why
    assert "fp32 状态" in translated(why.why, "zh") and "内存" in translated(why.value, "zh")
    assert not full(150, (least - 100) / RAM_SHARE, optimizer="adamw").fits


def test_what_ram_is_missing_is_said():
    result = full(150, 1700, optimizer="adamw")
    assert not result.fits
    (offer,) = [o for o in result.nearest_fits if o["change"].startswith("more RAM: ")]
    assert "are missing for masters, gradients and optimizer state (--ram " in offer["change"]
    assert translated(offer["change"], "zh").startswith("更多内存")
    needed = offer["setting"]["ram"] * 1024
    assert full(150, needed, optimizer="adamw").fits
    assert offer["needs_bytes"] <= result.plan.budget_bytes


def test_simple_plans_and_offers_leave_it_out():
    assert not full(150, effort="simple").fits
    where = machine(card_for(150 * MIB), ram_bytes=ROOM)
    assert not make_plan(recipe(method="full", batch=1), where, config=config()).fits, (
        "tracing takes seconds: not for an offer"
    )


def test_many_micro_batches_pass_one_after_the_other():
    """A trace runs every micro-batch that passes the layers with others: at most so many."""
    few = full(300, optimizer="adamw", batch=4, micro_batch=1).plan
    many = full(300, optimizer="adamw", batch=2 * in_host.MOST_TOGETHER, micro_batch=1).plan
    assert (few.accumulation_order, many.accumulation_order) == ("layer-major", "micro-batch-major")


def test_a_notch_keeps_what_is_trained_in_ram_and_its_gradients_together():
    plan = full(150, optimizer="adamw").plan.with_(micro_batch=4, batch=4, stream_from="pageable")
    smaller, words = next_notch(plan, where="device")
    assert (smaller.micro_batch, smaller.accumulation_order) == (2, "layer-major") and words == "micro-batch 4 -> 2"
    on_card, _ = next_notch(plan, where="host")
    assert on_card.stream_from == "pageable" and not on_card.offload_inputs
    assert next_notch(on_card, where="host") is None


def test_no_more_is_pinned_than_the_driver_may_and_it_is_said():
    """Weights are not pinned then, and why all of them are not on the card is that they are updated there."""
    card = card_for(150 * MIB + COPY_STREAMS_BYTES)
    where = replace(machine(card, ram_bytes=ROOM), pinned_limit_bytes=60 * MIB)
    result = make_plan(recipe(method="full", batch=1), where, config=config(), detailed=True)
    plan, predicted = result.plan, result.predicted
    assert result.fits and plan.stream_from == "pageable"
    assert predicted["pinned_bytes"] == 60 * MIB < predicted["host_bytes"]
    (note,) = [note for note in result.notes if "should be pinned" in note]
    assert note.endswith("of RAM should be pinned, and the driver may pin 60 MiB: the rest is copied more slowly")
    assert "锁页" in translated(note, "zh")
    assert not any("should be pinned" in note for note in full(150).notes)
