"""ZeRO's closed forms against the tensors that real ranks hold, and in the order that theory says."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from fitune.engine.parts import state_bytes_per_parameter
from fitune.memory.zero import ZeroBytes, zero_bytes
from fitune.parallel.group import Group
from fitune.parallel.replicated import share_of
from fitune.parallel.zero_config import SUB_GROUP
from fitune.plan import Plan
from tests.parallel.jobs import batches_of, plan_of, records
from tests.parallel.ranks import run_ranks
from tests.parallel.zero_ranks import make, needs_deepspeed

FULL: dict[str, Any] = dict(method="full", adapter=None)
HALF: dict[str, Any] = dict(precision="bf16", base_format="bf16")


def storages() -> int:
    """Bytes of the memory of every tensor that has been made since `gc.freeze`."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    held = [x.untyped_storage() for x in tensors if x.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def settled(parameters: Iterable[torch.nn.Parameter]) -> int:
    """The same, less what is about to go: a thread of gloo's lets go of what it exchanged some time after whoever
    waited for the exchange goes on. So until nothing less is seen in ten turns of this thread, in which that one has
    its own."""
    grads = [p.grad for p in parameters]  # else nothing that the collector sees refers to them
    least, turns = storages(), 0
    while turns < 10:
        time.sleep(0.01)
        least, turns = (found, 0) if (found := storages()) < least else (least, turns + 1)
    del grads
    return least


def measured(group: Group, plans: list[Plan]) -> list[dict[str, int]]:
    return [measure(group, plan) for plan in plans]


def measure(group: Group, plan: Plan) -> dict[str, int]:
    """What the rank holds by kind. All that came with the engine and two steps: `held` after them, `between` two
    micro-batches of the second, `applied` when its gradients are to be applied."""
    gc.collect()
    gc.freeze()  # what is there already is not looked at
    engine = make(group, plan)
    found: dict[str, int] = {}

    def observe(part: str, index: int) -> None:
        names = {("forward", 1): "between", ("optimizer", 0): "applied"}
        if (part, index) in names:
            found[names[part, index]] = settled(engine.work.parameters())

    for step in range(2):
        some = share_of(records(8, seed=step), group.rank, group.size)
        engine.step(batches_of(some, plan), step=step, lr=1e-3, observe=observe)
    found["held"] = settled(engine.work.parameters())
    found["trained"] = sum(shape.numel() for shape in engine.shapes.values())
    found["weights"] = engine.built.num_parameters()
    found["masters"] = sum(part.numel() * 4 for part in engine.parts)
    states = [t for state in engine.zero.optimizer.optimizer.state.values() for t in state.values()]
    found["state"] = sum(t.numel() * t.element_size() for t in states if isinstance(t, torch.Tensor))
    parts = [getattr(p, "ds_tensor", p).untyped_storage() for p in engine.work.parameters()]
    found["parameters"] = sum({s.data_ptr(): s.nbytes() for s in parts}.values())
    return found


@needs_deepspeed
@pytest.mark.parametrize(
    ("size", "jobs"),
    [
        (2, [("zero1", FULL), ("zero1", FULL | HALF), ("zero2", HALF), ("zero3", HALF)]),
        (4, [("zero3", FULL | HALF)]),
    ],
)
def test_forms_are_what_ranks_hold(size: int, jobs: list[tuple[str, dict[str, Any]]]):
    plans = [plan_of(**changes, parallel=way, world_size=size, micro_batch=1) for way, changes in jobs]
    for of_rank in run_ranks(size, measured, plans):
        for plan, rank in zip(plans, of_rank, strict=True):
            assert_as_formed(plan, rank)


