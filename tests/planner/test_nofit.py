"""When nothing fits: what is offered fits when it is taken up, and is not more than needed."""

from __future__ import annotations

import pytest

from fitune.catalog import gpus
from fitune.planner import make_plan
from fitune.planner.context import PlanContext
from tests.planner.case import GIB, MIB, DataFacts, card, card_for, config, machine, peak, plan, recipe


def offers(limit_mib, **values):
    result = plan(int(limit_mib * MIB), **values)
    assert not result.fits
    return result.nearest_fits


def taken_up(limit_mib, values, entry):
    """The plan with the offered settings, on the same machine or for the offered card."""
    made = recipe(**(values | entry["setting"]))
    where = None if "gpu" in entry["setting"] else machine(card_for(int(limit_mib * MIB)))
    return make_plan(made, where, config=config())


def kinds(entries):
    return [next(iter(entry["setting"])) for entry in entries]


ASKED = {
    "lora": (70, dict(method="lora")),
    "full": (300, dict(method="full")),
    "auto, long records": (56, dict(seq_len=1024, batch=1)),
    "micro-batch fixed": (50, dict(method="qlora", micro_batch=4)),
    "recomputation fixed": (55, dict(method="qlora", recompute="none")),
    "wide base fixed": (70, dict(base_format="bf16")),
    "int8 base fixed": (50, dict(base_format="int8", seq_len=256)),
}


@pytest.mark.parametrize(("limit_mib", "values"), ASKED.values(), ids=ASKED.keys())
def test_what_is_offered_fits(limit_mib, values):
    entries = offers(limit_mib, **values)
    assert entries
    for entry in entries:
        again = taken_up(limit_mib, values, entry)
        assert again.fits, entry
        assert "gpu" in entry["setting"] or entry["needs_bytes"] <= limit_mib * MIB


def test_what_was_fixed_is_offered_to_be_left_to_fitune():
    (first, *_) = offers(50, method="qlora", micro_batch=4)
    assert (first["change"], first["setting"]) == ("let fitune choose: leave out --micro-batch", {"micro_batch": None})
    (first, *_) = offers(50, method="qlora", micro_batch=4, recompute="none")
    assert first["change"] == "let fitune choose: leave out --micro-batch and --recompute"
    assert first["setting"] == {"micro_batch": None, "recompute": "auto"}
    assert all("micro_batch" not in entry["setting"] for entry in offers(1, method="qlora", micro_batch=4))


def test_a_higher_cap_is_offered_where_the_card_has_more():
    """--vram caps the card one has: no other card is needed."""
    values = dict(method="full", vram=1.0)
    where = machine(card_for(10_000 * MIB))
    entries = make_plan(recipe(**values), where, config=config()).nearest_fits
    assert "gpu" not in kinds(entries)
    (entry,) = [e for e in entries if "vram" in e["setting"]]
    raised = entry["setting"]["vram"]
    assert entry["change"] == f"a higher limit: --vram {raised:g}"
    assert make_plan(recipe(**values | {"vram": raised}), where, config=config()).fits
    assert not make_plan(recipe(**values | {"vram": raised - 0.2}), where, config=config()).fits


def test_a_card_is_offered_without_the_cap_that_was_in_the_way():
    """Settings that belong to the card one has are left out with it."""
    values = dict(method="full", vram=0.9, devices="0")
    result = make_plan(recipe(**values), machine(card_for(200 * MIB)), config=config())
    (entry,) = [e for e in result.nearest_fits if "gpu" in e["setting"]]
    assert entry["setting"] == {"gpu": entry["setting"]["gpu"], "vram": None, "devices": None}
    assert "vram" not in kinds(result.nearest_fits), "the card itself is too small"
    assert taken_up(0, values, entry).fits


def test_a_card_offered_is_larger_than_the_one_there_is():
    busy = card(16 * GIB, free_bytes=GIB, used_by_others_bytes=15 * GIB)
    result = make_plan(recipe(method="full"), machine(busy), config=config())
    (entry,) = [e for e in result.nearest_fits if "gpu" in e["setting"]]
    assert gpus.find(entry["setting"]["gpu"])[0].usable_bytes > 16 * GIB


def test_a_smaller_model_of_the_family():
    values = dict(model="meta-llama/Llama-3.1-70B", gpu="rtx3080", seq_len=512, ram=1)  # none to stream from
    result = make_plan(recipe(**values))
    (entry,) = [e for e in result.nearest_fits if "model" in e["setting"]]
    assert entry["setting"] == {"model": "meta-llama/Llama-3.1-8B"}
    assert make_plan(recipe(**values | entry["setting"])).fits


def test_a_shorter_sequence_is_the_longest_that_fits():
    values = dict(method="qlora", seq_len=1024, batch=2)
    (entry,) = [e for e in offers(60, **values) if "seq_len" in e["setting"]]
    length = entry["setting"]["seq_len"]
    assert length % 128 == 0 and 128 <= length < 1024
    assert entry["change"] == f"shorter records: --seq-len {length}"
    assert not taken_up(60, values, {"setting": {"seq_len": length + 128}}).fits


def test_a_length_that_is_no_multiple_of_128():
    """Of 300 tokens the longest length offered is 256."""
    values = dict(method="qlora", batch=1)
    enough, needed = (peak(plan(1, seq_len=length, **values)) / MIB for length in (256, 300))
    (entry,) = [e for e in offers((enough + needed) / 2, seq_len=300, **values) if "seq_len" in e["setting"]]
    assert entry["setting"]["seq_len"] == 256


