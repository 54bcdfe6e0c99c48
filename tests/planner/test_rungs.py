"""Streamed weights and inputs in host memory: when a plan takes them, where they lie, and that the engine runs it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitune import plan as plans
from fitune.memory.constants import COPY_STREAMS_BYTES
from fitune.planner import DataFacts, choose, make_plan
from fitune.planner.context import REPLAY_MARGIN, PlanContext
from fitune.planner.target import choose_target
from tests import tiny
from tests.planner.case import GIB, MIB, card, card_for, config, machine, plan, reason, recipe

ROOM = 32 * GIB  # of RAM, half of it pinnable


def placed(limit_mib, ram_bytes=ROOM, **values):
    return plan(on=machine(card_for(int(limit_mib * MIB)), ram_bytes=ram_bytes), **values)


def test_nothing_waits_outside_where_all_fits():
    made = placed(24 * 1024).plan
    assert (made.stream_from, made.offload_inputs, made.accumulation_order) == ("none", False, "micro-batch-major")


def test_what_does_not_fit_on_the_card_is_streamed_exactly():
    """Lora needs 81 MiB of tensors with all weights on the card."""
    result = placed(70, method="lora")
    assert not plan(70 * MIB, method="lora").fits
    assert result.fits and result.plan.base_format == "bf16" and result.plan.stream_from == "pinned"
    assert result.predicted["peak_allocated_bytes"] <= result.plan.budget_bytes
    why = reason(result, "streaming")
    assert why.exact and why.why.startswith("bf16 on the card needs at least ") and "from pinned RAM" in why.value
    assert all(entry.exact for entry in result.reasons)


def test_auto_streams_before_it_quantises_where_that_is_as_fast():
    result = placed(75)
    assert result.fits and (result.plan.base_format, result.plan.stream_from) == ("bf16", "pinned")
    assert plan(75 * MIB).plan.base_format == "nf4", "without RAM to stream from"


def test_as_many_layers_stay_as_fit():
    """Of plans that differ in nothing else the one that copies least."""
    result = placed(75, method="lora", micro_batch=1, recompute="all")
    kept = result.plan.resident_layers
    assert result.plan.stream_from == "pinned" and 0 < kept < 8
    one_more = result.plan.with_(resident_layers=kept + 1, predicted={}, reasons=())
    where = machine(card_for(75 * MIB), ram_bytes=ROOM)
    context = PlanContext(recipe(method="lora"), choose_target(recipe(), where), config(), 256)
    needs = choose.search(context, one_more).candidate(1, 8, one_more.loss_chunk)
    assert needs.peak_bytes > context.limit_bytes


@pytest.mark.parametrize(
    ("ram_bytes", "place"), [(ROOM, "pinned"), (int(1.65 * GIB), "pinned"), (int(1.6 * GIB), "disk")]
)
def test_weights_wait_where_there_is_room(ram_bytes, place):
    """A process takes 1.41 GiB, the table 8 MiB, the layers about 44 MiB; nine tenths of the RAM may be used."""
    assert placed(60, ram_bytes, method="lora").plan.stream_from == place


def test_pageable_where_the_driver_pins_little():
    where = machine(card_for(60 * MIB), ram_bytes=ROOM)
    result = plan(on=replace(where, pinned_limit_bytes=10 * MIB), method="lora")
    assert result.plan.stream_from == "pageable" and not result.plan.offload_inputs
    assert reason(result, "streaming").value.endswith("from pageable RAM")


def test_without_ram_nothing_waits_outside():
    result = placed(70, ram_bytes=GIB, method="lora")
    assert not result.fits and result.plan.stream_from == "none" and not result.plan.offload_inputs


def test_full_fine_tuning_is_not_streamed():
    result = placed(300, method="full")
    assert result.plan.stream_from == "none"
    for other in result.alternatives:
        assert other["plan"]["stream_from"] == "none"


def test_what_the_replay_finds_is_what_counts():
    """Every chosen plan and every alternative, replayed, stays within the budget; less stays free than without."""
    quick_fits = 0
    for limit in (300, 200, 160, 140, 130, 120):
        where = machine(card_for(limit * MIB), ram_bytes=ROOM)
        result = make_plan(recipe(method="lora"), where, config=config(), detailed=True)
        quick_fits += result.fits
        if not result.fits:
            continue
        assert result.predicted["device_bytes"] <= result.plan.budget_bytes * (1 - REPLAY_MARGIN)
        assert result.predicted["step_s"] is None or result.predicted["step_s"] > 0
        for other in result.alternatives:
            assert (other["predicted"]["device_bytes"] or 0) <= result.plan.budget_bytes
    assert quick_fits >= 5


def test_time_is_null_for_a_card_that_nothing_is_known_of():
    result = make_plan(recipe(method="lora"), machine(card(name="Card")), config=config(), detailed=True)
    predicted = result.predicted
    assert predicted["step_basis"] == "unknown"
    assert predicted["step_s"] is predicted["tokens_per_s"] is predicted["run_s"] is None
    known = make_plan(recipe(method="lora", gpu="rtx3090"), config=config(), detailed=True).predicted
    assert known["step_low_s"] < known["step_s"] < known["step_high_s"]
    assert known["tokens_per_s_low"] < known["tokens_per_s"] < known["tokens_per_s_high"]
    assert known["run_s"] is None, "how long the data is was not said"


def test_the_run_takes_its_steps():
    data = DataFacts(256, 1.0, 1024, total_tokens=25_600, num_records=100, lengths=(256,) * 100)
    asked = recipe(method="lora", gpu="rtx3090", epochs=2)
    predicted = make_plan(asked, config=config(), data=data, detailed=True).predicted
    assert predicted["run_s"] == pytest.approx(50 * predicted["step_s"], rel=0.1), "2 epochs of 100 in steps of 4"


def test_half_an_epoch_is_as_long_as_training_makes_it():
    """10 records in steps of 4 are 3 steps an epoch; half of a second epoch is 2 more, the last one whole."""
    asked = recipe(method="lora", gpu="rtx3090", epochs=1.5)
    assert asked.num_steps(10) == 5 and recipe(steps=7, epochs=1.5).num_steps(10) == 7
    assert recipe(epochs=0.01).num_steps(10) == 1
    data = DataFacts(256, 1.0, 1024, total_tokens=2_560, num_records=10, lengths=(256,) * 10)
    predicted = make_plan(asked, config=config(), data=data, detailed=True).predicted
    assert predicted["run_s"] == pytest.approx(5 * predicted["step_s"], rel=0.1)


RUNGS = {
    "inputs": dict(offload_inputs=True),
    "streamed": dict(stream_from="pinned", resident_layers=1),
    "streamed, inputs": dict(stream_from="pageable", resident_layers=0, offload_inputs=True),
    "layer-major": dict(stream_from="pinned", resident_layers=0, accumulation_order="layer-major"),
    "layer-major, inputs": dict(
        stream_from="disk", resident_layers=2, accumulation_order="layer-major", offload_inputs=True
    ),
}


TIGHT = {
    "tiles": dict(offload_inputs=True, mlp_tiles=4),
    "head": dict(stream_from="pinned", resident_layers=0, offload_inputs=True, mlp_tiles=4, head_place="host"),
    "masters": dict(
        stream_from="pinned", resident_layers=0, offload_inputs=True, mlp_tiles=4, head_place="host",
        optimizer_place="host"),
}  # fmt: skip


def losses(**changes):
    """Of two optimizer steps that the engine makes under a plan."""
    import torch

    from fitune.engine.engine import Engine
    from fitune.model import random_weights, weights
    from fitune.model.build import add_adapter, build, fill

    conf = tiny.config_of("llama")
    made = tiny.make_plan(num_layers=conf.num_hidden_layers, micro_batch=1, batch=3, recompute_layers=2, **changes)
    built = build(conf, made, "cpu")
    fill(built, random_weights.stream(weights.meta_model(conf), 0, torch.float32, "cpu", None), made)
    add_adapter(built, made)
    engine = Engine(built, made)
    batches = [tiny.padded([one], first=i) for i, one in enumerate(tiny.records(3))]
    return [engine.step(batches, step=step, lr=1e-2).loss for step in range(2)]


def test_the_engine_runs_every_rung_with_the_same_losses():
    resident = losses()
    for name, rung in RUNGS.items():
        assert losses(**rung) == resident, name


def test_every_rung_that_is_planned_is_one_the_engine_is_tested_with():
    from fitune.planner import placement

    draft = plans.from_dict(plan(method="lora").plan.as_dict())
    kinds = {
        (d.stream_from != "none", d.offload_inputs, d.accumulation_order == "layer-major")
        for d in placement.drafts(draft)
    }
    tested = {
        ("stream_from" in r, r.get("offload_inputs", False), r.get("accumulation_order") == "layer-major")
        for r in RUNGS.values()
    }
    assert kinds == tested


def test_the_engine_runs_every_tight_rung_with_the_same_losses():
    """But for the order of sums: pieces of tokens, tiles of the head."""
    resident = losses()
    for name, rung in TIGHT.items():
        assert losses(**rung) == pytest.approx(resident, rel=1e-5), name


WIDE = dict(vocab_size=32000, intermediate_size=5632, num_hidden_layers=4)


def tight(limit_mib, detailed=True, **values):
    """A plan for a model with a large head and wide MLPs, where tensors may take so much beside copies from RAM;
    replayed as `fitune plan` makes it."""
    where = machine(card_for(int(limit_mib * MIB) + COPY_STREAMS_BYTES), ram_bytes=ROOM)
    asked = recipe(method="lora", seq_len=1024, batch=1, **values)
    return make_plan(asked, where, config=config(**WIDE), detailed=detailed)


def test_where_nothing_else_fits_the_mlp_is_cut_and_the_head_leaves_then_the_masters():
    """Each with its reason, the same mathematics, and within the budget."""
    rungs = []
    for limit in (200, 135, 112):
        result = tight(limit)
        assert result.fits, limit
        plan = result.plan
        assert result.predicted["device_bytes"] <= plan.budget_bytes
        assert all(entry.exact for entry in result.reasons)
        rungs.append((plan.mlp_tiles > 1, plan.head_place == "host", plan.optimizer_place == "host"))
        said = {entry.decision for entry in result.reasons}
        assert ("MLP" in said, "head" in said) == rungs[-1][:2]
    assert rungs == [(False, False, False), (True, True, False), (True, True, True)]


def test_masters_go_to_host_memory_where_they_are_what_does_not_fit():
    """Adapters of rank 256, about 78 MiB of masters: as much of gradients, twice as much of state."""
    result = tight(300, lora_r=256)
    assert result.fits and result.plan.optimizer_place == "host"
    why = reason(result, "optimizer")
    assert "in RAM" in why.value and why.exact
    assert result.predicted["phases"]["step"]["host"]["masters and state"] > 3 * 70 * MIB
    assert not tight(300, detailed=False, lora_r=256).fits, "not among the offers to somebody whose job does not fit"