def assert_as_formed(plan: Plan, rank: dict[str, int]) -> None:
    width = 2 if plan.precision == "bf16" else 4
    frozen = 0 if plan.method == "full" else rank["weights"] * width
    trained, state = rank["trained"], int(rank["trained"] * state_bytes_per_parameter(plan.optimizer))
    formed = zero_bytes(plan, trained=trained, frozen_bytes=frozen, state_bytes=state, unit=0)
    assert rank["masters"] == pytest.approx(formed.masters, rel=0.01)
    assert rank["state"] == pytest.approx(formed.state, rel=0.01)
    owned = formed.weights - (0 if plan.parallel == "zero3" else frozen)  # else DeepSpeed knows nothing of the frozen
    assert rank["parameters"] == pytest.approx(owned, rel=0.01)
    bucket = formed.bucket if plan.parallel == "zero3" else 0  # would hide all else of a tiny model
    # beside it scalars and rotary frequencies: 1 to 2 KiB
    assert rank["held"] - bucket == pytest.approx(formed.held - bucket, rel=0.005, abs=2048), (rank, formed)
    lasting = rank["held"] - formed.lasting + bucket
    if plan.parallel == "zero1":  # added up on every rank until a step's last backward pass, in fp32 beside the bucket
        gradients = rank["between"] - lasting - (0 if plan.precision == "bf16" else formed.bucket)
    else:
        gradients = rank["applied"] - lasting
    assert gradients == pytest.approx(formed.gradients, rel=0.02), (rank, formed)
    applied = formed.update - formed.copied  # in fp32 a gradient that ends in another rank's part is kept whole
    assert rank["applied"] - bucket == pytest.approx(applied - bucket, rel=0.01), (rank, formed)


def total(way: str, ranks: int, **changes: Any) -> ZeroBytes:
    """An 8B model, all of it trained in bf16."""
    plan = plan_of(**FULL, **HALF, parallel=way, world_size=ranks, **changes)
    count = 8_030_000_000
    return zero_bytes(plan, trained=count, frozen_bytes=0, state_bytes=8 * count, unit=218_000_000)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_stage_holds_less_than_the_one_before(ranks: int):
    first, second, third = (total(way, ranks) for way in ("zero1", "zero2", "zero3"))
    assert first.held >= second.held > third.held - third.lasting, "stage 3 keeps its gradients' tensors between steps"
    assert first.backward > second.backward > third.backward
    assert first.update >= second.update > third.update
    more = total("zero3", 2 * ranks)
    assert more.held < third.held and more.backward < third.backward


def test_what_is_offloaded_is_in_host_memory():
    here, there = total("zero3", 4), total("zero3", 4, offload_optimizer="cpu")
    assert there.masters == there.state == there.gradients == 0 and there.weights == here.weights
    assert there.host == here.masters + here.state + here.gradients
    both = total("zero3", 4, offload_optimizer="cpu", offload_params="cpu")
    assert both.weights == 0 and both.host == there.host + here.weights
    assert both.held == both.bucket, "of what lasts only the bucket is on the device"
    first = total("zero1", 4, offload_optimizer="cpu")
    assert first.gradients == total("zero1", 4).gradients, "stage 1 adds gradients up on the device"


def test_what_is_on_a_disk():
    """Masters, state and an update's gradients in files; gradients and four buffers of a group in host memory."""
    in_memory, there = total("zero3", 4, offload_optimizer="cpu"), total("zero3", 4, offload_optimizer="nvme")
    part = -(-8_030_000_000 // 4)
    assert there.disk == 4 * part + 8 * part + 4 * part == in_memory.host
    assert there.host == 4 * part and in_memory.buffers == in_memory.disk == 0
    assert there.buffers == 4 * 4 * (SUB_GROUP + 218_000_000 // 4)
    fields = ("weights", "masters", "state", "gradients", "applied", "lasting")
    assert [getattr(there, name) for name in fields] == [getattr(in_memory, name) for name in fields]
    small = plan_of(**FULL, parallel="zero3", world_size=4, offload_optimizer="nvme")
    few = zero_bytes(small, trained=4000, frozen_bytes=0, state_bytes=32_000, unit=2000)
    assert few.buffers == 4 * 4 * 1000, "one group of all there is"
