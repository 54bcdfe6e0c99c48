"""What is known without tracing is what a trace says: other optimizers, other ranks, and what was kept in the cache."""

from __future__ import annotations

import dataclasses
import gzip
import json

import pytest
import torch

from fitune import plan as plans
from fitune.engine.optimizers import update_peak_bytes
from fitune.memory import affine, codec, held, known, states, trace, trace_cache
from fitune.memory.entry import Entry
from fitune.memory.pieces import STREAMED
from fitune.memory.replay import StepTerms
from fitune.memory.variant import NOT_TRACED, for_any_rank, variant_of
from fitune.recipe import Recipe
from tests import tiny
from tests.memory.brute import cuda_plan

OPTIMIZERS = [o for o in Recipe.model_fields["optimizer"].annotation.__args__ if o != "auto"]
SHAPE = (2, 96, 40)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def traced():
    """(configuration, plan, live tracer, what is kept of it) of a small model with adapters."""
    config = tiny.config_of("llama", num_hidden_layers=3)
    plan = cuda_plan(config, clip=1.0)
    return config, plan, *known.traced(config, plan)


@pytest.fixture
def num_traces(traced, monkeypatch):
    """The small model's tracer in place of new ones; a list that grows by one for each."""
    made = []
    monkeypatch.setattr(trace, "Tracer", lambda config, plan, **how: made.append(plan) or traced[2])
    return made


# -- variants -------------------------------------------------------------------------------------------------------


def test_a_variant_is_what_a_trace_depends_on(traced):
    plan = traced[1]
    same = plan.with_(seq_len=77, batch=3, micro_batch=2, recompute_layers=1, lr=1.0, seed=5, budget_bytes=1, clip=0.3,
                      optimizer="sgd", adapter=dataclasses.replace(plan.adapter, alpha=5.0, rslora=True))  # fmt: skip
    assert variant_of(same) == variant_of(plan)
    others = [
        plan.with_(base_format="nf4"), plan.with_(precision="fp16"), plan.with_(attention="efficient"),
        plan.with_(embedding_place="host"), plan.with_(clip=0.0), plan.with_(device="cpu"),
        plan.with_(adapter=dataclasses.replace(plan.adapter, dropout=0.1)),
        plan.with_(adapter=dataclasses.replace(plan.adapter, r=5)),
        plan.with_(adapter=dataclasses.replace(plan.adapter, targets=("q_proj",))),
    ]  # fmt: skip
    assert len({variant_of(p) for p in (plan, *others)}) == len(others) + 1
    assert variant_of(plan.with_(double_quant=True)) == variant_of(plan.with_(double_quant=False))
    nf4 = plan.with_(base_format="nf4")
    assert variant_of(nf4.with_(double_quant=True)) != variant_of(nf4.with_(double_quant=False))


def test_every_field_of_a_plan_is_traced_or_said_not_to_be(traced):
    """A new field changes variants unless it is at its default: what ships keeps its name."""
    plan = traced[1]
    defaults = {f.name for f in dataclasses.fields(plans.Plan) if f.default is not dataclasses.MISSING}
    assert set(json.loads(variant_of(plan))) & defaults == set()
    assert {f.name for f in dataclasses.fields(plans.Plan)} >= NOT_TRACED
    for name in sorted(defaults - NOT_TRACED):
        assert variant_of(plan.with_(**{name: "something else"})) != variant_of(plan)


def test_any_rank_is_a_variant_without_its_rank(traced):
    plan = traced[1]
    other = plan.with_(adapter=dataclasses.replace(plan.adapter, r=99))
    assert for_any_rank(variant_of(plan)) == for_any_rank(variant_of(other)) != variant_of(plan)
    full = plan.with_(method="full", adapter=None)
    assert for_any_rank(variant_of(full)) == variant_of(full)


