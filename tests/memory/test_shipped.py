"""What ships of the catalog's models is what a fresh trace gives, byte for byte. To be made again after a change of the
step: `python scripts/build_traces.py`."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import zipfile

import pytest

from fitune.catalog import models
from fitune.errors import UserError
from fitune.memory import codec, known, shipped, trace
from fitune.memory.variant import for_any_rank, variant_of
from fitune.model import configs
from fitune.model.source import resolve
from fitune.plan import Adapter, Plan
from fitune.planner import choose
from fitune.planner.context import PlanContext, config_of, find_machine
from fitune.planner.target import choose_target
from fitune.recipe import Recipe
from tests import tiny

NUM_SAMPLES = 3
MOST_BYTES = 3_000_000
POPULAR = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-30B-A3B")


def members():
    with zipfile.ZipFile(shipped.ARCHIVE) as archive:
        return sorted(set(archive.namelist()) - {shipped.ABOUT})


def entries(member):
    with zipfile.ZipFile(shipped.ARCHIVE) as archive:
        return json.loads(archive.read(member))["entries"]


def plan_of(variant, rank, optimizer):
    """A plan of a variant's name."""
    values = json.loads(variant)
    adapter = values.pop("adapter")
    if adapter is not None:
        adapter = Adapter(adapter.get("r", rank), 32.0, 0.0, adapter["bias"], tuple(adapter["targets"]),
                          dora=adapter["dora"])  # fmt: skip
    values["clip"] = 1.0 if values["clip"] else 0.0
    return tiny.make_plan(**values | {"adapter": adapter, "optimizer": optimizer})


def samples():
    """Model, variant, rank, optimizer and shape, the same in every run."""
    chance = random.Random(20261130)
    found = []
    for member in chance.sample(members(), min(NUM_SAMPLES, len(members()))):
        variant = chance.choice(sorted(entries(member)))
        rank, optimizer = chance.choice((4, 8, 16, 64)), chance.choice(("adamw", "adamw8bit", "adafactor"))
        shape = (chance.randint(1, 9), chance.randint(8, 4096), chance.choice((64, 200, 512)))
        found.append((member.removesuffix(".json"), variant, rank, optimizer, shape))
    return found


def alike(events, rank):
    """A product of an adapter's width has another name where its scale, which depends on the rank, is a power of
    two."""
    product = re.compile(rf"matrix product (?=\d+x{rank} \w+$)")
    return [dataclasses.replace(event, label=product.sub("result ", event.label)) for event in events]


