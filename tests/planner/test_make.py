"""Recipe, model and machine in, one plan out: budgets, precision, what is fixed, formats, packing, the contract."""

from __future__ import annotations

import contextlib
import gc
import json

import pytest

from fitune import plan as plans
from fitune.errors import UserError
from fitune.memory.constants import HEADROOM, overheads
from fitune.memory.phases import FIELDS, NAMES
from fitune.planner import make_plan
from fitune.planner.choose import attention_kernel
from tests.planner.case import (
    GIB,
    MIB,
    TIGHT,
    TURING,
    DataFacts,
    card,
    card_for,
    config,
    machine,
    peak,
    plan,
    reason,
    recipe,
)

# -- budgets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_every_phase_of_a_plan_that_fits_is_within_the_budget(method):
    """Just enough memory for each candidate in turn."""
    needs = {peak(plan(method=method))}
    limit = max(needs)
    seen = set()
    while True:
        result = plan(limit, method=method)
        if not result.fits:
            break
        assert peak(result) <= limit
        extra = overheads("cuda", (8, 6))
        top = result.predicted["peak_allocated_bytes"] + extra.context_bytes
        assert top <= result.plan.budget_bytes * (1 - HEADROOM)
        phases = [v["peak_allocated_bytes"] for v in result.predicted["phases"].values()]
        assert result.predicted["peak_allocated_bytes"] == max(p for p in phases if p is not None)
        seen.add((result.plan.micro_batch, result.plan.recompute_layers))
        limit = peak(result) - 1
    assert len(seen) >= (3 if method == "full" else 5), "smaller and smaller plans"
    assert result.nearest_fits


@pytest.mark.parametrize("asked", [{}, {"batch": 0}])
def test_the_garbage_collector_is_as_it_was(asked):
    for was_on in (True, False):
        (gc.enable if was_on else gc.disable)()
        try:
            with contextlib.suppress(UserError, ValueError):
                plan(**asked)
            assert gc.isenabled() == was_on
        finally:
            gc.enable()


def test_vram_is_a_cap_on_the_whole_device():
    free, capped = plan(method="lora"), plan(method="lora", vram=0.94)
    assert free.plan.budget_bytes == 24 * GIB and capped.plan.budget_bytes == int(0.94 * GIB)
    assert capped.fits and peak(capped) < peak(free)
    assert capped.plan.recompute_layers > free.plan.recompute_layers or capped.plan.micro_batch < free.plan.micro_batch


def test_ram_is_the_budget_of_the_processor():
    free, capped = (
        plan(on=machine(), devices="cpu", precision="fp32", method="lora", **more) for more in ({}, {"ram": 0.3})
    )
    assert free.plan.device == capped.plan.device == "cpu"
    assert (free.plan.budget_bytes, capped.plan.budget_bytes) == (int(32 * GIB * 0.9), int(0.3 * GIB))
    assert (
        capped.fits
        and capped.predicted["peak_allocated_bytes"] <= int(0.3 * GIB) < free.predicted["peak_allocated_bytes"]
    )


def test_memory_that_others_hold_is_left_alone():
    busy = machine(card(free_bytes=1 * GIB, used_by_others_bytes=22 * GIB))
    assert plan(on=busy, method="lora").plan.budget_bytes == 1 * GIB


# -- precision ------------------------------------------------------------------------------------------------------


def test_a_card_without_bf16_takes_fp16_with_loss_scaling():
    old = plan(on=machine(card(**TURING)), method="lora")
    assert (old.plan.precision, old.plan.base_format, old.plan.loss_scaling) == ("fp16", "fp16", True)
    assert old.plan.attention == "efficient"
    new = plan(method="lora")
    assert (new.plan.precision, new.plan.base_format, new.plan.loss_scaling) == ("bf16", "bf16", False)
    assert new.plan.attention == "flash"


def test_bf16_on_a_card_without_it():
    with pytest.raises(UserError) as caught:
        plan(on=machine(card(name="Old", **TURING)), precision="bf16")
    assert caught.value.what == "bf16 does not run on Old"
    assert caught.value.fix == "use --precision fp16 (with loss scaling), or auto"