# -- optimizers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_is_that_of_the_engine_on_both_sides_of_every_threshold(optimizer):
    for dims in ((3,), (4095,), (4096,), (64, 64), (16, 255), (16, 257), (99_999,), (100_000,), (400, 250), (2, 3, 5)):
        parameter = torch.empty(dims, device="meta")
        made, coded = states.state_of(optimizer, dims)
        expected = held.state_of(optimizer, parameter)
        own = [s for s in expected if not s.shared]
        assert made == [(s.label.removesuffix(" of"), s.num_bytes) for s in own]
        assert coded == (len(own) < len(expected))
        assert len(states.tables(optimizer, [dims])) == len(expected) - len(own)
        assert states.update_bytes(optimizer, [dims]) == update_peak_bytes(optimizer, [parameter])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_script_with_another_optimizer_is_that_of_a_trace_with_it(traced, optimizer):
    config, plan, tracer, entry = traced
    dry = tracer.dry
    expected = held.holdings(dry.built, dry.engine.masters, optimizer)
    made = known.Known(config, plan.with_(optimizer=optimizer), entry)
    script = made.script()
    kinds = trace.layer_kinds(tracer.config)
    assert script.layers == {kind: expected.layers[i] for i, kind in enumerate(kinds)}
    assert (script.before, script.after, script.shared_state) == (expected.before, expected.after, expected.shared)
    if optimizer == "adamw":
        assert script == tracer.script()
    terms = states.terms_with_optimizer(tracer.terms(*SHAPE), entry.dims, optimizer, entry.granule)
    assert terms == made.terms(*SHAPE)
    # layers that stream are a kind of their own, of the same shapes
    base = tracer.terms(*SHAPE)
    streamed = dataclasses.replace(base, layers={kind + STREAMED: of for kind, of in base.layers.items()})
    found = states.terms_with_optimizer(streamed, entry.dims, optimizer, entry.granule)
    assert found.layers == {kind + STREAMED: of for kind, of in terms.layers.items()}


def test_a_step_with_another_optimizer_is_traced_the_same(traced):
    """The whole way, for one with code tables and one that allocates in its update."""
    config, plan, _, entry = traced
    for optimizer in ("adamw8bit", "adafactor"):
        other = plan.with_(optimizer=optimizer)
        fresh = trace.Tracer(config, other)
        made = known.Known(config, other, entry)
        assert made.terms(*SHAPE) == fresh.terms(*SHAPE)
        how = dict(recompute_layers=1, accumulates=True, first_step=True)
        assert made.step_events(*SHAPE, **how) == fresh.step_events(*SHAPE, **how)


# -- ranks ----------------------------------------------------------------------------------------------------------


def test_two_ranks_give_all(traced):
    config, plan = traced[:2]

    def at(rank):
        return plan.with_(adapter=dataclasses.replace(plan.adapter, r=rank))

    texts = [json.dumps(codec.encode(known.traced(config, at(rank))[1])) for rank in (24, 40)]
    joined = affine.join((texts[0], texts[1]), (24, 40))
    assert joined is not None and affine.at_rank(joined, 40) == texts[1]
    entry = codec.decode(Entry, json.loads(affine.at_rank(joined, 7)))
    fresh, expected = known.traced(config, at(7))
    assert entry.dims == expected.dims
    made = known.Known(config, at(7), entry)
    assert made.terms(*SHAPE) == fresh.terms(*SHAPE)
    how = dict(recompute_layers=2, accumulates=False, first_step=False)
    assert made.step_events(*SHAPE, **how) == fresh.step_events(*SHAPE, **how)


def test_what_is_not_linear_in_the_rank_is_refused():
    assert affine.join(("a 24 x 96", "a 40 x 96"), (24, 40)) == "a 0+1$ x 96"
    assert affine.at_rank("a 0+1$ x 96, -5+2$", 8) == "a 8 x 96, 11"
    for pair in (("a 24", "b 40"), ("1", "2"), ("40", "24"), ("1 2", "1"), ("5$", "5$")):
        assert affine.join(pair, (24, 40)) is None


# -- the cache ------------------------------------------------------------------------------------------------------


def kept_files():
    return sorted(trace_cache.folder().glob("*"))


