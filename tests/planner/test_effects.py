"""What each technique saves in a job: predicted by taking it away or adding it, or by its formula."""

from __future__ import annotations

import pytest

from fitune import recipe as recipes
from fitune.memory.phases import needed_bytes
from fitune.planner import choose, effects, phases, techniques_list
from fitune.planner.context import open_context

GIB = 2**30
MODEL = "meta-llama/Llama-3.1-8B"


def found(changes, **values):
    """Context, a plan with these fields whatever the planner would choose today, and its effects."""
    recipe = recipes.build({"model": MODEL, **values})
    context = open_context(recipe)
    draft = choose.draft_of(context, choose.base_formats(context)[0])
    plan = draft.with_(micro_batch=1, **changes)
    return context, plan, {e.technique.key: e for e in effects.effects(context, plan)}


@pytest.fixture(scope="module")
def tight():
    """An nf4 base on a card of 10 GiB: most techniques are needed."""
    return found(dict(recompute_layers=21, loss_chunk=256), gpu="rtx3080", method="qlora")


@pytest.fixture(scope="module")
def wide():
    """A 16-bit base on a card with room."""
    return found(dict(recompute_layers=7, loss_chunk=256), gpu="rtx4090", method="lora")


def test_every_technique_has_a_rule():
    assert effects._RULES.keys() == techniques_list.BY_KEY.keys()


def test_those_in_use_are_marked_and_come_first(tight):
    _, plan, got = tight
    used = {key for key, effect in got.items() if effect.used}
    assert used == {"qlora", "nf4", "double_quant", "bf16", "accumulation", "checkpointing", "flash_attention",
                    "chunked_loss", "host_embedding"}  # fmt: skip
    assert [effect.used for effect in got.values()] == sorted((e.used for e in got.values()), reverse=True)
    assert plan.base_format == "nf4" and "lora" not in got


def test_savings_are_predictions_of_the_other_plan(tight):
    context, plan, got = tight

    def needs(**changes):
        return needed_bytes(phases.phases_of(context, plan.with_(**changes), briefly=True).most)

    now = needs()
    for key, changes in (
        ("nf4", {"base_format": "bf16"}),
        ("checkpointing", {"recompute_layers": 0}),
        ("accumulation", {"micro_batch": 8}),
        ("chunked_loss", {"loss_chunk": 2048}),
    ):
        assert (got[key].saves_bytes, got[key].basis) == (needs(**changes) - now, "predicted"), key
    assert got["adam8bit"].saves_bytes == now - needs(optimizer="adamw8bit")


def test_sizes_by_hand(tight):
    """Llama-3.1-8B: 6.98 billion weights in its layers, a table of 128,256 x 4,096, 42 million adapter parameters."""
    _, plan, got = tight
    layers, table, adapters = 32 * 218.1e6, 128256 * 4096, 41.94e6
    # 16 bits less 4.13 bits a weight; an unpacked one's working copy goes too
    assert got["nf4"].saves_bytes == pytest.approx(layers * (2 - 4.13 / 8), rel=0.05)
    assert got["double_quant"].saves_bytes == pytest.approx(layers * (0.0625 - 0.01587), rel=0.02)
    assert got["host_embedding"].saves_bytes == 2 * table
    assert got["lion"].saves_bytes == pytest.approx(4 * adapters, rel=0.06)
    assert got["flash_attention"].saves_bytes == 2048**2 * 32 * (8 + 2 * (32 - plan.recompute_layers))
    assert got["chunked_loss"].saves_bytes == pytest.approx(8 * 128256 * (2048 - plan.loss_chunk), rel=0.4)
    assert got["zero1"].num_gpus == 2
    assert got["zero1"].saves_bytes == pytest.approx(8 * adapters / 2, rel=0.01)
    assert got["zero2"].saves_bytes == pytest.approx(12 * adapters / 2, rel=0.01)
    assert got["zero1"].saves_bytes < got["zero2"].saves_bytes < got["fsdp"].saves_bytes


def test_a_wide_base_uses_lora_and_could_be_quantised(wide):
    _, plan, got = wide
    assert plan.base_format == "bf16" and got["lora"].used and not got["nf4"].used and "double_quant" not in got
    # full fine-tuning: 16 bytes more for each of 8.03 billion parameters and a table on the card, less the adapters'
    assert got["lora"].saves_bytes == pytest.approx(16 * 8.03e9, rel=0.08)
    assert got["nf4"].saves_bytes > got["int8"].saves_bytes > 5 * GIB


def test_streaming_by_its_formula(tight):
    """Of 32 layers 30 wait in RAM but for two buffers' worth: 28 of them are saved, in nf4 at 4.13 bits a weight."""
    context, plan, _ = tight
    streamed = plan.with_(stream_from="pinned", resident_layers=2)
    job = effects._Job(context, streamed)
    used, saved = effects._streaming(job)
    assert used and saved == pytest.approx(32 * 218.1e6 * 4.13 / 8 * 28 / 32, rel=0.25)
    assert job.held_params == pytest.approx(4 * 218.1e6, rel=0.01)


KEYS = {"zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "tp": "tensor_parallel", "pp": "pipeline_parallel",
        "fsdp2": "fsdp", "cp": "context_parallel"}  # fmt: skip


@pytest.mark.parametrize(("way", "key"), KEYS.items())
def test_a_way_of_several_gpus_is_used_where_the_plan_has_it(wide, way, key):
    context, plan, got = wide
    assert not got[key].used
    job = effects._Job(context, plan.with_(parallel=way, world_size=2))
    used, saved = effects._RULES[key](job)
    assert used and saved and saved >= got[key].saves_bytes


def test_a_way_that_cannot_do_the_job_is_not_shown(tight):
    """DeepSpeed cuts no packed weights; 32 heads go among 2 GPUs and not among 3."""
    context, plan, got = tight
    assert "zero3" not in got and "zero2" in got and "tensor_parallel" in got
    three = effects._Job(context, plan.with_(parallel="ddp", world_size=3))
    assert effects._RULES["tensor_parallel"](three) == (False, None)


def test_json(tight):
    values = [effect.as_dict() for effect in tight[2].values()]
    assert {"technique", "used", "saves_bytes", "basis", "exact", "setting", "source"} <= values[0].keys()
    assert {value["basis"] for value in values} == {"predicted", "formula"}
