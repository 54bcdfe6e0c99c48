"""What is said of plans that were not taken, which way is taken where a library is missing, and the advice's picks
worked out from the price table by themselves."""

from __future__ import annotations

import csv
import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fitune import recipe as recipes
from fitune.catalog import clouds, gpus, models
from fitune.errors import UserError
from fitune.parallel import zero_library
from fitune.plan import Plan
from fitune.planner import advise, costs, explain, ladder, layouts, make_plan, sharing
from fitune.planner.sentences import translated
from tests.planner import case

FULL: dict[str, Any] = dict(model="meta-llama/Llama-3.1-8B", method="full", parallel="auto", effort="any")


# ---- what else fits --------------------------------------------------------------------------------------------------


def others(**values: Any) -> list[tuple[Plan, dict[str, Any]]]:
    result = make_plan(recipes.build(dict(model="meta-llama/Llama-3.1-8B") | values), detailed=True)
    return [(result.plan, entry) for entry in result.alternatives]


@pytest.mark.parametrize("gpu", ["rtx3080", "rtx3090", "t4"])
def test_an_alternative_that_is_faster_says_why_it_was_not_taken(gpu: str):
    for plan, entry in others(gpu=gpu):
        faster = entry["predicted"]["step_s"] <= plan.predicted["step_s"]
        assert bool(entry["why"]) == faster, entry
        assert entry["predicted"]["device_bytes"] < plan.predicted["device_bytes"]


def candidate(cost: float, peak: int = 100) -> ladder.Candidate:
    terms: Any = None
    return ladder.Candidate(case.plan().plan, 1, 0, 64, terms, False, peak, cost)


def test_the_reason_names_how_much_faster():
    assert explain.not_taken(candidate(10.0), candidate(9.9)) is None
    why = explain.not_taken(candidate(9.7), candidate(10.0))
    assert why == "3 % faster, but more complex: within 5% the simplest plan is taken"
    assert translated(why, "zh") == "快 3 %，但更复杂：相差 5% 以内取最简单的计划"
    assert "as fast, but" in (explain.not_taken(candidate(10.0), candidate(10.0)) or "")


def test_a_streamed_plan_says_where_the_update_would_run_with_all_weights_on_the_card():
    """Weights and the buffers of updates on the card do not both fit there: not the weights make the difference."""
    base = case.plan(method="full").plan
    streamed = base.with_(optimizer_place="streamed", stream_from="pinned", resident_layers=7)
    chosen = replace(candidate(10.0), draft=streamed)
    others = [replace(candidate(70.0), draft=base.with_(optimizer_place="host"))]
    context: Any = SimpleNamespace(is_simple=False, recipe=SimpleNamespace(parallel="auto"))
    why = explain._streaming(context, chosen, [], others).why
    assert why.startswith("with all weights on the card they would be updated on the CPU, and it would be 600 % slower")
    assert "在 CPU 上更新" in translated(why, "zh") and "慢 600 %" in translated(why, "zh")


def test_alternatives_save_enough_to_matter():
    chosen, nearly, less = candidate(10.0, 1000), candidate(10.1, 990), candidate(11.0, 900)
    assert ladder.alternatives(chosen, [less, nearly]) == [less]


# ---- ZeRO without DeepSpeed ------------------------------------------------------------------------------------------


def at_hand() -> Any:
    """Two cards of this machine on which full fine-tuning of the small model needs ZeRO or FSDP2."""
    return case.machine(*(case.card_for(230 * case.MIB) for _ in range(2)), ram_bytes=64 * case.GIB)


def ways(monkeypatch, installed: bool, **values: Any) -> dict[str, dict[str, Any]]:
    monkeypatch.setattr(sharing, "is_installed", lambda: installed)
    asked = case.recipe(method="full", effort="any", **values)
    return {row["layout"]: row for row in make_plan(asked, at_hand(), config=case.config()).layouts}


def test_zero_is_not_taken_where_deepspeed_is_missing(monkeypatch):
    with_it, without = ways(monkeypatch, True), ways(monkeypatch, False)
    assert with_it["zero3"]["why"] != without["zero3"]["why"]
    for way in ("zero1", "zero2", "zero3"):
        assert not without[way]["chosen"] and not without[way]["fits"]
        assert without[way]["why"] == 'DeepSpeed is not installed here: pip install "fitune[deepspeed]"'
        assert translated(without[way]["why"], "zh").startswith("本机没有安装 DeepSpeed")


def test_zero_that_was_asked_for_is_refused_before_anything_loads(monkeypatch):
    with pytest.raises(UserError, match="DeepSpeed is not installed here"):
        ways(monkeypatch, False, parallel="zero2")


