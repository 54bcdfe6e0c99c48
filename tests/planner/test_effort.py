"""`--effort`: how much complexity a plan may have."""

from __future__ import annotations

import pytest

from fitune import recipe as recipes
from fitune.errors import UserError
from fitune.units import GIB, MIB
from tests.planner.case import card_for, machine, plan, reason

ROOM = 32 * GIB


def tight(**values):
    """LoRA on a 16-bit base fits on this card only with weights streamed."""
    return plan(on=machine(card_for(70 * MIB), ram_bytes=ROOM), method="lora", **values)


def test_the_usual_plan_streams_and_the_simple_one_does_not():
    assert tight().plan.stream_from == "pinned"
    result = tight(effort="simple")
    assert not result.fits
    made = result.plan
    assert (made.stream_from, made.offload_inputs, made.head_place, made.mlp_tiles) == ("none", False, "device", 1)
    why = reason(result, "streaming")
    assert (why.value, why.why) == ("off", "you asked for a simple plan (--effort simple): all of it is on the card")


def test_a_simple_plan_that_does_not_fit_names_the_effort_that_would():
    offers = {offer["change"]: offer for offer in tight(effort="simple").nearest_fits}
    (offer,) = [o for change, o in offers.items() if "--effort usual" in change]
    assert offer["setting"] == {"effort": "usual"}
    assert tight(**offer["setting"]).fits
    assert not any("--effort" in o["change"] for o in plan(20 * MIB, method="lora").nearest_fits), "asked already"


def test_simple_takes_the_quantised_base_that_stays_on_the_card():
    result = plan(on=machine(card_for(75 * MIB), ram_bytes=ROOM), effort="simple")
    assert result.fits and (result.plan.base_format, result.plan.stream_from) == ("nf4", "none")


@pytest.mark.parametrize("way", ["tp", "pp", "zero3", "fsdp2", "streamed"])
def test_more_than_is_accepted_is_a_contradiction(way):
    with pytest.raises(UserError) as error:
        recipes.build({"model": "m", "effort": "simple", "parallel": way})
    assert f"parallel {way} is more than effort simple accepts, which is one GPU or ddp" in str(error.value)


def test_what_was_asked_for_is_not_refused_by_the_default():
    assert recipes.build({"model": "m", "parallel": "tp"}).effort == "usual"


def test_every_way_is_in_the_highest_effort():
    ways = set(recipes.Parallel.__args__) - {"auto"}
    assert set(recipes.LAYOUTS["any"]) == ways
    assert set(recipes.LAYOUTS["simple"]) < set(recipes.LAYOUTS["usual"]) < ways
