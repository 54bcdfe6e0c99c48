"""What the step on `meta` says of a CPU, and the same step really run there, event for event."""

from __future__ import annotations

import pytest
import torch

from fitune.engine.engine import Engine
from fitune.engine.optimizers import build_optimizer
from fitune.memory.dry import DryRun, Rows
from fitune.memory.follow import Follower
from fitune.memory.held import device_tensors
from fitune.model.build import add_adapter, build, fill
from tests import tiny

ROWS, COLUMNS, CHUNK = 2, 24, 20
CASES = {
    "llama, LoRA, fp32": ("llama", dict(clip=1.0)),
    "llama, LoRA, bf16, dropout": (
        "llama", dict(precision="bf16", base_format="bf16", adapter=tiny.Adapter(4, 8, 0.1, "none", ("all-linear",))),
    ),
    "qwen3, full, fp32": ("qwen3", dict(method="full")),
    "qwen3, full, bf16": ("qwen3", dict(method="full", precision="bf16", clip=0.5)),
    "gemma3, LoRA, fp32": ("gemma3", {}),
    "llama, NF4": ("llama", dict(base_format="nf4")),
    "llama, int8, 16-bit": ("llama", dict(base_format="int8", precision="bf16")),
}  # fmt: skip


def of_the_step(follower):
    """(block by order, bytes, op) of what is born; what readies a micro-batch on the host is left out."""
    order, found = {}, []
    running_loss = max(block.number for block in follower.blocks if follower.marks[block.part].name == "start")
    for event in follower.events:
        block = follower.blocks[abs(event) - 1]
        if follower.marks[block.part].name == "start" and block.number != running_loss:
            continue
        number = order.setdefault(block.number, len(order))
        found.append((number, block.num_bytes if event > 0 else -block.num_bytes, block.op))
    return found


def really(name, plan, micro_batches, first_step=True):
    """A step on the CPU, followed; the step before it has recomputed every layer once."""
    model = tiny.reference(name)
    built = build(model.config, plan, "cpu")
    fill(built, model.state_dict().items(), plan)
    add_adapter(built, plan)
    engine = Engine(built, plan)
    engine.step([Rows(ROWS, COLUMNS)], step=0, lr=1e-3)
    parameters = list(engine.masters.parameters())
    if first_step:
        engine.optimizer = build_optimizer(plan.optimizer, parameters, lr=1e-3, weight_decay=0.0)
    follower = Follower("cpu")
    follower.ignore([*(t for _, t in device_tensors(built)), *parameters])
    follower.ignore(t for state in engine.optimizer.state.values() for t in state.values())
    with follower:
        engine.step([Rows(ROWS, COLUMNS)] * micro_batches, step=1, lr=1e-3, observe=follower.mark)
    return follower


def same(ours, theirs):
    """Sizes and identities in order; the first difference with what is around it."""
    left, right = [e[:2] for e in ours], [e[:2] for e in theirs]
    if left == right:
        return None
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return at, len(left), len(right), ours[max(0, at - 3) : at + 3], theirs[max(0, at - 3) : at + 3]


@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_meta_says_what_the_cpu_does(case, recompute):
    name, changes = CASES[case]
    plan = tiny.make_plan(loss_chunk=CHUNK, recompute_layers=recompute, **changes)
    dry = DryRun(tiny.config_of(name), plan)
    said = dry.step([Rows(ROWS, COLUMNS)] * 2, loss_chunk=CHUNK, recompute_layers=recompute)
    assert same(of_the_step(said), of_the_step(really(name, plan, 2))) is None


def test_a_later_step_makes_no_state():
    plan = tiny.make_plan(loss_chunk=CHUNK, recompute_layers=4)
    dry = DryRun(tiny.config_of("llama"), plan)
    said = dry.step([Rows(ROWS, COLUMNS)], loss_chunk=CHUNK, recompute_layers=4, first_step=False)
    assert same(of_the_step(said), of_the_step(really("llama", plan, 1, first_step=False))) is None


def test_an_op_that_makes_less_on_meta_is_found(monkeypatch):
    """An activation whose meta implementation forgets its result's memory: the comparison fails."""
    plan = tiny.make_plan(loss_chunk=CHUNK, recompute_layers=4)
    real = Follower.__torch_dispatch__

    def forgetful(self, func, types, args=(), kwargs=None):
        if self.device_type == "meta" and func is torch.ops.aten.silu.default:
            return args[0].view(args[0].shape)
        return real(self, func, types, args, kwargs)

    monkeypatch.setattr(Follower, "__torch_dispatch__", forgetful)
    said = DryRun(tiny.config_of("llama"), plan).step([Rows(ROWS, COLUMNS)], loss_chunk=CHUNK, recompute_layers=4)
    assert same(of_the_step(said), of_the_step(really("llama", plan, 1))) is not None