def test_what_was_traced_once_is_not_traced_again(traced, num_traces):
    config, plan, tracer, _ = traced
    first = known.tracer_for(config, plan)
    assert not kept_files() and first.terms(*SHAPE) == tracer.terms(*SHAPE) and len(kept_files()) == 1
    again = known.tracer_for(config, plan.with_(micro_batch=2, optimizer="lion8bit"))
    assert again.terms(*SHAPE).first_pass == tracer.terms(*SHAPE).first_pass
    assert again.terms(1, 33, 64) == known.Known(config, again.plan, traced[3]).terms(1, 33, 64), "any shape"
    assert len(num_traces) == 1


def test_shapes_are_kept_one_by_one_where_there_is_no_script(monkeypatch):
    """Soft-capped scores: how many blocks of queries there are depends on the shape."""
    config = tiny.config_of("gemma2", num_hidden_layers=2)
    plan = cuda_plan(config, clip=1.0)
    first = known.tracer_for(config, plan)
    terms = first.terms(*SHAPE)
    other = known.tracer_for(config, plan).terms(1, 96, 40)
    assert len(kept_files()) == 1
    monkeypatch.delattr(trace, "Tracer")
    again = known.tracer_for(config, plan)
    assert (again.terms(*SHAPE), again.terms(1, 96, 40)) == (terms, other)
    with pytest.raises(AttributeError, match="Tracer"):
        again.terms(2, 97, 40)


@pytest.mark.parametrize(
    "damage",
    [b"", b"nothing", gzip.compress(b"{"), gzip.compress(b"[1, 2, 3, 4]"), gzip.compress(b'{"script": 5}'),
     gzip.compress(b'["{}", [{}, [], []], 512, {}]')],
    ids=["empty", "no gzip", "no JSON", "another list", "another object", "a script of another version"],
)  # fmt: skip
def test_a_damaged_entry_is_made_again(traced, num_traces, damage):
    config, plan, tracer, _ = traced
    known.tracer_for(config, plan).terms(*SHAPE)
    (file,) = kept_files()
    whole = file.read_bytes()
    for content in (damage, whole[: len(whole) // 2]):
        file.write_bytes(content)
        assert known.tracer_for(config, plan).terms(*SHAPE) == tracer.terms(*SHAPE)
        assert file.read_bytes() == whole
    assert len(num_traces) == 3


def test_the_name_of_an_entry_changes_with_what_a_trace_depends_on(traced, monkeypatch):
    config, plan = traced[:2]
    keys = {
        known.cache_key(config, plan),
        known.cache_key(tiny.config_of("llama", num_hidden_layers=4), plan),
        known.cache_key(tiny.config_of("mistral", num_hidden_layers=3), plan),
        known.cache_key(config, plan.with_(base_format="int8")),
    }
    monkeypatch.setattr(known, "versions", lambda: {"torch": "9", "transformers": "9"})
    keys.add(known.cache_key(config, plan))
    monkeypatch.setattr(known, "code_hash", lambda: "other")
    assert len(keys | {known.cache_key(config, plan)}) == 6
    assert known.cache_key(config, plan.with_(lr=3.0)) == known.cache_key(config, plan)


def test_the_cache_is_bounded_and_the_last_used_stay(monkeypatch):
    import os

    value = {"script": "".join(chr(48 + i * 7 % 60) for i in range(3000))}
    for number in range(4):
        trace_cache.store(f"entry{number}", value)
        os.utime(trace_cache.folder() / f"entry{number}.json.gz", (number, number))
    assert trace_cache.load("entry0") == value  # used now
    size = (trace_cache.folder() / "entry0.json.gz").stat().st_size
    monkeypatch.setattr(trace_cache, "MOST_BYTES", 3 * size)
    trace_cache.store("entry4", value)
    assert [p.name.partition(".")[0] for p in kept_files()] == ["entry0", "entry3", "entry4"]


def test_a_cache_that_cannot_be_written_is_done_without(traced, num_traces, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path / "file"))
    config, plan, tracer, _ = traced
    for count in (1, 2):
        assert known.tracer_for(config, plan).terms(*SHAPE) == tracer.terms(*SHAPE)
        assert len(num_traces) == count


def test_terms_survive_json(traced):
    terms = traced[2].terms(*SHAPE)
    assert codec.decode(StepTerms, json.loads(json.dumps(codec.encode(terms)))) == terms
    with pytest.raises(ValueError, match="not a"):
        codec.decode(StepTerms, [1, 2])