@pytest.mark.parametrize(
    ("precision", "attention", "scaling"),
    [("fp32", "efficient", False), ("fp16", "flash", True), ("bf16", "flash", False)],
)
def test_precision_decides_the_attention_kernel_and_loss_scaling(precision, attention, scaling):
    made = plan(precision=precision, method="lora").plan
    assert (made.precision, made.base_format) == (precision, precision)
    assert (made.attention, made.loss_scaling) == (attention, scaling)


def test_the_processor_takes_its_own_kernel_and_keeps_the_embedding():
    made = plan(on=machine(), method="lora").plan
    assert (made.device, made.attention, made.embedding_place) == ("cpu", "cpu", "device")
    assert made.precision in ("fp32", "bf16") and not made.loss_scaling


# -- what is fixed --------------------------------------------------------------------------------------------------

FIXED = {
    "micro_batch": (3, 3), "recompute": (5, 5), "loss_chunk": (100, 100), "base_format": ("int8", "int8"),
    "precision": ("fp16", "fp16"), "optimizer": ("lion8bit", "lion8bit"), "packing": (True, True), "lr": (1e-5, 1e-5),
    "double_quant": (False, False), "seq_len": (300, 300), "batch": (5, 5), "clip": (0.0, 0.0), "seed": (7, 7),
    "weight_decay": (0.1, 0.1), "schedule": ("linear", "linear"), "warmup": (5.0, 5.0),
}  # fmt: skip


@pytest.mark.parametrize("limit", [10 * GIB, TIGHT, 30 * MIB], ids=["roomy", "tight", "does not fit"])
@pytest.mark.parametrize("name", FIXED)
def test_what_is_asked_for_is_never_changed(name, limit):
    asked, got = FIXED[name]
    result = plan(limit, **{name: asked})
    attribute = {"recompute": "recompute_layers"}.get(name, name)
    assert getattr(result.plan, attribute) == got
    for other in result.alternatives:
        assert plans.from_dict(other["plan"]).__dict__[attribute] == got


@pytest.mark.parametrize(("word", "layers"), [("none", 0), ("all", 8)])
def test_recompute_by_word(word, layers):
    assert plan(recompute=word).plan.recompute_layers == layers


def test_more_layers_than_there_are():
    with pytest.raises(UserError) as caught:
        plan(recompute=9)
    assert (caught.value.what, caught.value.why) == ("cannot recompute 9 layers", "the model has 8")


def test_the_effective_batch_is_never_changed():
    for limit in (10 * GIB, TIGHT, 100 * MIB):
        made = plan(limit, batch=6).plan
        assert made.batch == 6 and made.micro_batch <= 6


@pytest.mark.parametrize(("method", "lr"), [("full", 2e-5), ("lora", 2e-4), ("qlora", 2e-4)])
def test_the_learning_rate_of_the_method(method, lr):
    assert plan(method=method).plan.lr == lr


def test_the_adapter_is_the_recipes():
    made = plan(lora_r=8, lora_alpha=16, lora_dropout=0.05, lora_targets="q_proj,v_proj", lora_bias="all", rslora=True)
    adapter = made.plan.adapter
    assert adapter == plans.Adapter(8, 16, 0.05, "all", ("q_proj", "v_proj"), True, False)
    assert plan(method="full").plan.adapter is None


# -- formats --------------------------------------------------------------------------------------------------------


def test_auto_takes_the_quantised_base_only_when_the_wide_one_does_not_fit():
    least_wide = peak(plan(1, method="lora"))
    assert plan(least_wide).plan.base_format == "bf16"
    below = plan(least_wide - 1)
    assert below.fits and below.plan.base_format == "nf4"
    assert plan(24 * GIB).plan.base_format == "bf16", "never for speed"


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (dict(method="lora"), "bf16"), (dict(method="qlora"), "nf4"), (dict(method="qlora", base_format="fp4"), "fp4"),
        (dict(method="qlora", base_format="int8"), "int8"), (dict(base_format="fp16"), "fp16"),
        (dict(method="full"), "bf16"),
        (dict(method="lora", base_format="fp32"), "fp32"),
    ],
    ids=str,
)  # fmt: skip
def test_base_format_of_a_method(asked, got):
    for limit in (24 * GIB, 1):
        made = plan(limit, **asked).plan
        assert made.base_format == got, "lora never falls to a quantised base"
        assert made.method == ("full" if asked.get("method") == "full" else "lora")


