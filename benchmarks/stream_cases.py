"""The cases of `stream.py`: what each runs, what it is for, and how a case becomes a plan.

A case's recipe is a person's; its `changes` are fields of the plan that a recipe does not have (where weights wait, in
which order micro-batches pass). `chosen` cases have no changes: the planner decides, within `vram`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from bench import LLAMA_8B

RING = dict(stream_from="pinned", resident_layers=0, ring_buffers=2)
LEAN = dict(**RING, head_place="host", embedding_place="host", offload_inputs=True, loss_chunk=1024)
LEANEST = LEAN | dict(mlp_tiles=4, loss_chunk=512)
MAJOR = dict(accumulation_order="layer-major")
# masters and state of adapters in host memory, updated there
LEAN_HOST = LEAN | dict(optimizer_place="host")
LEAST = LEAN_HOST | dict(mlp_tiles=2)
FULL_RING = dict(**RING, **MAJOR, offload_inputs=True, loss_chunk=256)

_ALL = dict(recompute="all")
_8B = dict(model=LLAMA_8B, method="qlora", seq_len=2048, **_ALL)
_70B = _8B | dict(model="random:meta-llama/Llama-3.1-70B", batch=1, seq_len=4096)
_BF16 = _8B | dict(method="lora", base_format="bf16")
# full fine-tuning: 16 micro-batches of 2,048 tokens pass a layer together
_FULL = _8B | dict(method="full", batch=16, micro_batch=1, optimizer="adamw8bit")
FULL_3B = _FULL | dict(model="random:meta-llama/Llama-3.2-3B", optimizer="adamw")
_LONG = _8B | dict(batch=1, optimizer="adamw8bit")
_MOE = _8B | dict(model="random:Qwen/Qwen3-30B-A3B", batch=1)
_ATTENTION = dict(lora_targets=["q_proj", "k_proj", "v_proj", "o_proj"])
_EXPERTS = dict(lora_targets=["q_proj", "k_proj", "v_proj", "o_proj", "experts"])
_GPT_OSS = _8B | dict(model="random:openai/gpt-oss-120b", batch=1, vram=24, **_ATTENTION)
_1x = "8b-nf4-1x2048-resident"
_4x = "8b-nf4-4x2048-resident"


@dataclass(frozen=True)
class Case:
    """One measured configuration.

    Attributes:
        why: what it is for, and where it belongs to an acceptance what is asked of it.
        recipe, changes: see the module.
        acceptance: number of the acceptance it belongs to; 0: beside them.
        against: the resident case that its speed is compared with.
        link_bytes_per_s: copies are made as slow as on such a link.
        layers: so many decoder layers of the shape (None: all).
        steps, turns: so many optimizer steps, alone and by turns (None: as asked for on the command line).
        evaluates: whether an evaluation is measured too.
        chosen: the planner chooses everything that the recipe leaves open.
        ram_bytes: host memory that is left for the process.
        killed: a run that is killed in the middle of a step and resumed (`stream_killed.py`).
        long: not among those that run in a few minutes.
    """

    why: str
    recipe: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    acceptance: int = 0
    against: str | None = None
    link_bytes_per_s: float | None = None
    layers: int | None = None
    steps: int | None = None
    turns: int | None = None
    evaluates: bool = True
    chosen: bool = False
    ram_bytes: int | None = None
    killed: bool = False
    long: bool = False


# "equality*" cases are functions of `stream_equal.py`.
EQUALITIES = {
    "equality": "1: Llama-3.1-8B layers, every way of streaming against resident: bit for bit",
    "equality-qwen3": "1: the same for Qwen3-8B layers",
    "equality-gemma3": "1: the same for Gemma-3-4B layers",
    "equality-moe": "1: the same for Qwen3-30B-A3B layers (grouped products: within two runs' own noise)",
    "equality-full": "6: masters after three updates in host memory against on the device (fp32 and 8-bit state)",
}

CASES: dict[str, Case] = {
    # -- 2: NF4, one micro-batch and four ------------------------------------------------------------------------------
    _1x: Case("resident, what others are compared with", _8B | dict(batch=1)),
    "8b-nf4-1x2048-ring": Case("layers streamed, all else on the card", _8B | dict(batch=1), RING, 2, _1x),
    "8b-nf4-1x2048-lean": Case(
        ">= 90 % of resident in <= 2 GiB at one micro-batch", _8B | dict(batch=1), LEAN, 2, _1x),
    "8b-nf4-1x2048-leanest": Case(
        "tiled MLP, 8-bit state", _8B | dict(batch=1, optimizer="adamw8bit"), LEANEST, 2, _1x),
    "8b-nf4-1x2048-lean-host": Case(
        "<= 0.9 GiB while it trains at >= 75 % of resident: masters and state in RAM", _8B | dict(batch=1), LEAN_HOST,
        2, _1x),
    "8b-nf4-1x2048-least": Case("the same with the MLP in halves", _8B | dict(batch=1), LEAST, 2, _1x),
    _4x: Case("resident, what others are compared with", _8B | dict(batch=4)),
    "8b-nf4-4x2048-lean-host": Case(
        "8,192 tokens a step: >= 95 % of resident in <= 2 GiB; each layer's weights once for all rows, which one "
        "micro-batch holds", _8B | dict(batch=4), LEAN_HOST, 2, _4x),
    "8b-nf4-4x2048-major-least": Case(
        "the same with the MLP in halves", _8B | dict(batch=4), LEAST | MAJOR, 2, _4x),
    "8b-nf4-4x2048-by-2-major-lean": Case(
        "the same as two micro-batches, layer by layer", _8B | dict(batch=4, micro_batch=2), LEAN | MAJOR, 2, _4x),
    # -- 3: bf16 -------------------------------------------------------------------------------------------------------
    "8b-bf16-4x2048-chosen-cap10": Case(
        "10 GiB cap of the process, planned: >= 100 % of NF4-resident",
        _BF16 | dict(batch=4, vram=10, recompute="auto"), {}, 3, _4x, chosen=True),
    "8b-bf16-4x2048-lean-cap4": Case(
        "4 GiB cap of the process: >= 95 % of NF4-resident", _BF16 | dict(batch=4, vram=4), LEAN, 3, _4x),
    "8b-bf16-4x2048-major-least-cap4": Case(
        "the same with the MLP in halves, masters in RAM", _BF16 | dict(batch=4, vram=4), LEAST | MAJOR, 3, _4x),
    "8b-bf16-1x2048-least": Case(
        "smallest peak <= 1.5 GiB", _BF16 | dict(batch=1), LEAST, 3, _1x),
    # -- 4: 70B and 32B ------------------------------------------------------------------------------------------------
    "70b-nf4-2-layers-resident": Case("two resident layers, head and update", _70B, {}, 4, layers=2),
    "70b-nf4-10-layers-resident": Case(
        "ten: their difference is what eight layers take, which gives the compute-bound rate of 80", _70B, {}, 4,
        layers=10),
    "70b-nf4-1x4096-least": Case(
        "<= 3 GiB at >= 90 % of the compute-bound rate", _70B, LEAST, 4, steps=5, evaluates=False),
    "32b-bf16-1x4096-ram": Case(
        "16-bit 32B from RAM (66 GB): recorded", _BF16 | dict(model="random:Qwen/Qwen2.5-32B", batch=1, seq_len=4096),
        LEAN, 4, steps=3, evaluates=False),
    # -- 5: mixtures of experts ----------------------------------------------------------------------------------------
    "qwen3-30b-a3b-nf4-1x2048-attention": Case("LoRA on attention: <= 4 GiB", _MOE | _ATTENTION, LEAN, 5, steps=3),
    "qwen3-30b-a3b-nf4-1x2048-experts": Case(
        "LoRA on the experts, masters and state in RAM: recorded", _MOE | _EXPERTS,
        LEAN_HOST, 5, steps=3, evaluates=False),
    "gpt-oss-120b-nf4-1x2048-cap24": Case(
        "4-bit (about 63 GB of RAM) under a 24 GiB cap: recorded", _GPT_OSS, LEAN, 5, steps=3, evaluates=False),
    # -- 6: full fine-tuning -------------------------------------------------------------------------------------------
    "8b-full-16x2048-resident": Case("resident, what others are compared with", _FULL),
    "8b-full-16x2048-streamed-8bit": Case(
        "<= 6 GiB, <= 100 GiB of RAM, >= 60 % of resident at 32k tokens a step", _FULL,
        FULL_RING | dict(optimizer_place="streamed"), 6, "8b-full-16x2048-resident", steps=3, turns=1),
    "3b-full-16x2048-resident": Case("resident, fp32 state", FULL_3B),
    "3b-full-16x2048-host-fp32": Case(
        "fp32 state updated on the CPU", FULL_3B, FULL_RING | dict(optimizer_place="host"), 6,
        "3b-full-16x2048-resident", steps=3, turns=1),
    "3b-full-16x2048-streamed-fp32": Case(
        "fp32 state updated on the GPU", FULL_3B, FULL_RING | dict(optimizer_place="streamed"), 6,
        "3b-full-16x2048-resident", steps=3, turns=1),
    # -- 7: long sequences ---------------------------------------------------------------------------------------------
    "8b-nf4-1x65536-cap8": Case(
        "65,536 tokens under an 8 GiB cap", _LONG | dict(seq_len=65536, vram=8), LEANEST | dict(mlp_tiles=32), 7,
        steps=1, evaluates=False),
    "8b-nf4-1x65536-chosen-cap8": Case(
        "the same as the planner would do it", _LONG | dict(seq_len=65536, vram=8, recompute="auto"), {}, 7, steps=1,
        evaluates=False, chosen=True),
    "8b-nf4-1x204800-cap24-4-layers": Case(
        "200K tokens under a 24 GiB cap: 4 of 32 layers (on the card the others would add their adapters only)",
        _LONG | dict(seq_len=204800, vram=24, rope_scaling={"type": "llama3", "factor": 16.0}),
        LEANEST | dict(mlp_tiles=128, loss_chunk=256), 7, layers=4, steps=1, evaluates=False),
    # -- 8: a slow link ------------------------------------------------------------------------------------------------
    "8b-nf4-1x2048-ring-12gb-s": Case(
        "12 GB/s: within 10 % of the prediction", _8B | dict(batch=1), RING, 8, _1x, 12e9),
    "8b-nf4-1x2048-ring-25gb-s": Case(
        "25 GB/s: within 10 % of the prediction", _8B | dict(batch=1), RING, 8, _1x, 25e9),
    "8b-bf16-4x2048-ring-12gb-s": Case(
        "12 GB/s, 16 bits: within 10 % of the prediction", _BF16 | dict(batch=4), RING, 8, _4x, 12e9),
    "8b-bf16-4x2048-ring-25gb-s": Case(
        "25 GB/s, 16 bits: within 10 % of the prediction", _BF16 | dict(batch=4), RING, 8, _4x, 25e9),
    # -- 9: the disk tier ----------------------------------------------------------------------------------------------
    "8b-bf16-1x2048-disk-ram8": Case(
        "16-bit 8B from disk with 8 GiB of RAM left: trains", _BF16 | dict(batch=1),
        LEAN | dict(stream_from="disk"), 9, steps=3, evaluates=False, ram_bytes=8 * 2**30),
    "8b-bf16-1x2048-disk-ram8-killed": Case(
        "the same, killed in mid-step: goes on with the same bits", _BF16 | dict(batch=1),
        LEAN | dict(stream_from="disk"), 9, ram_bytes=8 * 2**30, killed=True),
}  # fmt: skip

# Further ones, and those that take minutes.
CASES |= {
    "8b-nf4-1x204800-cap24": Case(
        "200K tokens under a 24 GiB cap, whole: one step takes minutes",
        _LONG | dict(seq_len=204800, vram=24, rope_scaling={"type": "llama3", "factor": 16.0}),
        LEANEST | dict(mlp_tiles=128, loss_chunk=256), 7, steps=1, evaluates=False, long=True),
    "3b-full-16x2048-host-fp32-unclipped": Case(
        "updates beside the backward pass", FULL_3B | dict(clip=0), FULL_RING | dict(optimizer_place="host"), 6,
        "3b-full-16x2048-resident", long=True),
    "8b-nf4-1x2048-least-streamed-8bit": Case(
        "adapters updated on the GPU, 8-bit state in RAM", _8B | dict(batch=1, optimizer="adamw8bit"),
        LEAST | dict(optimizer_place="streamed"), 2, _1x, long=True),
    "8b-nf4-1x2048-ring-3": Case("three buffers", _8B | dict(batch=1), RING | dict(ring_buffers=3), 0, _1x, long=True),
    "8b-nf4-1x2048-half-resident": Case(
        "half of the layers stay", _8B | dict(batch=1), RING | dict(resident_layers=16), 0, _1x, long=True),
    "8b-nf4-1x2048-pageable": Case(
        "from memory that is not pinned", _8B | dict(batch=1), RING | dict(stream_from="pageable"), 0, _1x, long=True),
    "8b-nf4-1x2048-disk": Case(
        "from disk, no cap", _8B | dict(batch=1), RING | dict(stream_from="disk"), 9, _1x, long=True),
    "8b-nf4-1x2048-ring-keep": Case(
        "nothing recomputed", _8B | dict(batch=1, recompute="none"), RING, 0, _1x, long=True),
    "8b-nf4-4x2048-ring": Case("four rows at once", _8B | dict(batch=4), RING, 2, _4x, long=True),
    "8b-nf4-4x2048-by-1-ring": Case("one by one", _8B | dict(batch=4, micro_batch=1), RING, 2, _4x, long=True),
    "8b-bf16-4x2048-ring": Case("16 bits", _BF16 | dict(batch=4), RING, 3, _4x, long=True),
    "8b-bf16-4x2048-by-2-major-lean-cap4": Case(
        "the same as two micro-batches", _BF16 | dict(batch=4, micro_batch=2, vram=4), LEAN | MAJOR, 3, _4x, long=True),
    "8b-bf16-4x2048-by-1-major-lean": Case(
        "16 bits, layer by layer, no cap", _BF16 | dict(batch=4, micro_batch=1), LEAN | MAJOR, 3, _4x, long=True),
}  # fmt: skip

# Sizes of a shape that runs on a CPU in a second; what a configuration does not have is left out.
_TINY = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             vocab_size=512, moe_intermediate_size=64, num_experts=8, num_local_experts=8, num_experts_per_tok=2,
             sliding_window=16, query_pre_attn_scalar=16)  # fmt: skip
_TINY_LAYERS, _TINY_COLUMNS = 4, 64


def config_of(model: str, layers: int | None, tiny: bool) -> Any:
    """A configuration other than the catalog's, or None."""
    if layers is None and not tiny:
        return None
    from fitune.model.source import resolve

    config = resolve(model, weights=True).config
    shorten(config, min(layers or _TINY_LAYERS, _TINY_LAYERS) if tiny else layers or config.num_hidden_layers)
    if tiny:
        for name, size in _TINY.items():
            if getattr(config, name, None) is not None:
                setattr(config, name, size)
    return config