def test_a_shorter_sequence_cuts_into_the_records_there_are():
    """A limit above the longest record would change nothing."""
    values = dict(method="qlora", seq_len=1024, batch=1)
    facts = DataFacts(longest_tokens=500, packing_gain=1.0, most_step_tokens=500)
    needed = peak(plan(1, seq_len=500, method="qlora", batch=1))
    result = plan(needed - 1, data=facts, **values)
    (entry,) = [e for e in result.nearest_fits if "seq_len" in e["setting"]]
    assert entry["setting"] == {"seq_len": 384}


def test_a_length_is_offered_however_long_the_records_are():
    """A thirtieth of them would not fit either: shorter ones are powers of two."""
    values = dict(method="qlora", batch=1)
    (entry,) = [e for e in offers(70, seq_len=999_999_999, **values) if "seq_len" in e["setting"]]
    length = entry["setting"]["seq_len"]
    assert length >= 128 and length.bit_count() == 1
    assert not taken_up(70, values, {"setting": {"seq_len": 2 * length}}).fits


def test_no_length_helps():
    assert "seq_len" not in kinds(offers(1, method="qlora", seq_len=1024))
    assert "seq_len" not in kinds(offers(1, method="qlora", seq_len=128))


def test_a_quantised_base_is_offered_only_where_it_helps():
    assert offers(70, method="lora")[0]["change"] == "QLoRA: a frozen nf4 base (approximate)"
    assert "method" not in kinds(offers(20, method="lora")), "nf4 does not fit either"
    assert "method" not in kinds(offers(20, method="qlora"))


def test_the_card_offered_is_the_smallest_that_fits():
    """Of the NVIDIA cards with the same kernels that one can put into a PC or rent, by memory."""
    values = dict(method="full", seq_len=4096, batch=1, recompute="none", micro_batch=1)
    (entry,) = [e for e in offers(100, **values) if "gpu" in e["setting"]]
    offered = gpus.find(entry["setting"]["gpu"])[0]
    assert offered.name in entry["change"] and offered.flash_attention
    fitting = [
        g for g in gpus.all_gpus()
        if g.vendor == "NVIDIA" and g.flash_attention and g.memory_kind != "shared" and "Laptop" not in g.name
        and taken_up(100, values, {"setting": {"gpu": g.id}}).fits
    ]  # fmt: skip
    assert offered.usable_bytes == min(g.usable_bytes for g in fitting)


def test_an_old_card_is_not_offered_where_torch_has_left_it():
    """A Turing card without room: the next one is Turing or newer, not a Tesla P40."""
    small = card(GIB, compute_capability="7.5", bf16=False, flash_attention=False)
    result = make_plan(recipe(method="full"), machine(small), config=config())
    (entry,) = [e for e in result.nearest_fits if "gpu" in e["setting"]]
    major, minor = map(int, gpus.find(entry["setting"]["gpu"])[0].compute_capability.split("."))
    assert (major, minor) >= (7, 5)


def test_the_plan_that_does_not_fit_is_the_smallest_there_is():
    result = plan(50 * MIB, method="lora")
    assert not result.fits and result.alternatives == ()
    assert (result.plan.micro_batch, result.plan.recompute_layers) == (1, 8)


def test_no_card_is_offered_to_the_processor():
    result = make_plan(recipe(devices="cpu", ram=0.05, method="lora", precision="fp32"), machine(), config=config())
    assert not result.fits and "gpu" not in kinds(result.nearest_fits)


@pytest.mark.parametrize(("spared_by", "offered"), [("adamw8bit", "adamw8bit"), ("paged_adamw", "paged_adamw")])
def test_the_first_lighter_optimizer_that_fits_is_offered(spared_by, offered):
    """Between what one optimizer needs and what the one before it needs."""
    needed = peak(plan(1, method="full", optimizer=spared_by))
    entries = offers(needed / MIB, method="full")
    (entry,) = [e for e in entries if "optimizer" in e["setting"]]
    assert entry["setting"] == {"optimizer": offered} and entry["needs_bytes"] <= needed
    assert entry["change"].startswith("another optimizer: AdamW ")


def test_sgd_is_offered_last_and_nothing_where_state_is_not_the_cause():
    needed = min(peak(plan(1, method="full", optimizer=name)) for name in ("sgd", "paged_adamw", "paged_adamw8bit"))
    assert "optimizer" not in kinds(offers((needed - 1) / MIB, method="full"))
    assert "optimizer" not in kinds(offers(300, method="full", optimizer="sgd")), "it is the person's choice"
    on_cpu = dict(devices="cpu", ram=0.31, method="full", precision="fp32")
    entries = make_plan(recipe(**on_cpu), machine(), config=config()).nearest_fits
    found = [e["setting"]["optimizer"] for e in entries if "optimizer" in e["setting"]]
    assert found and not found[0].startswith("paged_")


def test_what_is_offered_is_found_without_a_trace_of_places(monkeypatch):
    """The plan that needs least streams; that its optimizer's state is not the cause is known without another trace."""
    asked = []

    def tracer(self, wanted, real=PlanContext.tracer):
        asked.append(wanted)
        return real(self, wanted)

    monkeypatch.setattr(PlanContext, "tracer", tracer)
    result = plan(on=machine(card_for(20 * MIB), ram_bytes=32 * GIB), method="qlora")
    assert not result.fits and result.plan.stream_from == "pinned" and asked
    assert {(one.stream_from, one.offload_inputs) for one in asked} == {("none", False)}