@pytest.mark.parametrize("number", range(NUM_SAMPLES))
def test_a_sample_against_fresh_traces(number):
    name, variant, rank, optimizer, shape = samples()[number]
    plan = plan_of(variant, rank, optimizer)
    config = shipped.catalog_config(name)
    entry = shipped.find(config, plan)
    assert entry is not None
    if entry.script is None and entry.terms:
        shape = tuple(int(n) for n in min(entry.terms).split(","))
    made = known.Known(config, plan, entry).terms(*shape)
    fresh = trace.Tracer(config.full(), plan)
    assert json.dumps(codec.encode(made)) == json.dumps(codec.encode(fresh.terms(*shape))), (name, variant)
    if entry.script is not None:
        how = dict(recompute_layers=plan.num_layers // 2, accumulates=True, first_step=True)
        few = (shape[0], min(shape[1], 64), shape[2])
        shipping, real = (source.step_events(*few, **how) for source in (known.Known(config, plan, entry), fresh))
        assert alike(shipping, rank) == alike(real, rank)


def test_a_change_of_what_ships_would_be_noticed():
    """One number in the script of an 8B model: the terms are others."""
    name, plan = POPULAR[0], plan_of(next(v for v in entries(f"{POPULAR[0]}.json") if "lora" in v), 16, "adamw")
    config = shipped.catalog_config(name)
    entry = shipped.find(config, plan)
    broken = dataclasses.replace(entry, script=entry.script.replace("14336", "14337", 1))
    assert known.Known(config, plan, entry).terms(1, 512, 64) != known.Known(config, plan, broken).terms(1, 512, 64)


def test_what_is_in_the_archive():
    known_names = {shipped.member_of(shape) for shape in models.all_models()}
    assert {f"{name}.json" for name in POPULAR} <= known_names == set(members()), "built with --only some?"
    assert shipped.ARCHIVE.stat().st_size <= MOST_BYTES
    about = shipped.about()
    assert set(about) == {"format", "versions", "date", "code"} and set(about["versions"]) == {"torch", "transformers"}


@pytest.mark.parametrize("gpu", ["rtx3090", "t4"])
def test_the_usual_jobs_ship(gpu):
    """What the planner drafts for a card is found under the name that it has in the archive."""
    for name in POPULAR:
        config = shipped.catalog_config(name)
        for job in (dict(method="lora"), dict(method="qlora"), dict(method="lora", lora_r=64, optimizer="adamw8bit")):
            recipe = Recipe(model=name, gpu=gpu, **job)
            target = choose_target(recipe, find_machine(recipe, []))
            context = PlanContext(recipe, target, config, recipe.seq_len)
            assert shipped.find(config, choose.draft_of(context, choose.base_formats(context)[0])) is not None


def test_what_does_not_ship_is_none():
    config = shipped.catalog_config(POPULAR[0])
    plan = plan_of(next(iter(entries(f"{POPULAR[0]}.json"))), 16, "adamw")
    dora = plan.with_(method="lora", adapter=Adapter(16, 32, 0.0, "none", ("all-linear",), dora=True))
    assert shipped.find(config, dora) is None
    assert shipped.catalog_config("nobody/nothing") is None


def test_without_the_archive_nothing_ships(tmp_path):
    absent, other = tmp_path / "none.zip", tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr(shipped.ABOUT, json.dumps({"format": shipped.FORMAT + 1}))
        archive.writestr(f"{POPULAR[0]}.json", "{}")
    for archive in (absent, other):
        assert shipped.catalog_config(POPULAR[0], archive) is None
    assert shipped.about(absent) == {}


@pytest.mark.parametrize("name", [POPULAR[0], POPULAR[2], "smollm2"])
def test_a_configuration_says_what_the_transformers_one_says(name):
    light = shipped.catalog_config(name)
    real = configs.from_shape(models.find(name)).config
    for attribute in (
        "num_hidden_layers", "vocab_size", "hidden_size", "tie_word_embeddings", "max_position_embeddings",
        "rope_parameters", "model_type", "num_attention_heads",
    ):  # fmt: skip
        assert getattr(light, attribute) == getattr(real, attribute)
    for absent in ("mlp_layer_types", "n_positions", "no_such_thing"):
        assert getattr(light, absent, None) == getattr(real, absent, None)
    assert known.abilities(light) == known.abilities(real)
    assert light.full().to_dict() == real.to_dict()
    with pytest.raises(AttributeError, match="has no no_such_thing"):
        _ = light.no_such_thing


@pytest.mark.parametrize(
    "name", [POPULAR[0], "llama-3.1-8b", f"random:{POPULAR[2]}", "smollm2", "unsloth/Llama-3.1-8B"]
)
def test_the_planner_finds_what_the_models_floor_finds(name):
    notes = []
    light = config_of(Recipe(model=name), notes)
    source = resolve(name, weights=False)
    assert isinstance(light, shipped.CatalogConfig)
    assert notes == list(source.notes) and light.hidden_size == source.config.hidden_size


def test_a_folder_of_that_name_and_scaled_positions_are_not_the_catalogs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(UserError, match="smollm2 is not a model folder"):
        config_of(Recipe(model="smollm2"), [])
    scaled = config_of(Recipe(model=POPULAR[0], rope_scaling={"type": "yarn", "factor": 2}), [])
    assert not isinstance(scaled, shipped.CatalogConfig) and scaled.rope_parameters["rope_type"] == "yarn"


def test_names_of_variants_are_those_of_plans():
    for variant in entries(f"{POPULAR[0]}.json"):
        plan = plan_of(variant, 16, "adamw")
        assert isinstance(plan, Plan) and variant in (variant_of(plan), for_any_rank(variant_of(plan)))