def test_embedding_goes_to_host_memory_where_it_is_frozen_and_untied():
    assert plan(method="lora").plan.embedding_place == "host"
    assert plan(method="full").plan.embedding_place == "device"
    assert plan(method="lora", conf=config(tie_word_embeddings=True)).plan.embedding_place == "device"


# -- the choice -----------------------------------------------------------------------------------------------------


def test_with_room_nothing_is_computed_twice_or_split():
    made = plan(24 * GIB, method="lora").plan
    assert (made.micro_batch, made.recompute_layers) == (4, 0)


def test_fewest_recomputed_layers():
    """One layer fewer does not fit: checked by asking for it."""
    result = plan(TIGHT, method="lora")
    assert result.fits and result.plan.recompute_layers > 0
    asked = dict(method="lora", micro_batch=result.plan.micro_batch, loss_chunk=result.plan.loss_chunk)
    same = plan(TIGHT, recompute=result.plan.recompute_layers, **asked)
    fewer = plan(TIGHT, recompute=result.plan.recompute_layers - 1, **asked)
    assert same.fits and same.predicted == result.predicted
    assert not fewer.fits


def test_alternatives_fit_and_cost_more():
    result = plan(TIGHT, method="lora")
    assert result.alternatives
    for other in result.alternatives:
        made = plans.from_dict(other["plan"])
        assert made.predicted == {} and (made.micro_batch, made.recompute_layers) != (
            result.plan.micro_batch, result.plan.recompute_layers,
        )  # fmt: skip
        again = plan(
            TIGHT,
            method="lora",
            micro_batch=made.micro_batch,
            recompute=made.recompute_layers,
            loss_chunk=made.loss_chunk,
        )
        assert again.fits and again.predicted == other["predicted"]


# -- data -----------------------------------------------------------------------------------------------------------


def facts(**changes):
    return DataFacts(**(dict(longest_tokens=100, packing_gain=1.0, most_step_tokens=450) | changes))


@pytest.mark.parametrize(("gain", "packed"), [(1.0, False), (1.09, False), (1.1, True), (3.0, True)])
def test_packing_where_padding_costs_a_tenth(gain, packed):
    result = plan(data=facts(packing_gain=gain))
    assert result.plan.packing is packed
    assert reason(result, "packing").why == f"padding would cost {gain:.2f} times the tokens"


def test_packing_without_data_and_as_asked_for():
    assert plan().plan.packing is False
    assert reason(plan(), "packing").why == "decided when the data is read"
    assert plan(packing=False, data=facts(packing_gain=5.0)).plan.packing is False
    assert plan(packing=True, data=facts(packing_gain=1.0)).plan.packing is True
    assert reason(plan(packing=True), "packing").why == "you asked for it"


def test_memory_follows_the_longest_record():
    """256 tokens are allowed; the data's longest record has 100."""
    assert peak(plan(method="lora", data=facts())) == peak(plan(method="lora", seq_len=100))
    assert peak(plan(method="lora", data=facts(longest_tokens=5000))) == peak(plan(method="lora"))


def test_memory_follows_what_packed_rows_can_hold():
    """A step of at most 450 tokens in rows of 256 makes at most 4 rows of the 8."""
    packed = plan(method="lora", packing=True, batch=8, data=facts())
    assert packed.plan.micro_batch == 4 and packed.plan.batch == 8
    assert peak(packed) == peak(plan(method="lora", micro_batch=4, batch=4))
    few = plan(method="lora", packing=True, batch=8, data=facts(most_step_tokens=150))
    assert peak(few) == peak(plan(method="lora", batch=2, seq_len=150))