def shorten(config: Any, layers: int) -> None:
    """Keep so many decoder layers."""
    for name, value in config.to_dict().items():
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == config.num_hidden_layers:
            setattr(config, name, list(value)[:layers])
    config.num_hidden_layers = layers


def on_cpu(case: Case) -> Case:
    """The case at tiny sizes: a few tokens, no cap."""
    values = {name: value for name, value in case.recipe.items() if name not in ("vram", "rope_scaling")}
    values["seq_len"] = _TINY_COLUMNS
    changes = case.changes | ({"loss_chunk": 32} if "loss_chunk" in case.changes else {})
    if "mlp_tiles" in changes:
        changes["mlp_tiles"] = min(4, changes["mlp_tiles"])
    return dataclasses.replace(case, recipe=values | dict(gpu="h200"), changes=changes, steps=None, turns=None,
                               ram_bytes=None)  # fmt: skip


def planned(case: Case, config: Any) -> tuple[Any, Any, Any]:
    """(recipe, context, plan) of a case: the planner's own, or the recipe as given with the case's changes."""
    from fitune import recipe as recipes
    from fitune.planner import choose, make_plan
    from fitune.planner.context import open_context

    recipe = recipes.build(dict(case.recipe))
    context = open_context(recipe, config=config)
    if case.chosen:
        result = make_plan(recipe, context.machine, config=config, detailed=True)
        assert result.fits, "the planner finds no plan"
        return recipe, context, result.plan.with_(predicted={}, reasons=())
    draft = choose.draft_of(context, choose.base_formats(context)[0])
    layers = choose.search(context, draft).recompute or 0
    plan = draft.with_(micro_batch=recipe.micro_batch or recipe.batch, recompute_layers=layers)
    return recipe, context, plan.with_(**case.changes)


