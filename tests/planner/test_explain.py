"""Every decision has a reason that is true, and approximations are named so."""

from __future__ import annotations

import pytest

from tests import tiny
from tests.planner.case import GIB, TIGHT, TURING, card, config, machine, peak, plan, reason

DECISIONS = ["method", "base format", "precision", "attention", "embedding", "loss", "packing", "micro-batch",
             "recomputation", "optimizer"]  # fmt: skip


def inexact(result):
    return {r.decision for r in result.reasons if not r.exact}


@pytest.mark.parametrize("limit", [24 * GIB, TIGHT, 1])
def test_one_reason_per_decision(limit):
    result = plan(limit)
    assert [r.decision for r in result.reasons] == DECISIONS
    assert all(r.value and r.why for r in result.reasons)
    assert result.plan.reasons == result.reasons


@pytest.mark.parametrize(
    ("asked", "approximate"),
    [
        (dict(method="lora"), set()), (dict(method="full"), set()), (dict(method="qlora"), {"base format"}),
        (dict(base_format="int8"), {"base format"}), (dict(base_format="fp4"), {"base format"}),
        (dict(precision="fp16"), {"precision"}), (dict(optimizer="adamw8bit"), {"optimizer"}),
        (dict(optimizer="paged_adamw8bit"), {"optimizer"}), (dict(optimizer="paged_adamw"), set()),
        (dict(optimizer="lion"), set()), (dict(recompute="all", micro_batch=1), set()),
        (dict(method="qlora", precision="fp16", optimizer="lion8bit"), {"base format", "precision", "optimizer"}),
    ],
    ids=lambda value: ", ".join(sorted(map(str, value))) or "nothing",
)  # fmt: skip
def test_approximations_are_marked(asked, approximate):
    assert inexact(plan(**asked)) == approximate


def test_why_a_quantised_base():
    least = peak(plan(1, method="lora"))
    result = plan(least - 1)
    base = reason(result, "base format")
    assert base.value == "nf4 with double quantisation" and not base.exact
    assert base.why.startswith("bf16 needs at least ") and "GiB" in base.why or "MiB" in base.why
    assert reason(plan(), "base format").why == "the widest base that fits"
    assert reason(plan(method="qlora"), "base format").why == "you asked for it"
    assert reason(plan(base_format="fp16"), "base format").why == "you asked for it"
    assert reason(plan(method="qlora", double_quant=False), "base format").value == "nf4"


def test_why_a_precision():
    assert reason(plan(precision="fp16"), "precision").why == "you asked for it"
    old = plan(on=machine(card(name="Old", **TURING)))
    assert reason(old, "precision").why == "Old has no bf16; fp16 runs with loss scaling"
    assert "needs no loss scaling" in reason(plan(), "precision").why


def test_why_a_micro_batch_and_recomputation():
    roomy, tight, asked = plan(24 * GIB), plan(TIGHT), plan(micro_batch=2, recompute=3)
    assert (reason(roomy, "micro-batch").value, reason(roomy, "recomputation").value) == ("4 of 4", "0 of 8 layers")
    assert reason(roomy, "micro-batch").why == "the whole batch fits at once"
    assert reason(roomy, "recomputation").why == "all activations fit: nothing is computed twice"
    assert reason(tight, "recomputation").why.startswith("the fewest that fit")
    assert reason(asked, "micro-batch").why == "you asked for it; the rest is accumulated"
    assert (reason(asked, "recomputation").value, reason(asked, "recomputation").why) == (
        "3 of 8 layers",
        "you asked for it",
    )
    assert reason(plan(packing=True), "micro-batch").value == "4 of 4 (rows)"


def test_why_a_method():
    assert reason(plan(), "method").value == "LoRA r=16, alpha=32, all-linear"
    assert reason(plan(), "method").why == "adapters train well in little memory; full only when asked"
    assert reason(plan(dora=True, method="lora", lora_alpha=8.5), "method").value == "DoRA r=16, alpha=8.5, all-linear"
    assert reason(plan(method="full"), "method").value == "full"


def test_why_the_embedding_is_where_it_is():
    assert reason(plan(method="lora"), "embedding").value == "host"
    assert reason(plan(method="full"), "embedding").value == "device"
    assert "tied" in reason(plan(conf=config(tie_word_embeddings=True)), "embedding").why


def test_native_attention_says_so():
    result = plan(conf=tiny.config_of("falcon"), seq_len=128)
    assert reason(result, "attention").why == "the model brings its own attention, which is left as it is"


@pytest.mark.parametrize(
    "values", [dict(), dict(method="lora"), dict(method="full"), dict(recompute="all", micro_batch=2)], ids=str
)
def test_what_does_not_fit_is_not_said_to_fit(values):
    result = plan(1, **values)
    assert not result.fits
    for entry in result.reasons:
        if not entry.why.startswith("no T x T"):
            assert " fit" not in entry.why, entry
    if not values:
        assert reason(result, "micro-batch").why == reason(result, "recomputation").why == "the smallest need there is"
        assert reason(result, "base format").why.startswith("bf16 needs at least")
    assert reason(plan(1, method="lora"), "base format").why == "that of method lora"