@pytest.mark.parametrize("name", ["qwen3_5", "falcon", "llama4"])
def test_models_that_cannot_pack(name):
    from tests import tiny

    conf = tiny.config_of(name)
    assert plan(conf=conf, data=facts(packing_gain=9.0), seq_len=128).plan.packing is False
    with pytest.raises(UserError) as caught:
        plan(conf=conf, packing=True, seq_len=128)
    assert (caught.value.what, caught.value.fix) == ("this model cannot pack records", "use --no-packing")


def test_own_attention_is_left_as_it_is():
    from tests import tiny

    assert plan(conf=tiny.config_of("falcon"), seq_len=128).plan.attention == "native"


# -- positions ------------------------------------------------------------------------------------------------------


def test_beyond_learned_positions():
    from tests import tiny

    with pytest.raises(UserError) as caught:
        plan(conf=tiny.config_of("gpt2"), seq_len=300)
    assert caught.value.what == "seq_len 300 is longer than this model can read"
    assert (caught.value.why, caught.value.fix) == ("it has 256 learned positions", "use --seq-len 256")
    assert plan(conf=tiny.config_of("gpt2"), seq_len=256).fits


def test_the_default_length_is_cut_to_learned_positions():
    from fitune import recipe as recipes

    for name, positions in (("openai-community/gpt2", 1024), ("facebook/opt-125m", 2048), ("Qwen/Qwen3-0.6B", 40960)):
        result = make_plan(recipes.build(dict(model=name, gpu="rtx3090", batch=1)))
        assert result.fits and result.plan.seq_len == min(2048, positions)
        said = [note for note in result.notes if "learned positions" in note]
        assert said == (
            [f"this model has {positions} learned positions: seq_len is {positions} instead of 2048"]
            if positions < 2048
            else []
        )


def test_what_is_offered_keeps_the_cut_length():
    from fitune import recipe as recipes
    from tests import tiny

    unset = recipes.build(dict(model="m", method="qlora", batch=1))
    result = make_plan(unset, machine(card_for(1)), config=tiny.config_of("gpt2"))
    assert not result.fits and result.plan.seq_len == 256
    assert [e for e in result.nearest_fits if "gpu" in e["setting"]], "planned with the length that was cut"


def test_beyond_rotary_positions_is_a_note():
    result = plan(seq_len=5000, batch=1)
    assert any("5000 is beyond the 4096 positions" in note and "--rope-scaling" in note for note in result.notes)
    for other in (plan(seq_len=4096, batch=1), plan(seq_len=5000, batch=1, data=facts(longest_tokens=4000))):
        assert not any("beyond" in note for note in other.notes), "no record is that long"


def test_settings_of_adapters_are_said_to_do_nothing_in_full_fine_tuning():
    said = "--lora-r, --rslora: without effect, since full fine-tuning trains every weight and has no adapters"
    assert said in plan(method="full", lora_r=8, rslora=True).notes
    for values in (dict(method="full"), dict(method="lora", lora_r=8)):
        assert not any("without effect" in note for note in plan(**values).notes)


def test_what_a_card_holds_besides_tensors_is_a_note():
    (note,) = [n for n in plan(batch=1).notes if "driver's context" in n]
    assert "694 MiB" in note and "4%" in note


# -- contradictions -------------------------------------------------------------------------------------------------


def test_unknown_target_names_those_there_are():
    with pytest.raises(UserError, match=r"no layer is called 'qproj'(.|\n)*q_proj"):
        plan(lora_targets="qproj")


@pytest.mark.parametrize("values", [dict(base_format="fp32"), dict(base_format="bf16", precision="fp32")], ids=str)
def test_full_fine_tuning_in_another_format_than_it_computes_in(values):
    precision = values.get("precision", "bf16")
    with pytest.raises(UserError) as caught:
        plan(method="full", **values)
    assert caught.value.what == f"full fine-tuning computes in the weights' own format, here {precision}"
    assert caught.value.why == f"base_format is {values['base_format']}"
    assert caught.value.fix == f"leave base_format at auto, or use --precision {values['base_format']} too"
    both = plan(method="full", base_format=values["base_format"], precision=values["base_format"]).plan
    assert both.base_format == both.precision == values["base_format"]