def expected(case: Case) -> str:
    """What a case is predicted to need on an NVIDIA H200, whatever is in this machine; its step is traced, which takes
    up to a minute."""
    from fitune.planner.phases import phases_of
    from fitune.units import format_bytes

    _, context, plan = planned(on_h200(case), config_of(case.recipe["model"], case.layers, tiny=False))
    said = phases_of(context, plan).as_dict()
    sizes = {"peak": "peak_allocated_bytes", "device": "device_bytes", "RAM": "host_bytes", "pinned": "pinned_bytes"}
    return "predicted: " + ", ".join(f"{name} {format_bytes(said[field] or 0)}" for name, field in sizes.items())


def on_h200(case: Case) -> Case:
    """The case as an NVIDIA H200 would run it, whatever is in this machine."""
    return dataclasses.replace(case, recipe=case.recipe | dict(gpu="h200"))


def opened(case: Case, tiny: bool) -> tuple[Any, Any, Any, Any]:
    """(recipe, context, plan, source) of a case; the plan's device is the CPU where it is tiny."""
    from fitune.model.source import resolve
    from fitune.train.device import prepare

    config = config_of(case.recipe["model"], case.layers, tiny)
    recipe, context, plan = planned(case, config)
    source = resolve(recipe.model, weights=True)
    if config is not None:
        source = dataclasses.replace(source, config=config)
    if not tiny:
        prepare(plan, 0)
    return recipe, context, plan, source


def here(plan: Any, tiny: bool) -> Any:
    """The plan as it is run."""
    return plan.with_(device="cpu", device_name="CPU", attention="cpu", budget_bytes=None) if tiny else plan
