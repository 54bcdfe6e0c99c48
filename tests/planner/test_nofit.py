"""When nothing fits: what is offered fits when it is taken up, and is not more than needed."""

from __future__ import annotations

import pytest

from fitune import recipe as recipes
from fitune.planner import make_plan
from tests.planner.case import GIB, MIB, config, peak, plan

BIG = config(num_hidden_layers=12, hidden_size=1024, intermediate_size=4096)  # about 200 M parameters


def taken_up(values, entry, conf=BIG):
    """The plan of the recipe with the offered settings."""
    base = dict(model="m", seq_len=512, batch=8) | values
    return make_plan(recipes.build(base | entry["setting"]), config=conf)


def offers(values, conf=BIG):
    result = make_plan(recipes.build(dict(model="m", seq_len=512, batch=8) | values), config=conf)
    assert not result.fits
    return result


def kinds(result):
    return [next(iter(entry["setting"])) for entry in result.nearest_fits]


@pytest.mark.parametrize(
    "values",
    [
        dict(gpu="rtx-3050-ti-laptop", vram=1.2, method="lora"),
        dict(gpu="rtx-3050-ti-laptop", method="full", seq_len=2048, batch=1),
        dict(gpu="rtx3080", seq_len=16384, batch=1, vram=1.3),
    ],
    ids=["lora", "full", "long records"],
)
def test_what_is_offered_fits(values):
    result = offers(values)
    assert result.nearest_fits
    for entry in result.nearest_fits:
        if "gpu" in entry["setting"] and "vram" in values:
            continue  # see below
        again = taken_up(values, entry)
        assert again.fits, entry["change"]
        assert entry["needs_bytes"] > 0


def test_a_shorter_sequence_is_the_longest_that_fits():
    values = dict(gpu="rtx-3050-ti-laptop", vram=1.2, method="qlora", seq_len=8192, batch=1)
    result = offers(values)
    (entry,) = [e for e in result.nearest_fits if "seq_len" in e["setting"]]
    length = entry["setting"]["seq_len"]
    assert length % 128 == 0 and entry["change"] == f"shorter records: --seq-len {length}"
    assert not taken_up(values, {"setting": {"seq_len": length + 128}}).fits
    assert peak(taken_up(values, entry)) <= entry["needs_bytes"] + 0.2 * GIB


def test_a_quantised_base_is_offered_only_where_it_helps():
    lora = offers(dict(gpu="rtx-3050-ti-laptop", vram=1.2, method="lora"))
    assert lora.nearest_fits[0]["change"] == "QLoRA: a frozen nf4 base (approximate)"
    assert "method" not in kinds(offers(dict(gpu="rtx-3050-ti-laptop", vram=1.1, method="qlora", seq_len=8192)))
    assert "method" not in kinds(offers(dict(gpu="rtx-3050-ti-laptop", vram=0.9, method="lora")))


def test_the_card_offered_is_the_smallest_that_fits():
    from fitune.catalog import gpus

    values = dict(gpu="rtx-3050-ti-laptop", method="full", seq_len=2048, batch=1)
    (entry,) = [e for e in offers(values).nearest_fits if "gpu" in e["setting"]]
    offered = gpus.find(entry["setting"]["gpu"])[0]
    assert offered.name in entry["change"] and offered.flash_attention
    smaller = [g for g in gpus.all_gpus() if g.vendor == "NVIDIA" and g.flash_attention
               and g.usable_bytes < offered.usable_bytes]  # fmt: skip
    assert smaller
    for gpu in sorted(smaller, key=lambda g: -g.usable_bytes)[:2]:
        assert not taken_up(values, {"setting": {"gpu": gpu.id}}).fits, gpu.id


def test_the_plan_that_does_not_fit_is_the_smallest_there_is():
    result = plan(100 * MIB, method="lora")
    assert not result.fits
    assert (result.plan.micro_batch, result.plan.recompute_layers) == (1, 8)
    assert result.alternatives == ()


def test_no_card_is_offered_to_the_processor():
    result = make_plan(recipes.build(dict(model="m", devices="cpu", ram=0.2, method="lora")), config=BIG)
    assert not result.fits and "gpu" not in kinds(result)
