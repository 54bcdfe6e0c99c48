"""The choice among candidates against trying every one of them, on made-up models and on traced ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitune.memory.policies import highest_peaks
from fitune.memory.replay import peaks
from fitune.memory.trace import Tracer
from fitune.planner import ladder
from fitune.planner.ladder import (
    AS_FAST,
    BYTES_PER_LOGIT,
    LOSS_CHUNK_BYTES,
    MOST_BYTES_PER_LOGIT,
    SMALLEST_CHUNK,
    Search,
    default_chunk,
    micro_batches,
    ordered,
    rungs,
)
from tests import tiny
from tests.memory.brute import cuda_plan
from tests.planner.case import config


@pytest.fixture(scope="module", params=["lora", "full", "nf4, mixture of experts"])
def terms_of(request):
    """Traced terms of a small model, about 6 layers."""
    if request.param.startswith("nf4"):
        conf = config("qwen3_moe", num_hidden_layers=6, moe_intermediate_size=256, decoder_sparse_step=2)
        plan = cuda_plan(conf, base_format="nf4")
    else:
        conf = config(num_hidden_layers=6)
        plan = cuda_plan(conf, method=request.param)
    return Tracer(conf, plan).terms


def seconds_of(plan):
    """A forward pass is a third of a step, and every pass has a fixed cost."""
    return (3 + plan.recompute_layers / 6) / 3 * (1 + 1 / plan.micro_batch)


def search(terms_of, **changes):
    values = dict(
        draft=tiny.make_plan(batch=4),
        terms_of=terms_of,
        seconds_of=seconds_of,
        num_rows=4,
        width=256,
        chunk=256,
        fixed_chunk=False,
        micro_batch=None,
        recompute=None,
    )
    return Search(**(values | changes))


def everything(made):
    """Every candidate there is, by brute force."""
    num_layers = len(made.terms_of(1, made.width, made.chunk).kinds)
    rows = [made.micro_batch] if made.micro_batch else micro_batches(made.num_rows)
    layers = [made.recompute] if made.recompute is not None else range(num_layers + 1)
    return [made.candidate(r, n, c) for r in rows for n in layers for c in made.chunks()]


def limits(candidates):
    """Limits around every candidate's need."""
    needs = sorted({c.peak_bytes for c in candidates})
    return [needs[0] - 1, *needs, needs[-1] + 1, *((a + b) // 2 for a, b in zip(needs, needs[1:], strict=False))]


CASES = {
    "free": {},
    "micro-batch fixed": dict(micro_batch=2),
    "layers fixed": dict(recompute=3),
    "none recomputed": dict(recompute=0),
    "chunk fixed": dict(fixed_chunk=True),
    "one row": dict(num_rows=1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_choice_fits_and_recomputes_the_fewest_layers(terms_of, case):
    made = search(terms_of, **case)
    candidates = everything(made)
    for limit in limits(candidates):
        for found in made.fitting(limit):
            assert found.peak_bytes <= limit
            fewer = [
                c for c in candidates
                if c.micro_batch == found.micro_batch and c.loss_chunk == found.loss_chunk
                and c.recompute_layers < found.recompute_layers and c.peak_bytes <= limit
            ]  # fmt: skip
            assert fewer == []


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_says_that_nothing_fits_only_when_nothing_does(terms_of, case):
    made = search(terms_of, **case)
    candidates = everything(made)
    for limit in limits(candidates):
        fits = any(c.peak_bytes <= limit for c in candidates)
        assert bool(made.fitting(limit)) == fits, limit - min(c.peak_bytes for c in candidates)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_smallest_candidate_is_the_smallest(terms_of, case):
    made = search(terms_of, **case)
    assert made.smallest().peak_bytes == min(c.peak_bytes for c in everything(made))


def test_peaks_of_a_shape_are_worked_out_once(terms_of, monkeypatch):
    asked = []
    monkeypatch.setattr(ladder, "highest_peaks", lambda *how: asked.append(how) or highest_peaks(*how))
    made = search(terms_of)
    assert made.fitting(10**12) and made.fitting(0) == [] and made.smallest()
    assert 0 < len(asked) == len(set(map(repr, asked)))


def test_a_candidate_tells_the_peaks_of_its_phases(terms_of):
    for made in everything(search(terms_of)):
        reached = peaks(terms_of(made.micro_batch, 256, made.loss_chunk), made.recompute_layers, made.micro_batch < 4)
        assert made.peaks == reached
        assert made.peak_bytes == max(reached.load, reached.first_step, reached.step, reached.eval, reached.save)


def test_what_is_fixed_stays(terms_of):
    made = search(terms_of, micro_batch=2, recompute=3, fixed_chunk=True)
    for limit in (0, 10**12):
        for found in [made.smallest(), *made.fitting(limit)]:
            assert (found.micro_batch, found.recompute_layers, found.loss_chunk) == (2, 3, 256)


def test_more_memory_is_never_slower(terms_of):
    made = search(terms_of)
    costs = []
    for limit in sorted(limits(everything(made))):
        found = made.fitting(limit)
        costs.append(min((c.cost for c in found), default=float("inf")))
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 1.25


def test_the_large_chunk_comes_first(terms_of):
    found = search(terms_of).fitting(10**12)
    assert {c.loss_chunk for c in found} == {256}


def token_bytes():
    """What the planner takes for the most that a token less in a loss chunk takes off a peak."""
    conf = config()
    return MOST_BYTES_PER_LOGIT * (conf.vocab_size + conf.hidden_size)


def test_a_smaller_chunk_takes_off_no_more_than_is_taken_for_granted(terms_of):
    made = search(terms_of)
    for rows in (1, 4):
        large, small = (made.needs(rows, chunk) for chunk in (256, SMALLEST_CHUNK))
        most = max(large[layers] - small[layers] for layers in large)
        assert 0 < most <= token_bytes() * (256 - SMALLEST_CHUNK)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_smaller_chunk_that_is_passed_over_would_change_nothing(terms_of, case):
    plain, made = search(terms_of, **case), search(terms_of, **case, chunk_token_bytes=token_bytes())
    for limit in limits(everything(plain)):
        assert made.fitting(limit) == plain.fitting(limit)


def test_a_smaller_chunk_is_not_traced_where_it_cannot_help(terms_of):
    """A trace of one shape may take seconds."""
    asked = set()

    def counted(*shape):
        asked.add(shape)
        return terms_of(*shape)

    needs = search(terms_of, num_rows=1).needs(1, 256)
    limit = min(needs.values())
    (found,) = search(counted, num_rows=1, chunk_token_bytes=1).fitting(limit)
    assert needs[found.recompute_layers] == limit and asked == {(1, 256, 256)}


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1, [1]), (2, [2, 1]), (8, [8, 4, 2, 1]), (5, [5, 3, 2, 1]), (100, [100, 50, 25, 13, 7, 4, 2, 1])],
)
def test_micro_batches(rows, sizes):
    assert micro_batches(rows) == sizes


@pytest.mark.parametrize("vocab_size", [256, 32_000, 49_152, 128_256, 151_936, 262_144, 10_000_000])
def test_default_chunk(vocab_size):
    chunk = default_chunk(vocab_size)
    assert chunk % SMALLEST_CHUNK == 0 and SMALLEST_CHUNK <= chunk <= 1024
    assert chunk * vocab_size * BYTES_PER_LOGIT <= LOSS_CHUNK_BYTES or chunk == SMALLEST_CHUNK


SIMPLE = tiny.make_plan(batch=4, micro_batch=4, recompute_layers=0, base_format="bf16")
LADDER = [
    dict(), dict(micro_batch=1), dict(recompute_layers=3), dict(recompute_layers=3, micro_batch=1),
    dict(recompute_layers=3, offload_inputs=True), dict(stream_from="pinned", resident_layers=0),
    dict(stream_from="disk", resident_layers=0, recompute_layers=3), dict(base_format="int8"),
    dict(base_format="nf4"), dict(base_format="nf4", stream_from="pinned", resident_layers=0),
]  # fmt: skip


def test_the_rungs_are_in_the_order_of_the_ladder():
    found = [rungs(SIMPLE.with_(**changes)) for changes in LADDER]
    assert found == sorted(found) and len(set(found)) == len(found)
    assert found[0] == ()


def candidate(made, cost, **changes):
    one = made.smallest()
    return replace(one, draft=one.draft.with_(**changes), cost=cost)


def test_the_fastest_and_of_those_as_fast_the_lowest_rung(terms_of):
    made = search(terms_of)
    streamed = dict(stream_from="pinned", resident_layers=0)
    fast, near, far = candidate(made, 1.0, **streamed), candidate(made, AS_FAST), candidate(made, AS_FAST + 0.01)
    assert ordered([far, fast, near]) == [near, fast, far]
    assert ordered([far, fast]) == [fast, far], "more than 5 % slower is too slow"
    assert ordered([candidate(made, 1.0, base_format="nf4"), candidate(made, 1.04, **streamed)])[0].cost == 1.04
    assert ordered([]) == []


def test_a_smaller_chunk_that_is_faster_by_itself_is_taken(terms_of):
    """Products of few tokens may fill their tiles better than those of more."""

    def seconds(plan):
        return seconds_of(plan) - (plan.loss_chunk == SMALLEST_CHUNK)

    needs = search(terms_of, num_rows=1).needs(1, 256)
    limit = min(needs.values())
    fewest = next(layers for layers, need in needs.items() if need <= limit)
    (found,) = search(terms_of, num_rows=1, seconds_of=seconds, chunk_token_bytes=1).fitting(limit)
    assert found.loss_chunk == (SMALLEST_CHUNK if fewest else 256), "with nothing recomputed it is not looked for"
