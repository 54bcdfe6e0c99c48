"""One rank's terms, worked out from one card's, against traces of the rank's own step with an imagined group."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from fitune.memory import known
from fitune.memory.constants import Overheads, overheads
from fitune.memory.dry import Rows
from fitune.memory.layouts import BUCKET_BYTES, NCCL, Ends, rank_terms, with_nccl
from fitune.memory.policies import highest_peaks
from fitune.memory.ranks import RankPeaks, trace_rank
from fitune.memory.replay import Peaks, StepTerms, peaks
from fitune.memory.terms import together
from fitune.plan import Adapter, Plan, layers_of
from tests import tiny

WIDTH, ROWS, CHUNK, VOCAB, HIDDEN, WIDE, LAYERS = 128, 2, 64, 4096, 512, 1536, 8
LIMIT = 0.03
FULL: dict[str, Any] = dict(method="full", adapter=None)
SHARDS: dict[str, Any] = dict(stream_from="shards", resident_layers=0)


@functools.cache
def config() -> Any:
    return tiny.config_of("llama", hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=LAYERS,
                          vocab_size=VOCAB, num_attention_heads=8, num_key_value_heads=8)  # fmt: skip


def plan_of(way: str = "none", ranks: int = 1, **changes: Any) -> Plan:
    adapter = Adapter(r=16, alpha=8, dropout=0.0, bias="none", targets=("all-linear",))
    values = dict(adapter=adapter, device="cuda", precision="bf16", base_format="bf16", attention="flash", clip=0.5,
                  loss_chunk=CHUNK, num_layers=LAYERS, recompute_layers=LAYERS, seq_len=WIDTH, micro_batch=ROWS,
                  parallel=way, world_size=ranks)  # fmt: skip
    return tiny.make_plan(**(values | (SHARDS if way == "fsdp2" else {}) | changes))


@functools.cache
def _tracer(method: str) -> Any:
    return known.tracer_for(config(), plan_of(**(FULL if method == "full" else {})))


def whole(plan: Plan) -> StepTerms:
    slices = plan.world_size if plan.parallel == "cp" else 1
    return _tracer(plan.method).terms(ROWS, WIDTH // slices, CHUNK)


def ends_of(plan: Plan) -> Ends:
    table = VOCAB * HIDDEN * 2
    # of an adapter on a Llama's linears: 5 of q, k, v, gate, up are cut by outputs, o and down by inputs
    inputs, outputs, wide = HIDDEN, HIDDEN, WIDE
    total = 4 * (inputs + outputs) + 3 * (inputs + wide)
    return Ends(table if plan.embedding_place == "device" else 0, table, 7 * HIDDEN / total)


def predicted(plan: Plan, passes: int, stage: int = 0) -> tuple[StepTerms, Peaks]:
    terms = rank_terms(whole(plan), plan, ends_of(plan), micro_batches=passes, stage=stage)
    grouped = plan.accumulation_order == "layer-major"
    if grouped:
        both = together(terms.first_pass, terms.later_pass, passes)
        terms = replace(terms, first_pass=both, later_pass=both)
    return terms, peaks(terms, plan.recompute_layers, passes > 1 and not grouped)


def traced(plan: Plan, passes: int, stage: int = 0) -> RankPeaks:
    return trace_rank(config(), plan, [Rows(ROWS, WIDTH)] * passes, stage)


def assert_near(plan: Plan, passes: int, stage: int = 0, limit: float = LIMIT) -> None:
    terms, ours = predicted(plan, passes, stage)
    theirs = traced(plan, passes, stage)
    assert terms.weight_bytes == pytest.approx(theirs.held, rel=0.01), "what is held between steps"
    assert terms.state_bytes == pytest.approx(theirs.state, rel=LIMIT)
    for phase in ("first_step", "step", "eval"):
        assert getattr(ours, phase) == pytest.approx(getattr(theirs, phase), rel=limit), phase


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp"])
@pytest.mark.parametrize(("changes", "passes"), [({}, 2), (FULL, 1)], ids=["lora", "full"])
def test_a_rank_is_its_own_trace(way: str, ranks: int, changes: dict[str, Any], passes: int):
    assert_near(plan_of(way, ranks, **changes), passes)


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp", "cp"])
def test_layers_that_keep_their_activations(way: str):
    """tp: which of a layer's activations are whole is the model's own; what is taken for them is more, not less."""
    plan = plan_of(way, 4, recompute_layers=3)
    assert_near(plan, 1, limit=0.05 if way == "tp" else LIMIT)
    assert predicted(plan, 1)[1].step >= 0.99 * traced(plan, 1).step


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_slice_of_each_row(ranks: int):
    assert_near(plan_of("cp", ranks), 2)


def test_streamed_is_ddp_on_the_card():
    """What the ring of host copies takes is `planner.placement`'s; the exchange is the same."""
    terms = [rank_terms(whole(plan_of()), plan_of(way, 4), ends_of(plan_of())) for way in ("ddp", "streamed")]
    assert terms[0] == terms[1]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("is_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(("changes", "passes"), [(dict(recompute_layers=3), 4), (FULL, 2)], ids=["lora", "full"])
def test_a_stage_is_its_own_trace(ranks: int, is_last: bool, changes: dict[str, Any], passes: int):
    """GPipe: activations of all micro-batches of a step."""
    assert_near(plan_of("pp", ranks, **changes), passes, ranks - 1 if is_last else 0)


def test_further_micro_batches_of_sharded_weights():
    for passes, order in ((3, "micro-batch-major"), (2, "layer-major")):
        assert_near(plan_of("fsdp2", 4, accumulation_order=order, **FULL), passes)


# ---- theory ----------------------------------------------------------------------------------------------------------


def need(way: str, ranks: int, **changes: Any) -> int:
    plan = plan_of(way, ranks, **changes)
    return highest_peaks(rank_terms(whole(plan), plan, ends_of(plan), micro_batches=2), True)[LAYERS]


@pytest.mark.parametrize("changes", [{}, FULL], ids=["lora", "full"])
def test_more_ranks_need_less_each(changes: dict[str, Any]):
    for way in ("fsdp2", "tp", "pp", "zero3"):
        needs = [need(way, ranks, **changes) for ranks in (2, 4, 8)]
        assert needs[0] > needs[1] > needs[2], way
    assert need("ddp", 2, **changes) == need("ddp", 8, **changes) >= need("none", 1, **changes)


def test_each_stage_of_zero_needs_less():
    """Optimizer state, then gradients too, then weights too (https://arxiv.org/abs/1910.02054, figure 1)."""
    for ranks in (2, 4, 8):
        held = []
        for way in ("ddp", "zero1", "zero2", "zero3"):
            plan = plan_of(way, ranks, **FULL)
            terms = rank_terms(whole(plan), plan, ends_of(plan))
            held.append(peaks(terms, LAYERS, True).step)
        assert held == sorted(held, reverse=True) and len(set(held)) == 4


def test_shards_sum_to_one_copy():
    plan = plan_of("fsdp2", 4, **FULL)
    terms, one = rank_terms(whole(plan), plan, ends_of(plan)), whole(plan)
    for kind, layer in terms.layers.items():
        assert one.layers[kind].weight_bytes <= 4 * layer.weight_bytes <= 1.01 * one.layers[kind].weight_bytes
        assert one.layers[kind].state_bytes <= 4 * layer.state_bytes <= 1.01 * one.layers[kind].state_bytes


def test_stages_have_all_layers_once():
    for count, size in ((8, 3), (80, 8), (5, 5)):
        stages = [list(layers_of(count, rank, size)) for rank in range(size)]
        assert sum(stages, []) == list(range(count))
        assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_the_bucket_is_the_engines():
    from fitune.parallel.replicated import BUCKET_BYTES as real

    assert real == BUCKET_BYTES


def test_nccl_is_outside_the_allocator():
    alone = overheads("cuda", (8, 6))
    several = with_nccl(alone)
    assert several.context_bytes == alone.context_bytes + NCCL.num_bytes
    assert several.workspace == alone.workspace and several.context.basis == "assumed"
    assert several.slack_bytes[1] - alone.slack_bytes[1] == NCCL.high_bytes - NCCL.num_bytes
    cpu: Overheads = overheads("cpu", None)
    assert with_nccl(cpu) == cpu, "gloo's buffers are part of the process"
