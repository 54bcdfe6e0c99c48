"""GPUs that are not alike: shares by speed within each one's memory, stages by both, else equal parts."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest

from fitune import plan as plans
from fitune.errors import UserError
from fitune.parallel.world import Single
from fitune.plan import Plan, Share
from fitune.planner import PlanResult, make_plan, mixed
from fitune.planner.layouts import Ranks
from fitune.planner.mixed import by_weight
from fitune.planner.notch import next_notch
from fitune.units import GIB
from tests import tiny
from tests.planner import case

# Of the catalog: their rates and memory. The first computes about six times as fast as the last.
FAST, MIDDLE, SLOW = "GeForce RTX 4090", "GeForce RTX 3090", "GeForce RTX 3060"


@functools.cache
def planned(cards: tuple[tuple[str, float], ...], detailed: bool = False, **values: Any) -> PlanResult:
    """A plan for cards of these names and GiB, for a job that keeps them busy."""
    found = [case.card(int(size * GIB), name=name, index=i) for i, (name, size) in enumerate(cards)]
    recipe = case.recipe(**(dict(method="lora", seq_len=2048, batch=16, parallel="ddp") | values))
    config = case.config(hidden_size=1024, intermediate_size=2816)
    return make_plan(recipe, case.machine(*found, ram_bytes=64 * GIB), config=config, detailed=detailed)


def records(plan: Plan) -> list[int]:
    return [share.records for share in plan.shares]


def test_shares_follow_speed_and_add_up_to_the_batch():
    plan = planned(((FAST, 24), (SLOW, 24))).plan
    fast, slow = plan.shares
    assert (fast.card, slow.card) == (FAST, SLOW) and sum(records(plan)) == plan.batch == 16
    assert fast.records > 2 * slow.records
    seconds = [share.step_s or 0.0 for share in plan.shares]
    per_record = [time / share.records for time, share in zip(seconds, plan.shares, strict=True)]
    assert per_record[1] > 2 * per_record[0]
    # no record less on the slower of both makes the step shorter
    assert max(seconds) <= min(seconds) + max(per_record)
    back = planned(((SLOW, 24), (FAST, 24))).plan
    assert records(back) == records(plan)[::-1], "by rank, whichever comes first"
    three = planned(((FAST, 24), (SLOW, 24), (SLOW, 24))).plan
    assert sum(records(three)) == 16 and abs(three.shares[1].records - three.shares[2].records) <= 1


def test_the_steps_time_is_the_slowest_ranks_with_its_share():
    result = planned(((FAST, 24), (SLOW, 24)), detailed=True)
    seconds = [share.step_s for share in result.plan.shares]
    assert result.predicted["step_s"] == pytest.approx(max(seconds))
    assert result.predicted["tokens_per_s"] == pytest.approx(16 * 2048 / max(seconds))
    slow = planned(((SLOW, 24), (SLOW, 24)), detailed=True)
    fast = planned(((FAST, 24), (FAST, 24)), detailed=True)
    assert fast.predicted["step_s"] < result.predicted["step_s"] < 0.75 * slow.predicted["step_s"]


def test_each_card_fits_its_own_memory():
    """The large one keeps what the small one has no room for."""
    result = planned(((FAST, 24), (SLOW, 1.8)), detailed=True)
    fast, slow = result.plan.shares
    assert [share.budget_bytes for share in result.plan.shares] == [24 * GIB, int(1.8 * GIB)]
    assert all(share.needed_bytes <= share.budget_bytes for share in result.plan.shares)
    assert fast.needed_bytes > slow.budget_bytes, "what the large one does would not fit on the small one"
    assert slow.micro_batch < fast.micro_batch or slow.recompute_layers > fast.recompute_layers
    assert result.plan.budget_bytes == slow.budget_bytes and result.plan.of_rank(1).micro_batch == slow.micro_batch
    sums = planned(((FAST, 24), (SLOW, 1.8))).plan.shares
    assert sums[1].needed_bytes <= slow.budget_bytes, "also where nothing is replayed"


def test_ways_in_which_all_meet_have_equal_parts():
    result = planned(((FAST, 24), (SLOW, 24)), parallel="fsdp2")
    assert records(result.plan) == [8, 8]
    assert {(s.micro_batch, s.recompute_layers) for s in result.plan.shares} == {
        (result.plan.micro_batch, result.plan.recompute_layers)
    }
    reason = case.reason(result, "share")
    assert reason.value == "equal"
    assert reason.why == f"the GPUs meet in every layer: {SLOW} sets the pace, {FAST} the memory"
    all_records = planned(((FAST, 24), (SLOW, 24)), parallel="tp").plan
    assert records(all_records) == [16, 16]


def test_stages_by_speed_and_memory():
    result = planned(((FAST, 24), (SLOW, 24)), parallel="pp", detailed=True)
    first, last = result.plan.stages
    assert first + last == 8 and first > last
    even = planned(((SLOW, 24), (SLOW, 24)), parallel="pp")
    assert even.plan.stages == () and even.plan.shares == ()
    assert all(share.needed_bytes <= share.budget_bytes for share in result.plan.shares)
    assert case.reason(result, "stages").value == f"{first} + {last} layers"
    cramped = planned(((FAST, 1.6), (SLOW, 24)), parallel="pp")
    assert cramped.fits and all(s.needed_bytes <= s.budget_bytes for s in cramped.plan.shares)


def test_sentences_are_true_of_every_card():
    """Not only of the one with the least memory, as which the plan is planned."""
    result = planned(((SLOW, 2), (FAST, 3)), batch=8, seq_len=4096)
    least, other = result.plan.shares
    assert least.micro_batch == least.records == 1 and other.micro_batch < other.records
    reason = case.reason(result, "micro-batch")
    assert reason.value == f"1 + {other.micro_batch} (by GPU)" and "accumulated" in reason.why


def test_a_card_whose_speed_nobody_knows():
    result = planned((("A card of 2031", 24), (SLOW, 24)))
    assert sum(records(result.plan)) == 16 and result.plan.shares[0].step_s is None
    why = case.reason(result, "share").why
    assert why == "by a speed that is assumed: nothing is known of A card of 2031"


def test_what_else_fits_has_shares_and_a_time_too():
    result = planned(((FAST, 24), (SLOW, 3)), detailed=True, parallel="streamed", seq_len=4096)
    others = [other for other in result.alternatives if other["plan"]["shares"]]
    assert others and all(other["predicted"]["step_s"] > 0 for other in others)
    assert all(sum(share["records"] for share in other["plan"]["shares"]) == 16 for other in others)


def test_cards_that_are_alike_have_no_shares_of_their_own():
    plan = planned(((FAST, 24), (FAST, 20))).plan
    assert plan.shares == () and plan.budget_bytes == 20 * GIB


def test_started_processes_have_shares_by_their_rank():
    cards = (case.card(name=SLOW), case.card(name=FAST))
    wanted = case.recipe(method="lora", seq_len=2048, batch=16, parallel="ddp")
    config = case.config(hidden_size=1024, intermediate_size=2816)
    own = case.machine(cards[0], ram_bytes=64 * GIB)
    plan = make_plan(wanted, own, config=config, ranks=Ranks(2, 2, cards)).plan
    assert plan.device_name == SLOW and [share.card for share in plan.shares] == [SLOW, FAST]
    assert records(plan)[0] < records(plan)[1]


def test_a_rank_without_a_record_is_not_planned():
    plan = planned(((FAST, 24), (SLOW, 24)), batch=2).plan
    assert records(plan) == [1, 1]


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [(8, [3, 1], [6, 2]), (8, [1, 1, 1], [3, 3, 2]), (3, [100, 1, 1], [1, 1, 1]), (10, [9, 0.0001], [9, 1])],
)
def test_whole_parts_by_weight(total: int, weights: list[float], parts: list[int]):
    assert by_weight(total, weights) == parts


# ---- the plan as data ------------------------------------------------------------------------------------------------


def shared(**changes: Any) -> Plan:
    shares = (Share("A", 2 * GIB, 3, 2, 1), Share("B", GIB, 1, 1, 4))
    return tiny.make_plan(batch=4, world_size=2, parallel="ddp", shares=shares, **changes)


def test_there_and_back():
    plan = shared()
    assert plans.from_json(plan.to_json()) == plan
    staged = tiny.make_plan(world_size=2, parallel="pp", stages=(3, 1))
    assert plans.from_json(staged.to_json()) == staged
    older = json.loads(tiny.make_plan().to_json())
    del older["shares"], older["stages"]
    assert plans.from_dict(older) == tiny.make_plan(), "a plan of before has all ranks alike"
    own = plan.of_rank(1)
    assert (own.device_name, own.budget_bytes, own.batch) == ("B", GIB, 1)
    assert (own.micro_batch, own.recompute_layers, own.shares) == (1, 4, ())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(world_size=3), "it has 2 shares for 3 GPUs"),
        (dict(batch=5), "its shares have 4 records, its batch 5"),
        (dict(shares=(Share("A", None, 3, 4, 0), Share("B", None, 1, 1, 0))), "micro-batch is not within its records"),
        (dict(shares=(Share("A", None, 3, 1, 5), Share("B", None, 1, 1, 0))), "more layers than the model's 4"),
        (dict(stages=(3, 2)), "its stages have 5 layers, the model 4"),
        (dict(stages=(4, 0)), "its stages have 4 layers"),
        (dict(stages=(4,)), "it has 1 stages for 2 GPUs"),
    ],
)
def test_shares_that_cannot_be_are_refused(changes: dict[str, Any], why: str):
    with pytest.raises(UserError, match="cannot use this plan") as caught:
        plans.from_json(shared().with_(**changes).to_json())
    assert why in caught.value.why


# ---- memory that runs out on one of them -----------------------------------------------------------------------------


def test_a_notch_of_the_rank_that_failed():
    plan, change = next_notch(shared(), rank=0) or pytest.fail("a notch")
    assert change == "GPU 0 (A): micro-batch 2 -> 1"
    assert [s.micro_batch for s in plan.shares] == [1, 1] and [s.recompute_layers for s in plan.shares] == [1, 4]
    plan, change = next_notch(plan, rank=0) or pytest.fail("a notch")
    assert change == "GPU 0 (A): recomputed layers 1 -> 2" and plan.shares[1] == shared().shares[1]
    plan, change = next_notch(shared(loss_chunk=512), rank=1) or pytest.fail("a notch")
    assert plan.loss_chunk == 64 and plan.shares == shared().shares, "what all change together"
    least = shared(micro_batch=2).changed({"micro_batch": 1}, 1)
    assert least.micro_batch == 1, "the plan's own is that of the rank with the least memory"
    plan, change = next_notch(shared(), frozenset({"micro_batch"})) or pytest.fail("a notch")
    assert change == "GPU 0 (A): recomputed layers 1 -> 2", "nobody knows whose: who can change alone does"
    plan, change = next_notch(shared(loss_chunk=512), rank=None) or pytest.fail("a notch")
    assert change == "GPU 0 (A): micro-batch 2 -> 1" and plan.loss_chunk == 512


def test_a_notch_drops_what_was_predicted_for_who_changes():
    known = tuple(replace(share, needed_bytes=1 << 30, step_s=0.5) for share in shared().shares)
    plan, _ = next_notch(shared().with_(shares=known), rank=0) or pytest.fail("a notch")
    assert [(s.needed_bytes, s.step_s) for s in plan.shares] == [(None, None), (1 << 30, 0.5)]
    plan, _ = next_notch(shared(loss_chunk=512).with_(shares=known), rank=1) or pytest.fail("a notch")
    assert plan.loss_chunk == 64 and [(s.needed_bytes, s.step_s) for s in plan.shares] == [(None, None)] * 2


def test_a_notch_where_all_meet_is_everyones():
    equal = tuple(Share(card, None, 2, 2, 0) for card in "AB")
    plan = tiny.make_plan(batch=4, micro_batch=2, world_size=2, parallel="fsdp2", shares=equal)
    plan, change = next_notch(plan, rank=1) or pytest.fail("a notch")
    assert change == "micro-batch 2 -> 1" and plan.micro_batch == 1 and [s.micro_batch for s in plan.shares] == [1, 1]


def test_one_process_is_not_mixed():
    assert Single().cards == () and not mixed.is_mixed(_alone())


def _alone() -> Any:
    from fitune.planner.context import open_context

    return open_context(case.recipe(), case.machine(case.card()), config=case.config())
