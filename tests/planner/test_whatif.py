"""What if, and how far a card goes: every answer is a plan that the planner made."""

from __future__ import annotations

import pytest

from fitune import recipe as recipes
from fitune.errors import UserError
from fitune.planner import make_plan, whatif

MODEL = "meta-llama/Llama-3.1-8B"


def recipe(**values):
    return recipes.build({"model": MODEL, "gpu": "rtx3080", **values})


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("seq=8192", {"seq_len": "8192"}),
        ("seq-len=8192, batch=4", {"seq_len": "8192", "batch": "4"}),
        ("r=64", {"lora_r": "64"}),
        ("targets=q_proj,v_proj,r=8", {"lora_targets": "q_proj,v_proj", "lora_r": "8"}),
        ("micro_batch=auto", {"micro_batch": None}),
        ("gpu=rtx3090:2", {"gpu": "rtx3090:2"}),
    ],
    ids=lambda value: str(value)[:24],
)
def test_questions_are_read(text: str, changes: dict):
    assert whatif.parse(text) == changes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seq", "not of the form setting=value"),
        ("=3", "not of the form setting=value"),
        ("seqlen=3", "did you mean seq_len?"),
        ("colour=red", "it is not a setting of a recipe"),
        ("out=there", "it changes nothing in a plan"),
        ("batch=0", "greater than or equal to 1"),
        ("batch=many", "valid integer"),
        ("method=full,base_format=nf4", "full fine-tuning trains every weight"),
        ("micro_batch=9", "micro_batch 9 is larger than batch 8"),
    ],
)
def test_questions_that_are_none(text: str, said: str):
    with pytest.raises(UserError) as caught:
        whatif.ask(recipe(), [text])
    assert said in str(caught.value) and caught.value.exit_code == 2


def test_answers_are_the_planners():
    long, other, unknown = whatif.ask(recipe(), ["seq=4096", "gpu=rtx4090", "gpu=rtx9999"])
    alone = make_plan(recipe(seq_len=4096), detailed=True)
    assert long.result.plan == alone.plan and long.result.fits
    assert other.result.plan.device_name == "GeForce RTX 4090" and other.result.plan.base_format == "bf16"
    assert unknown.result is None and "unknown GPU 'rtx9999'" in unknown.problem
    assert unknown.as_dict()["fits"] is None


def test_defaults_stay_defaults():
    """GPT-2 has 1,024 positions: the default of 2,048 is cut to them, and is not taken for what the person set."""
    small = recipes.build({"model": "m"})
    assert "seq_len" not in whatif.changed(small, {"batch": 4}).model_fields_set


@pytest.fixture(scope="module")
def limits():
    return {limit.what: limit for limit in whatif.limits(recipe())}


def test_limits_are_of_the_machine_that_was_named(monkeypatch):
    """What is known of a card's speed may stand in the machine only."""
    from fitune import hardware, speed
    from fitune.catalog import gpus

    real, machines = speed.predict, []
    monkeypatch.setattr(
        speed, "predict", lambda *a, machine, **k: machines.append(machine) or real(*a, machine=machine, **k)
    )
    for other in ("_longest", "_largest_model"):
        monkeypatch.setattr(whatif, other, lambda context: None)
    here = hardware.virtual(gpus.find("rtx3080")[0])
    whatif.limits(recipe(), here)
    assert machines and all(machine is here for machine in machines)


def test_longest_record(limits):
    limit = limits["seq_len"]
    assert limit.value % whatif.TOKENS_STEP == 0 and not limit.is_end
    assert make_plan(recipe(seq_len=limit.value)).fits
    assert not make_plan(recipe(seq_len=limit.value + max(2 * whatif.TOKENS_STEP, limit.value // 16))).fits


def test_largest_micro_batch(limits):
    rows = limits["micro_batch"].value
    assert rows >= 2
    assert make_plan(recipe(micro_batch=rows, batch=max(8, rows))).fits
    assert not make_plan(recipe(micro_batch=rows + 1, batch=max(8, rows + 1))).fits


def test_largest_model(limits):
    from fitune.catalog import models

    limit = limits["model"]
    assert models.find(limit.value).params_total >= models.find(MODEL).params_total
    assert make_plan(recipe(model=limit.value)).fits
    assert limit.plan.model == limit.value


def test_nothing_fits():
    tiny = whatif.limits(recipe(vram=1.2, model="meta-llama/Llama-3.1-70B"))
    assert [limit.value for limit in tiny[:2]] == [None, None]
    assert tiny[0].as_dict()["plan"] is None