def test_a_setting_that_changes_nothing_is_said():
    notes = plan(on=machine(card(name="Card"), ram_bytes=8 * GIB), vram=100.0, ram=40.0).notes
    assert "--vram 100 changes nothing: Card has only 24.00 GiB" in notes
    assert "--ram 40 changes nothing: 8.00 GiB of RAM are available" in notes


# -- the contract ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [24 * GIB, TIGHT, 1], ids=["roomy", "tight", "does not fit"])
def test_json(limit):
    """`fitune plan --json` as DESIGN has it; a field that is not computed is null, never a guess."""
    result = plan(limit, method="lora")
    values = json.loads(json.dumps(result.as_dict()))
    assert set(values) >= {"fits", "plan", "predicted", "reasons", "alternatives", "nearest_fits"}
    assert values["fits"] is (limit > 1)
    predicted = values["predicted"]
    assert set(predicted) >= {*FIELDS, "step_s", "tokens_per_s", "phases"}
    assert tuple(predicted["phases"]) == NAMES == ("load", "first_step", "step", "eval", "save", "merge", "resume")
    for fields in predicted["phases"].values():
        assert set(fields) == set(FIELDS)
    assert {r["decision"] for r in values["reasons"]} >= {"method", "base format", "micro-batch", "recomputation"}
    assert all(set(r) >= {"decision", "why", "exact"} and r["why"] for r in values["reasons"])
    for other in values["alternatives"]:
        assert set(other) == {"plan", "predicted", "why"}
    assert predicted["step_s"] is None and predicted["peak_reserved_bytes"] is None
    assert plans.from_dict(values["plan"]) == result.plan


def test_plan_round_trip():
    made = plan(TIGHT, lora_targets="q_proj,v_proj").plan
    again = plans.from_json(made.to_json())
    assert again == made and again.adapter.targets == ("q_proj", "v_proj") and again.reasons == made.reasons
    assert again.predicted["phases"]["step"]["peak_allocated_bytes"] > 0


def test_the_same_question_has_the_same_answer():
    assert plan(TIGHT).as_dict() == plan(TIGHT).as_dict()


def test_by_name_for_a_card_of_the_catalog():
    result = make_plan(recipe(model="Qwen/Qwen3-0.6B", gpu="rtx3080", seq_len=1024, recompute="all", micro_batch=1))
    assert result.fits and result.plan.device_name == "GeForce RTX 3080 10GB"
    assert 9 * GIB < result.plan.budget_bytes < 10 * GIB
    assert result.notes[0].startswith("assumed: 1 x GeForce RTX 3080 10GB"), "assumptions come first"


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("on_card", [False, True])
def test_budget_for_is_the_inverse_of_the_limit(replays, on_card):
    from dataclasses import replace

    from fitune.planner.context import PlanContext
    from fitune.planner.target import choose_target

    target = choose_target(recipe(), machine(card_for(GIB)) if on_card else machine())
    context = PlanContext(recipe(), target, config(), 256, replays=replays, held_back=3 * MIB)
    budget = context.budget_for(700 * MIB)
    for size, fits in ((budget, True), (budget - 8, False)):
        other = PlanContext(recipe(), replace(target, budget_bytes=size), config(), 256, replays=replays,
                            held_back=3 * MIB)  # fmt: skip
        assert (other.limit_bytes >= 700 * MIB) == fits


def test_attention_kernel_of_an_unknown_class():
    from fitune.planner.context import PlanContext
    from fitune.planner.target import choose_target

    class Odd:
        layer_types = None

    target = choose_target(recipe(), machine(card_for(GIB)))
    assert attention_kernel(PlanContext(recipe(), target, Odd(), 256), "bf16") == ("native", False)


def test_all_ranks_share_what_is_counted_of_the_model():
    from dataclasses import replace

    from fitune.planner.context import PlanContext
    from fitune.planner.target import choose_target

    context = PlanContext(recipe(), choose_target(recipe(), machine(card_for(GIB))), config(), 256)
    assert replace(context, whole=context, rank=1).decoder is context.decoder
    assert replace(context).decoder is not context.decoder, "another job may be of another model"
