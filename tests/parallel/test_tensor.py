"""Layers split over ranks against one process: the same training, 1/N of the bytes on each rank."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from fitune import recipe as recipes
from fitune.engine.engine import Engine
from fitune.errors import UserError
from fitune.memory.dry import Rows
from fitune.memory.events import rounded
from fitune.memory.held import device_tensors
from fitune.memory.ranks import Imagined, RankPeaks, trace_rank
from fitune.model.build import add_adapter, build, fill
from fitune.parallel.group import Group
from fitune.parallel.launch import num_processes
from fitune.parallel.tensor import open_split
from fitune.parallel.tensor_engine import TensorEngine
from fitune.plan import Plan
from fitune.train import ranks
from fitune.train.signals import StepGivenUp
from tests import tiny
from tests.parallel.jobs import assert_same, batches_of, plan_of, records, step_given_up, train
from tests.parallel.ranks import run_ranks

# Eight heads of 32; parts of 64 (a block of a 4-bit format) for two and four ranks; a vocabulary that nothing divides.
HEADS = dict(hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=8, head_dim=32,
             num_hidden_layers=2, vocab_size=259)  # fmt: skip
Job = tuple[str, dict[str, Any]]
LLAMA: Job = ("llama", HEADS)
GROUPED: Job = ("llama", HEADS | dict(num_key_value_heads=2))
QWEN3: Job = ("qwen3", HEADS | dict(num_attention_heads=12, num_key_value_heads=3, tie_word_embeddings=True))
EXPERTS: Job = ("qwen3_moe", HEADS | dict(moe_intermediate_size=128))
NEMOTRON: Job = ("nemotron", HEADS | dict(num_attention_heads=12, num_key_value_heads=3))  # an MLP without a gate
FULL: dict[str, Any] = dict(method="full", adapter=None)


def make_built(job: Job, plan: Plan, group: Group | None = None) -> Any:
    architecture, changes = job
    source = tiny.reference(architecture, **changes)
    built = build(tiny.config_of(architecture, **changes), plan, "cpu")
    if group is not None:
        open_split(built, plan, group)
    fill(built, source.state_dict().items(), plan)
    if group is not None:
        built.parts.finish()
    add_adapter(built, plan)
    return built


def plan_of_two(**changes: Any) -> Plan:
    return plan_of(**(dict(num_layers=2, recompute_layers=1) | changes))


def held_bytes(built: Any, size_of: Any = int) -> int:
    """Of all memory behind what is frozen or trained, adapters left out."""
    named = {name: tensor.untyped_storage() for name, tensor in device_tensors(built) if ".lora_" not in name}
    return sum({storage.data_ptr(): size_of(storage.nbytes()) for storage in named.values()}.values())


def split(group: Group, job: Job, plan: Plan, steps: int) -> Any:
    engine = TensorEngine(make_built(job, plan, group), plan, group)
    held = held_bytes(engine.built)
    losses, _ = train(engine, steps=steps)
    weights = engine.trained_tensors()
    return (losses, weights), engine.evaluate(batches_of(records(3, seed=99), plan)), held


@pytest.mark.parametrize(
    ("size", "job", "changes", "steps"),
    [
        (2, LLAMA, dict(base_format="nf4", packing=True, micro_batch=1), 10),
        (4, LLAMA, FULL | dict(accumulation_order="layer-major"), 10),
        (
            4,
            GROUPED,
            dict(base_format="int8", recompute_layers=2, mlp_tiles=2, offload_inputs=True, optimizer="sgd", lr=0.3),
            10,
        ),
        (2, QWEN3, FULL, 4),  # key heads that two ranks cannot share out, norms of heads, a tied head
        (2, EXPERTS, dict(base_format="nf4"), 4),
        (2, NEMOTRON, dict(base_format="nf4"), 4),
    ],
)
def test_as_one_process(size: int, job: Job, changes: dict[str, Any], steps: int):
    plan = plan_of_two(**changes)
    engine = Engine(make_built(job, plan), plan)
    whole = held_bytes(engine.built)
    alone = train(engine, steps=steps)
    expected = engine.evaluate(batches_of(records(3, seed=99), plan))
    results = run_ranks(size, split, job, plan.with_(parallel="tp", world_size=size), steps)
    assert_same(results[0][0], alone)
    assert all(losses == results[0][0][0] for (losses, _), *_ in results), "every rank knows the same loss"
    for _, loss, _ in results:
        assert loss[1] == expected[1] and loss[0] == pytest.approx(expected[0], rel=1e-4)
    assert sum(held for *_, held in results) <= 1.05 * whole


class Threads:
    """Ranks as threads of this process, which add tensors up in their common memory: starts at once."""

    def __init__(self, size: int):
        self.size, self.barrier, self.slots = size, threading.Barrier(size, timeout=60), [torch.empty(0)] * size
        self.here = threading.local()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.slots[self.here.rank] = tensor.clone()
        self.barrier.wait()
        total = torch.stack(self.slots).sum(0)
        self.barrier.wait()
        tensor.copy_(total)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            self.here.rank = rank
            try:
                return work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))


@pytest.mark.parametrize(
    "architecture",
    ["qwen2", "mistral", "gemma2", "gemma3", "glm4", "mixtral", "gpt_oss", "cohere2", "smollm3", "starcoder2",
     "arcee"],
)  # fmt: skip
def test_many_architectures(architecture: str, monkeypatch: pytest.MonkeyPatch):
    """Two steps with adapters (the second one has what the first has changed), dropout, packed rows."""
    torch.set_num_threads(1)
    job = architecture, dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    plan = plan_of_two(base_format="int8", packing=True)
    expected, _ = train(Engine(make_built(job, plan), plan), steps=2)
    threads = Threads(2)
    for module in ("exchange", "tensor_exchange", "replicated"):
        monkeypatch.setattr(f"fitune.parallel.{module}.all_reduce", threads.all_reduce)
    groups = [Imagined(2, rank) for rank in range(2)]
    built = [make_built(job, plan, group) for group in groups]

    def steps(rank: int) -> Any:
        engine: Any = TensorEngine(built[rank], plan, groups[rank])  # type: ignore[arg-type]
        engine.trained_tensors = dict
        return train(engine, steps=2)[0]

    for found in threads.run(steps):
        assert found == [pytest.approx(step, rel=1e-4) for step in expected]


# ---- a rank that gives up --------------------------------------------------------------------------------------------


_PARTS = ("copy", "forward", "tail", "backward")


def given_up(group: Group, plan: Plan) -> list[str]:
    """Steps that the second rank gives up at different parts, as `fitune.train` has it; how each ended here."""
    engine = TensorEngine(make_built(LLAMA, plan, group), plan, group)
    return [_one_step(engine, group, part if group.rank == 1 else "", plan) for part in _PARTS]


def _one_step(engine: Engine, group: Group, failing: str, plan: Plan) -> str:
    copy = mock.patch("fitune.engine.engine.to_device", side_effect=StepGivenUp)  # before the first exchange
    with copy if failing == "copy" else contextlib.nullcontext():
        ended = step_given_up(engine, group, plan, lambda at, index: at == failing and index == 0)
    engine.abandon()
    return ended


def test_a_rank_gives_a_step_up_and_nobody_waits_for_it():
    plan = plan_of_two(parallel="tp", world_size=2, accumulation_order="layer-major")
    results = run_ranks(2, given_up, plan, timeout_s=100)
    assert results == [["told"] * len(_PARTS), ["gave up"] * len(_PARTS)]


# ---- what a rank holds -----------------------------------------------------------------------------------------------


def traced(size: int, **changes: Any) -> RankPeaks:
    plan = plan_of(world_size=size, parallel="tp" if size > 1 else "none", micro_batch=1, loss_chunk=16, device="cuda",
                   precision="bf16", attention="flash", num_layers=2, recompute_layers=2, **changes)  # fmt: skip
    config = tiny.config_of("llama", hidden_size=512, intermediate_size=1024, num_attention_heads=8,
                            num_key_value_heads=8, num_hidden_layers=2, vocab_size=1024)  # fmt: skip
    return trace_rank(config, plan, [Rows(1, 64)])


@pytest.mark.parametrize(
    "changes", [dict(base_format="bf16"), dict(base_format="nf4"), FULL], ids=["bf16", "nf4", "full"]
)
def test_a_rank_holds_its_part(changes: dict[str, Any]):
    """Norms are whole on every rank; all the rest is shared out, to the byte but for scales that cannot stay packed."""
    whole = traced(1, **changes)
    norms = (2 * 2 + 1) * 512 * 2
    parts = {size: traced(size, **changes) for size in (2, 4, 8)}
    for size, part in parts.items():
        ideal = (whole.weights - norms) / size + norms
        assert ideal <= part.weights <= 1.05 * ideal + 16 * 512, "512 bytes are the least that a tensor takes"
    assert whole.step > parts[2].step > parts[4].step > parts[8].step
    assert whole.state > parts[2].state > parts[4].state > parts[8].state


@pytest.mark.parametrize("job", [LLAMA, QWEN3, EXPERTS], ids=["llama", "qwen3", "experts"])
def test_the_trace_holds_what_a_rank_holds(job: Job):
    plan = plan_of_two(parallel="tp", world_size=2, base_format="nf4")
    held = held_bytes(make_built(job, plan, Imagined(2)), rounded)
    assert trace_rank(tiny.config_of(job[0], **job[1]), plan, [Rows(1, 8)]).weights == held


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "config", "changes", "why"),
    [
        ("llama", dict(num_attention_heads=4), dict(size=3), "4 heads cannot be split over 3 GPUs"),
        ("llama", {}, dict(dora=True), "DoRA needs the norms of whole rows"),
        ("qwen3_moe", {}, dict(targets=("q_proj", "experts")), "adapters of fused experts are made with whole weights"),
        ("llama", {}, dict(optimizer="adafactor"), "the state of optimizer adafactor belongs to whole matrices"),
        ("llama", {}, dict(stream_from="pageable", resident_layers=0), "the plan keeps weights in host memory"),
        ("phi3", {}, {}, "Phi3Attention"),
        ("llama4", {}, {}, "Llama4TextExperts holds experts of another form"),  # transposed, and do not say so
        ("gpt2", {}, {}, "GPT2Attention"),
        ("olmo2", {}, {}, "self_attn.q_norm.weight works on all heads together"),
        ("starcoder2", dict(num_attention_heads=4), FULL, "self_attn.o_proj.bias would be trained"),
    ],
)
def test_what_cannot_be_split_is_refused(
    architecture: str, config: dict[str, Any], changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(tiny.ARCHITECTURES, "llama4", ("Llama4TextConfig", dict(head_dim=16, num_local_experts=4)))
    changes = dict(changes)
    size = changes.pop("size", 2)
    of_adapter = {name: changes.pop(name) for name in ("dora", "targets") if name in changes}
    plan = plan_of(parallel="tp", world_size=size, **changes)
    if of_adapter:
        assert plan.adapter is not None
        plan = plan.with_(adapter=dataclasses.replace(plan.adapter, **of_adapter))
    built = build(tiny.config_of(architecture, **config), plan, "meta")
    with pytest.raises(UserError) as caught:
        open_split(built, plan, Imagined(size))
    assert caught.value.what == "this job cannot be split inside its layers (--parallel tp)"
    assert why in caught.value.why and "--" in caught.value.fix


def test_blocks_of_a_4_bit_base_are_not_split():
    plan = plan_of(parallel="tp", world_size=2, base_format="nf4")
    built = build(tiny.config_of("llama"), plan, "meta")  # four heads of 16: 32 inputs for each of two ranks
    with pytest.raises(UserError) as caught:
        open_split(built, plan, Imagined(2))
    assert "the nf4 base cannot be split over 2 GPUs" in caught.value.what and "--base-format int8" in caught.value.fix
    assert "model.layers.0.self_attn.o_proj.weight has 64 inputs" in caught.value.why


def test_a_step_may_have_fewer_records_than_processes():
    recipe = recipes.build(dict(model="smollm2", data="demo", batch=1))
    assert num_processes(recipe, 4) == 1 and num_processes(recipe.with_(parallel="tp"), 4) == 4
    ranks.check(recipe.with_(parallel="tp"), 4)
