"""A recipe as given: what it is taken to be, lengths of its data, facts about its files, and the plan beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fitune import recipe as recipes
from fitune.errors import UserError
from fitune.memory.phases import needed_bytes
from fitune.planner import facts, lengths, make, predict
from fitune.planner.context import open_context
from tests.planner import case


def context(limit_gib: float = 10, **values):
    on = case.machine(case.card(int(limit_gib * 2**30)))
    return open_context(case.recipe(**values), on, config=case.config())


def test_a_recipe_is_taken_as_it_is_given():
    plan, prediction = predict.as_given(context(method="auto"))
    assert (plan.method, plan.base_format, plan.micro_batch, plan.recompute_layers) == ("lora", "bf16", 4, 0)
    assert prediction.plan == plan
    quantised, _ = predict.as_given(context(method="qlora", recompute="all"), briefly=True)
    assert (quantised.base_format, quantised.recompute_layers) == ("nf4", 8)


@pytest.mark.parametrize(
    "job",
    [
        dict(method="lora", micro_batch=2),
        dict(method="lora", micro_batch=1, recompute="all"),
        dict(method="qlora", micro_batch=4),
        dict(method="full", micro_batch=2, optimizer="adamw"),
        dict(method="full", micro_batch=1, optimizer="adafactor", recompute="all"),
    ],
)
def test_brief_and_full_prediction_need_the_same(job):
    """Techniques and alternatives are predicted briefly, as a run that is resumed; their figures must be comparable
    with the recipe's own."""
    made = context(**job)
    full, brief = predict.as_given(made)[1], predict.as_given(made, briefly=True)[1]
    assert needed_bytes(brief.most) == pytest.approx(needed_bytes(full.most), rel=0.005)


def test_owners_add_up_to_what_is_needed():
    result = predict.predict(case.recipe(method="lora"), case.machine(case.card()), config=case.config())
    told = result.as_dict()
    assert sum(row["at_peak_bytes"] for row in told["breakdown"]) == result.needed_bytes
    assert all(row["most_bytes"] >= row["at_peak_bytes"] for row in told["breakdown"])
    assert told["fits"] and told["fitting"] is None


def test_the_recipes_own_method_is_tried_first():
    """LoRA that only lacks a smaller micro-batch stays LoRA on the same base."""
    needs = predict.predict(case.recipe(method="lora"), case.machine(case.card()), config=case.config()).needed_bytes
    tight = predict.predict(
        case.recipe(method="lora"), case.machine(case.card(needs - 20 * 2**20)), config=case.config()
    )
    assert not tight.fits and tight.fitting is not None
    plan = tight.fitting["plan"]
    assert (plan["method"], plan["base_format"]) == ("lora", "bf16")
    assert plan["micro_batch"] < 4 or plan["recompute_layers"] > 0 or plan["loss_chunk"] < tight.plan.loss_chunk
    assert tight.fitting["predicted"]["device_bytes"] <= tight.plan.budget_bytes


def test_the_plan_that_fits_is_what_plan_finds():
    job, needs = dict(method="lora", micro_batch=4, recompute="none"), 0
    needs = predict.predict(case.recipe(**job), case.machine(case.card()), config=case.config()).needed_bytes
    on = case.machine(case.card(needs - 20 * 2**20))
    found = predict.predict(case.recipe(**job), on, config=case.config()).fitting
    planned = make.make_plan(case.recipe(method="lora"), on, config=case.config(), detailed=True)
    assert found["plan"] == planned.plan.with_(predicted={}, reasons=()).as_dict()
    assert found["predicted"] == planned.predicted


def test_where_nothing_fits_the_planner_says_what_would():
    result = predict.predict(case.recipe(method="full"), case.machine(case.card(760 * 2**20)), config=case.config())
    assert not result.fits and result.fitting is None and result.nearest_fits
    assert all("change" in offer for offer in result.nearest_fits)


def test_a_detailed_plan_has_the_same_choice_and_all_phases():
    on = case.machine(case.card())
    plain = make.make_plan(case.recipe(), on, config=case.config())
    detailed = make.make_plan(case.recipe(), on, config=case.config(), detailed=True)
    assert detailed.plan.with_(predicted={}) == plain.plan.with_(predicted={})
    step = detailed.predicted["phases"]["step"]
    assert step["device_bytes"] == sum(step["device"].values())
    assert step["peak_allocated_bytes"] == pytest.approx(
        plain.predicted["phases"]["step"]["peak_allocated_bytes"], rel=0.002
    )
    assert detailed.plan.predicted == detailed.predicted


def test_lengths_of_data_set_the_width(tmp_path: Path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(case.config().to_dict()))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "abc " * (5 + i)}) + "\n" for i in range(30)))
    recipe = recipes.build(dict(model=f"random:{config}", data=str(data), seq_len=1024, batch=4))
    found, note = lengths.read(recipe, 1024)
    assert note is None and found is not None
    assert 100 < found.longest_tokens < 200  # bytes of the longest record: no vocabulary of its own
    assert found.total_tokens > found.most_step_tokens > 3 * 100
    made = open_context(recipe, case.machine(case.card()), reads_data=True)
    assert made.data == found
    assert made.row_width(predict.as_given(made, briefly=True)[0]) == found.longest_tokens


def test_data_that_is_not_here_is_said_and_a_missing_file_is_an_error():
    hub = recipes.build(dict(model="smollm2", data="someone/some-set"))
    found, note = lengths.read(hub, 2048)
    assert found is None and "not fetched for a prediction: every record is taken to be 2048 tokens long" in note
    with pytest.raises(UserError, match="no-such-file.jsonl"):
        lengths.read(recipes.build(dict(model="smollm2", data="no-such-file.jsonl")), 2048)
    assert lengths.read(recipes.build(dict(model="smollm2")), 2048) == (None, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("random:llama-3.1-8b", 0), ("smollm2", 0), ("meta-llama/Llama-3.1-8B", 16), ("someone/unknown", 16)],
)
def test_download_is_what_is_not_here(name: str, expected: int):
    assert facts._download(name, 16) == expected
