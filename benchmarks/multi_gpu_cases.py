"""The cases of `multi_gpu.py`: what each runs, what it is for, and how a case becomes a plan and a prediction.

A case's recipe is a person's; its `changes` are fields of the plan that a recipe does not have (where weights wait, how
the head is cut). Eight thousand tokens per GPU and step where it is not said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench import LLAMA_8B

_8B = dict(model=LLAMA_8B, seq_len=2048, recompute="all", micro_batch=4)
_BF16, _NF4, _FULL = _8B | dict(method="lora"), _8B | dict(method="qlora"), _8B | dict(method="full")
_70B = dict(model="random:meta-llama/Llama-3.1-70B", method="qlora", seq_len=2048, recompute="all", micro_batch=2)
_FULL_3B = _FULL | dict(model="random:meta-llama/Llama-3.2-3B")
_LONG = _NF4 | dict(seq_len=32768, micro_batch=1)
LEAN = dict(stream_from="pinned", resident_layers=0, ring_buffers=2, head_place="host", embedding_place="host",
            offload_inputs=True, loss_chunk=1024)  # fmt: skip
SHARDS = dict(stream_from="shards", resident_layers=0, ring_buffers=2, embedding_place="host")
_ON_DEVICE = dict(embedding_place="device")
_TRAINED_HEAD = dict(embedding_place="device", loss_chunk=256)


@dataclass(frozen=True)
class Case:
    """One measured configuration.

    Attributes:
        why: what it is for.
        way: how the GPUs share the work, a plan's `parallel`.
        recipe, changes: see the module.
        batch: each rank's share of a step's records.
        ranks: 0 means all GPUs.
        against: the case on one GPU, with as many tokens per GPU, that its speed is compared with.
        cap_gib: limit of each process.
        alone: a group of one process on one GPU, beside the plain way: what the way itself costs.
    """

    why: str
    way: str
    recipe: dict[str, Any]
    batch: int
    changes: dict[str, Any] = field(default_factory=dict)
    ranks: int = 0
    against: str = ""
    cap_gib: float | None = None
    alone: bool = False


CASES: dict[str, Case] = {
    # -- each GPU has all weights ---------------------------------------------------------------------------------
    "8b-bf16-one": Case("one GPU, what others are compared with", "none", _BF16, 4, ranks=1),
    "8b-bf16-ddp": Case("other records on each GPU", "ddp", _BF16, 4, against="8b-bf16-one"),
    "8b-nf4-one": Case("one GPU, what others are compared with", "none", _NF4, 4, ranks=1),
    "8b-nf4-ddp": Case("other records on each GPU", "ddp", _NF4, 4, against="8b-nf4-one"),
    # -- each GPU streams all weights from one copy ---------------------------------------------------------------
    "8b-bf16-streamed-one": Case("one GPU, streamed", "none", _BF16, 4, LEAN, ranks=1),
    "8b-bf16-streamed": Case(
        "the GPUs stream one copy in RAM", "streamed", _BF16, 4, LEAN, against="8b-bf16-streamed-one"),
    "8b-nf4-streamed-one": Case("one GPU, streamed", "none", _NF4, 4, LEAN, ranks=1),
    "8b-nf4-streamed": Case(
        "the GPUs stream one copy in RAM", "streamed", _NF4, 4, LEAN, against="8b-nf4-streamed-one"),
    # -- each GPU has parts of the weights ------------------------------------------------------------------------
    "8b-full-fsdp2": Case("all weights trained, in shards", "fsdp2", _FULL, 4, SHARDS | _TRAINED_HEAD),
    "8b-bf16-tp": Case("layers split", "tp", _BF16, 4, _ON_DEVICE, against="8b-bf16-one"),
    "8b-nf4-tp": Case("layers split, packed weights", "tp", _NF4, 4, _ON_DEVICE, against="8b-nf4-one"),
    "8b-full-tp": Case("layers split, all weights trained", "tp", _FULL, 4, _TRAINED_HEAD),
    # -- each GPU has parts of the rows ---------------------------------------------------------------------------
    "8b-bf16-cp": Case("rows of 2,048 tokens cut into slices", "cp", _BF16, 4, against="8b-bf16-one"),
    "8b-nf4-32k-one": Case("one GPU, a row of 32,768 tokens", "none", _LONG, 1, ranks=1),
    "8b-nf4-32k-cp": Case(
        "rows of 32,768 tokens cut into slices: activations of one GPU's shrink", "cp", _LONG, 1,
        against="8b-nf4-32k-one"),
    "8b-nf4-64k-cp-streamed-24gib": Case(
        "rows of 65,536 tokens on cards of 24 GiB, weights streamed from one copy", "cp",
        _LONG | dict(seq_len=65536), 1, LEAN | dict(loss_chunk=512, mlp_tiles=8), cap_gib=24),
    # -- 70B ------------------------------------------------------------------------------------------------------
    "70b-nf4-one": Case(
        "one GPU, what others are compared with", "none", _70B, 2, dict(embedding_place="host", head_place="host"),
        ranks=1),
    "70b-nf4-fsdp2": Case("in shards", "fsdp2", _70B, 2, SHARDS | dict(head_place="host"), against="70b-nf4-one"),
    "70b-nf4-tp": Case("layers split", "tp", _70B, 2, _ON_DEVICE, against="70b-nf4-one"),
    "70b-nf4-streamed-24gib": Case(
        "on cards of 24 GiB", "streamed", _70B, 2, LEAN | dict(loss_chunk=512, mlp_tiles=4), cap_gib=24),
    # -- a group of one: one GPU is enough ------------------------------------------------------------------------
    "8b-nf4-fsdp2-alone": Case(
        "one process in a group", "fsdp2", _NF4, 4, SHARDS, 1, "8b-nf4-one", alone=True),
    "8b-nf4-streamed-alone": Case(
        "one process in a group", "streamed", _NF4, 4, LEAN, 1, "8b-nf4-streamed-one", alone=True),
    "8b-bf16-fsdp2-alone": Case(
        "one process in a group", "fsdp2", _BF16, 4, SHARDS, 1, "8b-bf16-one", alone=True),
    "8b-bf16-streamed-alone": Case(
        "one process in a group", "streamed", _BF16, 4, LEAN, 1, "8b-bf16-streamed-one", alone=True),
    "3b-full-one": Case("one GPU, all weights trained", "none", _FULL_3B, 4, _TRAINED_HEAD, ranks=1),
    "3b-full-fsdp2-alone": Case(
        "one process in a group", "fsdp2", _FULL_3B, 4, SHARDS | _TRAINED_HEAD, 1, "3b-full-one", alone=True),
}  # fmt: skip
# Functions of `multi_gpu.py`.
OTHERS = {
    "links": "bytes per second: RAM to each GPU alone and all together, and between GPUs",
    "oom": "the bundled model; the last GPU runs out of memory in the third step, and all go on",
    "checkpoint": "the bundled model on all GPUs, then one, then all again, against one GPU",
}


def listed() -> str:
    """A line per case."""
    lines = [f"{name:32} {case.way:9} {case.why}" for name, case in CASES.items()]
    return "\n".join(lines + [f"{name:32} {'':9} {why}" for name, why in OTHERS.items()])


def point(name: str, num_gpus: int, gpu: str, on_cpu: bool) -> dict[str, Any]:
    """A case's plan, and per phase what one rank is predicted to need: on `num_gpus` cards called `gpu`, or with a tiny
    shape on the CPU."""
    from fitune import recipe as recipes
    from fitune.memory.dry import Rows
    from fitune.memory.ranks import trace_rank
    from fitune.model.source import resolve
    from fitune.parallel.world import SAME_RECORDS
    from fitune.planner import make_plan
    from fitune.planner.context import find_machine
    from fitune.planner.target import choose_target

    case = CASES[name]
    ranks = case.ranks or num_gpus
    where = dict(devices="cpu", precision="fp32") if on_cpu else dict(gpu=gpu)
    recipe = recipes.build(case.recipe | {"batch": case.batch} | where | (_tiny(case) if on_cpu else {}))
    config = tiny_config() if on_cpu else resolve(recipe.model, weights=True).config
    plan = make_plan(recipe, config=config).plan.with_(**case.changes)
    if on_cpu and plan.stream_from == "pinned":
        plan = plan.with_(stream_from="pageable")
    plan = plan.with_(parallel=case.way, world_size=ranks, batch=case.batch * ranks, predicted={}, reasons=())
    mine = plan.batch if case.way in SAME_RECORDS else case.batch
    rows = [Rows(plan.micro_batch, plan.seq_len)] * (mine // plan.micro_batch)
    peaks = trace_rank(config, plan, rows)
    target = choose_target(recipe, find_machine(recipe, []))
    extra = 0 if on_cpu else target.overheads.workspace_bytes
    phases = {
        phase: {"peak_allocated_bytes": getattr(peaks, phase) + extra} for phase in ("first_step", "step", "eval")
    }
    top = max(fields["peak_allocated_bytes"] for fields in phases.values())
    return {"recipe": recipe.as_dict(), "plan": plan.as_dict(),
            "predicted": {"peak_allocated_bytes": top, "held_bytes": peaks.held, "weight_bytes": peaks.weights,
                          "state_bytes": peaks.state, "phases": phases}}  # fmt: skip


def _tiny(case: Case) -> dict[str, Any]:
    return dict(seq_len=32, micro_batch=min(2, case.batch))


def tiny_config() -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=4, vocab_size=512,
                                num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)  # fmt: skip
