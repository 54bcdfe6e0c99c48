"""A step spliced from the parts of a few layers, against the whole model's step, event for event."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import random

import pytest

from fitune.memory import splice, terms
from fitune.memory.cut import NotRegular, fit
from fitune.memory.pieces import symbols
from fitune.memory.replay import peaks
from fitune.memory.script import Script
from fitune.memory.trace import Tracer, _Builder
from fitune.model import tiled_mlp
from tests import tiny
from tests.memory.brute import WholeModel, cuda_plan

LAYERS = 6
DROPOUT = tiny.Adapter(4, 8, 0.1, "none", ("all-linear",))
# name: architecture, changes of its configuration, changes of the plan, whether one script serves every shape
CASES = {
    "llama, LoRA": ("llama", {}, dict(clip=1.0), True),
    "llama, NF4, dropout": ("llama", {}, dict(base_format="nf4", adapter=DROPOUT), True),
    "llama, full, fp32": ("llama", {}, dict(method="full", precision="fp32", attention="efficient"), True),
    "qwen3, tied, full": ("qwen3", dict(tie_word_embeddings=True), dict(method="full"), True),
    "gemma3, two kinds of layers": ("gemma3", {}, {}, True),
    "gemma2, attention in blocks": ("gemma2", {}, {}, False),
    "mixture of experts, NF4": ("qwen3_moe", dict(mlp_only_layers=[0, 3]), dict(base_format="nf4"), True),
    "deepseek": ("deepseek_v3", dict(first_k_dense_replace=3), {}, False),
    "gpt2, int8": ("gpt2", {}, dict(base_format="int8"), True),
    "phi3, full": ("phi3", {}, dict(method="full"), True),
    "smollm3, layers without rotation": ("smollm3", dict(no_rope_layers=[1, 1, 1, 0, 1, 1]), {}, True),
}  # fmt: skip
# (rows, columns, loss chunk), recomputed layers, micro-batches: two loss chunks, one, three with one row
RUNS = (((2, 64, 64), 2, 2), ((3, 90, 400), 0, 1), ((1, 290, 100), LAYERS, 1))


@functools.cache
def pair(case):
    name, changes, plan_changes, general = CASES[case]
    config = tiny.config_of(name, num_hidden_layers=LAYERS, **changes)
    plan = cuda_plan(config, **plan_changes)
    return Tracer(config, plan), WholeModel(config, plan), general


def told(events):
    """What two lists of one program have in common: sizes and owners in order, and which block it is that dies."""
    order = {}
    return [
        (order.setdefault(e.block, len(order)), e.num_bytes, e.owner) for e in events if e.part not in ("load", "start")
    ]


def first_difference(said, actual):
    for i, (a, b) in enumerate(zip(told(said), told(actual), strict=False)):
        if a != b:
            return i, a, b
    return len(said), len(actual), None


@pytest.mark.parametrize("case", CASES)
def test_spliced_equals_whole(case):
    tracer, whole, general = pair(case)
    if general:
        tracer.script()
    for shape, recompute, micro_batches in RUNS if general else RUNS[:2]:
        how = dict(recompute_layers=recompute, accumulates=micro_batches > 1, first_step=True)
        said, actual = tracer.step_events(*shape, **how), whole.step(*shape, recompute, micro_batches)
        assert told(said) == told(actual), (recompute, micro_batches, first_difference(said, actual))
    said, actual = tracer.eval_events(*shape), whole.evaluation(*shape)
    assert told(said) == told(actual), first_difference(said, actual)


def test_random_shapes_equal_fresh_traces():
    """The expressions, far from the shapes they were found at, and the terms that follow from them."""
    tracer, whole, _ = pair("llama, LoRA")
    generator = random.Random(0)
    for _ in range(3):
        rows, columns = generator.randint(1, 9), generator.randint(20, 400)
        chunk, recompute = generator.randint(16, 900), generator.randint(0, LAYERS)
        how = dict(recompute_layers=recompute, accumulates=False, first_step=False, most_chunks=None)
        said = tracer.step_events(rows, columns, chunk, **how)
        actual = whole.step(rows, columns, chunk, recompute)
        assert told(said) == told([e for e in actual if e.owner != "optimizer"]), (rows, columns, chunk, recompute)
        terms = tracer.terms(rows, columns, chunk)
        above = peaks(terms, recompute).step - peaks(terms, recompute).save
        peak = whole.peak([e for e in actual if e.owner != "optimizer"])
        hidden_bytes = rows * columns * 64 * 2
        assert 0 <= above - peak <= hidden_bytes, (rows, columns, chunk, recompute)


@pytest.mark.parametrize("case", ["llama, LoRA", "mixture of experts, NF4", "qwen3, tied, full"])
def test_the_head_of_the_list_is_what_the_model_holds(case):
    tracer, whole, _ = pair(case)
    how = dict(recompute_layers=LAYERS, accumulates=False)
    first = tracer.step_events(2, 64, 64, first_step=True, **how)
    later = tracer.step_events(2, 64, 64, first_step=False, **how)
    there = [e for e in first if e.part == "load"]
    assert sum(whole.rounded(e.num_bytes) for e in there) == whole.weight_bytes(64)
    assert len({e.block for e in there}) == len(there) and all(e.num_bytes > 0 for e in there)
    assert {e.owner for e in there} >= {"weights", "workspace"}
    made = [(e.num_bytes, e.label) for e in first if e.owner == "optimizer"]
    assert made == [(e.num_bytes, e.label) for e in later if e.owner == "optimizer" and e.part == "load"]
    assert sum(whole.rounded(n) for n, _ in made) > 2 * whole.gradient_bytes()
    dead = {e.block for e in first if e.num_bytes < 0}
    left = {e.owner for e in first if e.num_bytes > 0 and e.block not in dead}
    assert left <= {"weights", "adapters", "workspace", "optimizer"}, "all else goes within the step"


def test_owners_and_labels():
    tracer, _, _ = pair("llama, LoRA")
    events = tracer.step_events(2, 64, 64, recompute_layers=3, accumulates=False, first_step=True)
    births = [e for e in events if e.num_bytes > 0]
    labels = {(e.owner, e.part, e.label) for e in births}
    assert ("logits", "tail", "logits 64x256 bf16") in labels
    assert ("logits", "tail", "gradient of the logits 64x256 bf16") in labels
    assert ("gradients", "backward", "gradient of mlp.up_proj.lora_A 4x64 fp32") in labels
    assert ("inputs", "stash", "input of a recomputed layer 2x64x64 bf16") in labels
    assert ("adapters", "load", "model.layers.5.mlp.up_proj.lora_A") in labels
    assert ("optimizer", "optimizer", "second moment of model.layers.5.mlp.up_proj.lora_A") in labels
    saved = {e.layer for e in births if e.owner == "saved" and e.part == "forward"}
    assert saved == {3, 4, 5}, "recomputed layers save nothing but their input"
    assert sum(e.owner == "gradients" for e in births) == LAYERS * 14


def test_json():
    tracer, _, _ = pair("gemma3, two kinds of layers")
    script = tracer.script()
    text = script.to_json()
    again = Script.from_json(text)
    assert again == script and again.to_json() == text
    assert len(gzip.compress(text.encode())) < 15_000
    how = dict(recompute_layers=3, accumulates=True, first_step=True)
    assert again.step_events(3, 50, 64, **how) == script.step_events(3, 50, 64, **how)
    assert again.terms(3, 50, 64) == script.terms(3, 50, 64)
    with pytest.raises(ValueError, match="another version"):
        Script.from_json(text.replace('"version":', '"version":9'))


def test_a_program_whose_parts_depend_on_the_shape_has_a_script_per_shape():
    tracer, _, _ = pair("gemma2, attention in blocks")
    with pytest.raises(NotRegular, match="depends on the shape"):
        tracer.script()
    alone = tracer.script_at(1, 300, 64)
    assert alone.at == (1, 300, 64)
    with pytest.raises(ValueError, match="known at"):
        alone.terms(1, 301, 64)


def test_a_step_that_is_known_to_be_irregular_is_not_tried_again(monkeypatch):
    config = tiny.config_of("gemma2", num_hidden_layers=LAYERS)
    tracer = Tracer(config, cuda_plan(config), irregular=True)
    monkeypatch.setattr(_Builder, "general", None)
    with pytest.raises(NotRegular, match="an earlier trace"):
        tracer.script()


def test_chunks_in_the_middle_are_told_twice_at_most():
    """20 chunks of which 4 are told: the highest moment and what is left are the same."""
    tracer, whole, _ = pair("llama, LoRA")
    how = dict(recompute_layers=3, accumulates=True, first_step=True)
    few = tracer.step_events(4, 100, 20, **how)
    every = tracer.step_events(4, 100, 20, most_chunks=None, **how)
    assert len(few) < len(every) * 0.8
    assert whole.peak(few) == whole.peak(every)
    assert sum(e.num_bytes for e in few) == sum(e.num_bytes for e in every)
    assert [e for e in every if e.part != "tail"][-1].label == few[-1].label
    evaluation = tracer.eval_events(4, 100, 20), tracer.eval_events(4, 100, 20, None)
    assert whole.peak(evaluation[0]) == whole.peak(evaluation[1]) and len(evaluation[0]) < len(evaluation[1])


def test_a_long_row_is_followed_in_a_few_pieces_and_chunks(monkeypatch):
    """A tiled MLP of 16 pieces and 64 loss chunks, known at this shape only: the terms are those of all of them."""
    config = tiny.config_of("llama", num_hidden_layers=LAYERS)
    shape = (1, 1030, 16)

    def followed() -> tuple[Script, int]:
        script = Tracer(config, cuda_plan(config, mlp_tiles=16)).script_at(*shape)
        return script, len(script.step_events(*shape, recompute_layers=LAYERS, accumulates=True, first_step=True))

    few, num_few = followed()
    monkeypatch.setattr(tiled_mlp, "FOLLOWED_PIECES", 16)
    every, num_every = followed()
    assert num_few < num_every / 2
    spliced = few.terms(*shape)
    assert sum(len(codes) for codes in few._cache["sums", 3][0].values()) < num_few / 2
    monkeypatch.setattr(terms, "_MOST_CHUNKS", 100)
    assert spliced == every.terms(*shape)


def test_the_gradient_of_a_table_needs_room_for_its_pieces():
    """More than 3,072 tokens of a trained embedding: see `splice.embedding_scratch`."""
    tracer, _, _ = pair("qwen3, tied, full")
    script, how = tracer.script(), dict(recompute_layers=6, accumulates=False, first_step=False)
    label = "sums of the embedding's gradient"
    assert not any(e.label == label for e in script.step_events(3, 1024, 512, **how)), "3,072 tokens are not sorted"
    (birth, death) = [e for e in script.step_events(4, 1024, 512, **how) if e.label == label]
    assert birth.num_bytes == -death.num_bytes == (409 + 256) * 64 * 4 + 4096 * 49, "the vocabulary has 256 rows"
    assert (birth.part, birth.layer) == ("backward", -1)
    wide = splice.embedding_scratch(dataclasses.replace(script, granule=1, _cache={}), 4096)
    assert wide == 0, "on the CPU there is none"


def test_expressions():
    shapes = [(2, 71, 53), (3, 103, 113), (5, 331, 601)]
    values = [symbols(*shape, 7 + i) for i, shape in enumerate(shapes)]
    assert fit([12, 12, 12], values, False) == ((12, ""),)
    assert fit([64 * b * t for b, t, _ in shapes], values, False) == ((64, "N"),)
    assert fit([b * (t - 1) for b, t, _ in shapes], values, False) == ((1, "K"),)
    assert fit([4 * b * (-(-t // 128) * 128) for b, t, _ in shapes], values, False) == ((4, "BQ"),)
    assert {n: f for f, n in fit([3 * t + 5 for _, t, _ in shapes], values, False)} == {"T": 3, "": 5}
    assert fit([2 * (7 + i) for i in range(3)], values, True) == ((2, "X"),)
    with pytest.raises(NotRegular, match="no expression"):
        fit([2, 3, 7], values, False)
