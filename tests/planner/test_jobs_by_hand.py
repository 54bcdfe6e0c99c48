"""The advice for three real jobs, worked out by hand from the price table: 7B LoRA on 5k Alpaca records is in
`test_advise`; here 14B QLoRA on 50k conversations, and 70B in full."""

from __future__ import annotations

import pytest

from fitune import recipe as recipes
from fitune.catalog import gpus, models
from fitune.planner import advise
from tests.planner.test_advise import by_hand, flops_hours, row

CARDS = tuple(gpus.find(name)[0] for name in ("h100", "a100-sxm4-80gb", "h200-sxm", "mi300x"))


def recipe(model: str, **values):
    return recipes.build({"model": model, **values})


def test_14b_qlora_on_50k_conversations():
    """About 700 tokens each make 35 M; rows of 2,048 in steps of 16 are 35e6 / 32,768 = 1,068.1 steps. One A100 of
    80 GB at 1.89 (RunPod) or 2.4984 (Modal) an hour; eight at 14.32 together (Lambda)."""
    shape = models.find("Qwen/Qwen3-14B")
    found = advise.advise(recipe(shape.id, method="qlora", batch=16), tokens=35e6, among=CARDS[:2])
    assert found.job.steps == 1069
    card = row(found, "a100-sxm4-80gb")
    assert card.plan.base_format == "nf4"
    by_hand(card, "RunPod", 1.89, 1069)
    by_hand(card, "Modal", 2.4984, 1069)
    assert (card.best.offer.provider, card.best.per_hour) == ("RunPod", 1.89)
    by_hand(row(found, "a100-sxm4-80gb", 8), "Lambda", 14.32, 1069)
    share = card.plan.recompute_layers / card.plan.num_layers
    assert 0.5 < card.hours[1] / flops_hours(shape.params_total, 35e6, share, 312) < 2.5
    # about three hours, so about six dollars: the order of magnitude that a person would say
    assert 1.5 < card.hours[1] < 6 and 3 < card.best.lowest < 12


def test_70b_in_full_is_more_than_eight_cards_have():
    """70.55e9 parameters x (2 bytes of bf16, 4 of fp32 master, 4 of gradient, 8 of two moments) = 1,183 GiB. Eight
    H200 have 8 x 140 = 1,118 GiB: no single machine of the catalog does it with its state on the cards, and what is
    offered instead keeps to that arithmetic."""
    shape = models.find("meta-llama/Llama-3.3-70B-Instruct")
    needed = shape.params_total * (2 + 4 + 4 + 8)
    assert needed / 2**30 == pytest.approx(1183, rel=0.01)
    assert needed > 8 * gpus.find("h200-sxm")[0].usable_bytes
    found = advise.advise(recipe(shape.id, method="full", batch=16, ram=256), tokens=20e6, among=CARDS)
    assert not any(card.num_gpus == 1 for card in found.cards)
    least = min(card.needed_bytes for card in found.too_small)
    assert least == pytest.approx(needed, rel=0.03)
    assert found.cards or any("QLoRA" in offer["change"] for offer in found.nearest_fits)