def test_another_machine_may_have_it_and_the_plan_says_so(monkeypatch):
    monkeypatch.setattr(sharing, "is_installed", lambda: False)
    result = make_plan(recipes.build(FULL | dict(gpu="8xA100-40G", parallel="zero3")))
    assert result.fits and result.plan.parallel == "zero3"
    notes = [note for note in result.notes if "DeepSpeed, which has to be installed there" in note]
    assert len(notes) == 1 and 'pip install "fitune[deepspeed]"' in notes[0]
    assert not any(
        "DeepSpeed" in note for note in make_plan(recipes.build(FULL | dict(gpu="h200", effort="usual"))).notes
    )


def test_whether_it_is_installed_is_found_without_importing_it(monkeypatch):
    asked = []
    monkeypatch.setattr(zero_library.importlib.util, "find_spec", lambda name: asked.append(name))
    assert not zero_library.is_installed() and asked == ["deepspeed"]
    assert layouts.ways.INSTALL in layouts.ways.MISSING


# ---- the advice's picks, from the table itself -----------------------------------------------------------------------

CARDS = tuple(gpus.find(name)[0] for name in ("rtx3090", "rtx4090", "a100-sxm4-80gb", "h100-sxm", "h200-sxm", "l40s"))
JOBS: dict[str, tuple[dict[str, Any], float]] = {
    "7b lora on 5k alpaca records": (dict(model="Qwen/Qwen2.5-7B", method="lora", seq_len=1024), 1.488e6),
    "14b qlora on 50k conversations": (dict(model="Qwen/Qwen3-14B", method="qlora", batch=16), 35e6),
}


@functools.cache
def advice(name: str, max_cost: float | None = None, max_hours: float | None = None) -> advise.Advice:
    values, tokens = JOBS[name]
    return advise.advise(recipes.build(values), tokens=tokens, max_cost=max_cost, max_hours=max_hours, among=CARDS)


def firm_prices() -> dict[tuple[str, int], float]:
    """The lowest firm on-demand price of each card and number of cards, read here from the files: a named source, at
    most two years before the table's date."""
    found: dict[tuple[str, int], float] = {}
    for name in clouds.FILES:
        with Path(clouds.__file__).with_name(name).open(encoding="utf-8", newline="") as handle:
            for row in csv.DictReader(handle):
                years = [
                    int(part) for part in row["date"].replace(".", "-").split("-") if part.isdigit() and len(part) == 4
                ]
                fresh = years and max(years) >= int(clouds.TABLE_DATE[:4]) - clouds.YEARS_FRESH
                if row["usd_per_hour"] and row["status"] in clouds.READ_FROM_A_SOURCE and fresh:
                    key = row["gpu_id"], int(row["num_gpus"])
                    found[key] = min(found.get(key, 1e9), float(row["usd_per_hour"]))
    return found


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("share", [None, 2.0, 1.2])
def test_picks_are_the_cheapest_and_the_fastest_at_a_firm_price(name: str, share: float | None):
    """Of all cards: hours x the lowest firm price; with a limit of cost only those that keep to it."""
    prices, hours = firm_prices(), {(c.gpu.id, c.num_gpus): c.hours[1] for c in advice(name).cards if c.hours}
    amounts = {key: hours[key] * prices[key] for key in hours if key in prices}
    limit = None if share is None else share * min(amounts.values())
    kept = {key: cost for key, cost in amounts.items() if limit is None or cost <= limit}
    picks = advice(name, limit).picks
    cheapest, fastest = ((picks[which].gpu.id, picks[which].num_gpus) for which in ("cheapest", "fastest"))
    assert cheapest == min(kept, key=lambda key: kept[key])
    assert picks["cheapest"].best.lowest == pytest.approx(kept[cheapest])
    assert hours[fastest] == min(hours[key] for key in kept)
    assert limit is None or picks["fastest"].best.lowest <= limit


def test_a_card_within_the_limit_by_a_doubtful_price_only_is_no_pick():
    """RunPod's 0.69 for a 4090 is recalled; where a limit lies between it and the firm price, no pick names the firm
    one as if it kept to the limit."""
    name = "7b lora on 5k alpaca records"
    for card in advice(name).cards:
        amounts = sorted(r.lowest for r in card.rentals if r.lowest is not None and not r.firm)
        if card.best and card.best.firm and amounts and amounts[0] < card.best.lowest:
            limit = (amounts[0] + card.best.lowest) / 2
            assert costs.within(card, limit, None)
            assert {"cheapest", "fastest"} <= set(costs.picks([card]))
            assert not {"cheapest", "fastest"} & set(costs.picks([card], limit))
            return
    pytest.fail("no card of the table has a doubtful price below its firm one")


def test_70b_in_full_has_no_pick_where_nothing_fits():
    """18 bytes for each of 70.55e9 parameters are more than the cards of any single machine here have."""
    shape = models.find("meta-llama/Llama-3.3-70B-Instruct")
    found = advise.advise(
        recipes.build(dict(model=shape.id, method="full", batch=16, ram=64)), tokens=20e6, among=CARDS
    )
    assert found.picks == {} or all(card.num_gpus > 1 for card in found.picks.values())
