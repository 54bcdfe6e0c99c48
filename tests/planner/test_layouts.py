"""Plans for several GPUs: which way of working together, what each card and the machine need, why not the others."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import pytest

from fitune import recipe as recipes
from fitune.errors import UserError
from fitune.memory.layouts import NCCL
from fitune.planner import PlanResult, layouts, make_plan
from fitune.planner.ladder import AS_FAST
from fitune.planner.layouts import Ranks
from fitune.units import GIB
from tests.planner import case

SMALL, LARGE = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
EVERY_WAY = {"none", "ddp", "fsdp2", "zero1", "zero2", "zero3", "tp", "cp", "pp"}
FULL: dict[str, Any] = dict(method="full")


@functools.cache
def planned(model: str, gpu: str, detailed: bool = False, **values: Any) -> PlanResult:
    return make_plan(recipes.build(dict(model=model, gpu=gpu, **values)), detailed=detailed)


def row(result: PlanResult, way: str) -> dict[str, Any]:
    (found,) = [row for row in result.layouts if row["layout"] == way]
    return found


def chosen(result: PlanResult) -> dict[str, Any]:
    (found,) = [row for row in result.layouts if row["chosen"]]
    assert result.layouts[0] is found, "the chosen one comes first"
    return found


# ---- what is asked of a plan for several GPUs ------------------------------------------------------------------------


def test_a_model_that_no_card_holds_on_two():
    """70B in NF4 (42 GiB) on two cards of 24: streamed from one copy, nearly twice as fast as one of them."""
    result = planned(LARGE, "rtx3090:2", detailed=True)
    best, alone = chosen(result), row(result, "none")
    assert result.fits and result.plan.world_size == 2 and result.plan.batch == 8 and result.plan.micro_batch <= 4
    assert best["layout"] == result.plan.parallel == "streamed" and best["cards"] == ["GeForce RTX 3090"] * 2
    assert best["needed_bytes"] <= best["budget_bytes"] == result.plan.budget_bytes
    assert 1.8 < best["tokens_per_s"] / alone["tokens_per_s"] < 2.05
    weights = 34.6 * GIB  # packed layers, once for both processes
    process = 1440 / 1024 * GIB
    assert weights + 2 * process < result.predicted["host_bytes"] < 1.2 * weights + 2 * process + 8 * GIB
    assert {r["layout"] for r in result.layouts} == EVERY_WAY | {"streamed"}
    for other in result.layouts[1:]:
        assert other["why"] and (other["fits"] or other["needed_bytes"] > other["budget_bytes"] * 0.96), other
    assert "on each card" in row(result, "fsdp2")["why"]
    slower, rest = alone["why"].split(" ", 1)
    assert 85 <= int(slower) <= 105 and rest == "% slower"
    reason = case.reason(result, "parallel")
    assert reason.value == "streamed on 2 GPUs" and "ddp: nf4 needs at least" in reason.why
    assert case.reason(result, "share").value == "4 of 8 records"
    assert any("GB/s each in an exchange" in note and "not measured" in note for note in result.notes)
    assert any("NCCL" in note for note in result.notes)
    times = [other["predicted"]["step_s"] for other in result.alternatives]
    assert times and min(times) > 0.95 * result.predicted["step_s"], "what else fits says how long its step takes"


def test_full_fine_tuning_is_sharded():
    result = planned(SMALL, "8xA100-40G", detailed=True, **FULL)
    assert result.fits and result.plan.parallel == "fsdp2" and result.plan.stream_from == "shards"
    assert chosen(result)["needed_bytes"] < 39.49 * GIB < row(result, "ddp")["needed_bytes"]
    phases = result.predicted["phases"]
    assert phases["first_step"]["peak_allocated_bytes"] <= phases["step"]["peak_allocated_bytes"]
    # checkpoints are the whole model's: fp32 masters and two moments
    assert phases["save"]["disk"]["checkpoints"] == pytest.approx(3 * 12 * 8.03e9, rel=0.01)
    assert row(result, "zero3")["why"].startswith("more than --effort usual accepts")


def test_what_fits_nowhere_has_nearest_fits():
    result = planned(LARGE, "8xA100-40G", **FULL)
    assert not result.fits and not any(r["chosen"] or r["fits"] for r in result.layouts)
    assert result.plan.parallel == "fsdp2", "of the ways that are accepted the one that needs least"
    changes = [offer["change"] for offer in result.nearest_fits]
    assert any(change.startswith("QLoRA") for change in changes)
    for offer in result.nearest_fits:
        wanted = {"gpu": "8xA100-40G", "model": LARGE, **FULL} | offer["setting"]
        assert make_plan(recipes.build(wanted)).fits, offer


def test_cards_that_are_not_alike():
    """Shares by speed, each within its own memory: faster than two of the smaller one, and than the better one alone
    (more in `test_mixed`)."""
    both, small = planned(SMALL, "rtx3090,rtx4070"), planned(SMALL, "rtx4070:2")
    assert both.plan.budget_bytes == small.plan.budget_bytes < 12 * GIB
    assert chosen(both)["cards"] == ["GeForce RTX 3090", "GeForce RTX 4070"]
    large, little = both.plan.shares
    assert large.records > little.records and large.records + little.records == both.plan.batch == 8
    assert all(share.needed_bytes <= share.budget_bytes for share in both.plan.shares)
    assert chosen(both)["step_s"] == pytest.approx(max(share.step_s for share in both.plan.shares))
    assert chosen(both)["step_s"] < min(chosen(small)["step_s"], row(both, "none")["step_s"])
    assert case.reason(both, "share").value == f"{large.records} + {little.records} of 8 records"


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["rtx3090:2", "4x4090", "H100 SXM5:8"])
def test_the_fastest_that_is_accepted(gpu: str):
    result = planned(SMALL, gpu)
    accepted = [r for r in result.layouts if r["fits"] and "--effort" not in r["why"]]
    assert chosen(result)["step_s"] <= AS_FAST * min(r["step_s"] for r in accepted)
    assert chosen(result)["layout"] in ("ddp", "streamed"), "adapters are all that is exchanged"


def test_effort_decides_what_is_accepted():
    simple = planned(SMALL, "rtx3090:2", effort="simple")
    assert simple.plan.parallel in ("none", "ddp")
    usual = planned(SMALL, "8xA100-40G", **FULL)
    every = planned(SMALL, "8xA100-40G", effort="any", **FULL)
    assert usual.plan.parallel == "fsdp2" and not any("--effort" in r["why"] for r in every.layouts)
    assert chosen(every)["step_s"] <= chosen(usual)["step_s"]


@pytest.mark.parametrize("way", ["ddp", "streamed", "fsdp2", "zero1", "zero2", "zero3", "tp", "pp", "cp"])
def test_a_way_that_was_named_is_taken(way: str):
    result = planned(SMALL, "H100 SXM5:2", parallel=way, method="lora")
    plan = result.plan
    assert result.fits and (plan.parallel, plan.world_size) == (way, 2)
    assert [r["layout"] for r in result.layouts] == [way]
    assert plan.stream_from == {"streamed": "pinned", "fsdp2": "shards"}.get(way, "none")
    assert (plan.embedding_place == "device") == (way == "tp"), "it is cut, not looked up in RAM"
    assert case.reason(result, "embedding").value == plan.embedding_place
    assert plan.batch == 8 and plan.micro_batch <= (8 if way in ("tp", "pp", "cp") else 4)


def test_a_named_way_that_does_not_fit_is_not_changed():
    result = planned(LARGE, "rtx3090:2", parallel="ddp")
    assert not result.fits and result.plan.parallel == "ddp" and result.plan.stream_from == "none"


def test_a_way_that_cannot_do_the_job():
    for settings, why in (
        (dict(parallel="fsdp2", optimizer="adamw8bit"), "cannot be cut into parts"),
        (dict(parallel="tp", optimizer="adafactor"), "cannot be cut into parts"),
        (dict(parallel="zero1", optimizer="lion", offload_optimizer="cpu"), "on the GPU only"),
        (dict(parallel="streamed", **FULL), "only frozen weights are streamed"),
        (dict(parallel="zero3", method="qlora"), "cannot shard packed weights"),
        (dict(parallel="tp", gpu="rtx3090:3"), "32 heads cannot be shared by 3 GPUs"),
    ):
        with pytest.raises(UserError, match=why):
            make_plan(recipes.build(dict(model=SMALL, gpu="rtx3090:2") | settings))


# ---- which cards -----------------------------------------------------------------------------------------------------


def test_only_the_cards_that_were_named():
    cards = [case.card(index=i, name=f"Card {i}", total_bytes=(24 + i) * GIB) for i in range(3)]
    machine = case.machine(*cards, ram_bytes=64 * GIB)

    def names(**values: Any) -> list[str]:
        return [t.name for t in layouts.targets_of(case.recipe(**values), machine)]

    assert names() == ["Card 0", "Card 1", "Card 2"]
    assert names(devices="2,0") == ["Card 2", "Card 0"] and names(nproc=2) == ["Card 0", "Card 1"]
    assert names(parallel="none") == names(nproc=1) == names(devices="cpu") == []
    with pytest.raises(UserError, match="no GPU 7"):
        names(devices="0,7")


def test_a_step_of_one_record_is_not_shared():
    result = planned(SMALL, "rtx3090:2", batch=1)
    assert result.plan.parallel == "none" and row(result, "ddp")["why"] == "a step has one record"
    assert "1 of 2 GPUs in use: more would not be faster" in result.notes
    three = planned(SMALL, "4x4090", batch=3)
    assert three.plan.world_size == 3, "the fourth would have nothing to do"


def test_as_many_processes_as_were_asked_for():
    """What `fitune train` starts then: one GPU is no choice, and there is no word of others."""
    result = planned(SMALL, "4x4090", nproc=2)
    assert result.plan.world_size == 2 and "none" not in {r["layout"] for r in result.layouts}
    assert not any("in use" in note for note in result.notes)
    on_cpu = make_plan(case.recipe(devices="cpu", nproc=2), case.machine(), config=case.config()).plan
    alone = make_plan(case.recipe(devices="cpu"), case.machine(), config=case.config()).plan
    assert (on_cpu.parallel, on_cpu.world_size) == ("ddp", 2)
    assert on_cpu.budget_bytes == alone.budget_bytes // 2, "they share one memory"
    for gpu, settings, what, fix in (
        ("rtx3090", dict(nproc=2), "cannot use 2 GPUs", "use --nproc 1, or plan for more cards: --gpu 2xNAME"),
        ("2x3090", dict(nproc=2, batch=1), "2 processes cannot share a batch of 1", "use --nproc 1, or a larger "),
    ):
        with pytest.raises(UserError) as caught:
            planned(SMALL, gpu, **settings)
        assert caught.value.what == what and caught.value.fix.startswith(fix)


# ---- what `fitune train` takes ---------------------------------------------------------------------------------------


def test_started_processes_take_what_was_planned():
    """Each sees one card; with what the others have the plan is that of the machine."""
    cards = tuple(case.card(index=i) for i in range(2))
    both = case.machine(*cards, ram_bytes=64 * GIB)
    alone = case.machine(cards[0], ram_bytes=64 * GIB)
    wanted = case.recipe(method="lora", parallel="fsdp2")
    seen = make_plan(wanted, both, config=case.config()).plan
    started = make_plan(wanted, alone, config=case.config(), ranks=Ranks(2, 2)).plan
    told = make_plan(wanted, alone, config=case.config(), ranks=Ranks(2, 2, cards)).plan
    assert seen.parallel == "fsdp2" and seen == told == started
    small = case.card(2 * GIB, name="Small")
    mixed = make_plan(wanted, alone, config=case.config(), ranks=Ranks(2, 2, (cards[0], small))).plan
    assert mixed.budget_bytes == 2 * GIB and mixed.device_name == "Card", "this process' own name"


def test_processes_on_the_cpu():
    result = make_plan(case.recipe(devices="cpu"), case.machine(), config=case.config(), ranks=Ranks(2, 2))
    assert (result.plan.parallel, result.plan.world_size, result.plan.device) == ("ddp", 2, "cpu")
    streamed = make_plan(case.recipe(devices="cpu", nproc=2, parallel="streamed"), case.machine(), config=case.config())
    assert case.reason(streamed, "parallel").value == "streamed on 2 processes"
    assert case.reason(streamed, "share").why == "what each of 2 processes has of a step at most"
    assert case.reason(streamed, "streaming").why == "you asked for it; the same mathematics"
    assert not any("GB/s" in note for note in result.notes)


def test_each_card_keeps_room_for_exchanges():
    cards = tuple(case.card(index=i) for i in range(2))
    base = layouts.targets_of(case.recipe(), case.machine(*cards))
    alone = base[0].overheads.context_bytes
    assert replace(base[0], num_ranks=2).overheads.context_bytes == alone + NCCL.num_bytes


def test_optimizer_state_that_is_offloaded_is_in_ram_or_on_the_disk():
    """8B trained on two cards: masters and AdamW's state in RAM, or in files of each rank; only where asked for."""
    job: dict[str, Any] = dict(**FULL, parallel="zero3", detailed=True)
    plain = planned(SMALL, "h200:2", **job)
    in_ram = planned(SMALL, "h200:2", **job, offload_optimizer="cpu")
    on_disk = planned(SMALL, "h200:2", **job, offload_optimizer="nvme", offload_folder="disk")
    assert (plain.plan.offload_optimizer, plain.plan.offload_folder) == ("none", None)
    assert on_disk.plan.offload_optimizer == "nvme" and on_disk.plan.offload_folder == os.path.abspath("disk")
    weights = 8.03e9
    steps = [result.predicted["phases"]["step"] for result in (plain, in_ram, on_disk)]
    assert steps[1]["host_bytes"] - steps[0]["host_bytes"] == pytest.approx(16 * weights, rel=0.01)
    assert steps[2]["disk"] == {"offloaded state": pytest.approx(16 * weights, rel=0.01)}, "of both ranks"
    assert steps[0]["disk"] == steps[1]["disk"] == {}
    buffers = steps[2]["host"]["disk buffers"]
    assert steps[2]["host_bytes"] - steps[0]["host_bytes"] == pytest.approx(4 * weights + buffers, rel=0.01)
    assert steps[2]["pinned_bytes"] >= 4 * weights + buffers
    assert steps[2]["peak_allocated_bytes"] == steps[1]["peak_allocated_bytes"] < steps[0]["peak_allocated_bytes"]
