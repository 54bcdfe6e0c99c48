"""What the step on `meta` says of a CPU, and the same step really run there, event for event."""

from __future__ import annotations

import difflib

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fitune.engine.engine import Engine
from fitune.engine.optimizers import build_optimizer
from fitune.memory import follow
from fitune.memory.dry import DryRun, Rows
from fitune.memory.follow import Follower
from fitune.memory.held import device_tensors, ring_of
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
    "llama, NF4, streamed, together": (
        "llama", dict(base_format="nf4", stream_from="pageable", resident_layers=1, accumulation_order="layer-major")),
    "llama, streamed, head in host memory": (
        "llama", dict(stream_from="pageable", resident_layers=1, head_place="host")),
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


def ready(name, plan):
    """An engine on the CPU that has recomputed every layer once."""
    model = tiny.reference(name)
    built = build(model.config, plan, "cpu")
    fill(built, model.state_dict().items(), plan)
    add_adapter(built, plan)
    engine = Engine(built, plan)
    engine.step([Rows(ROWS, COLUMNS)], step=0, lr=1e-3)
    return engine


def followed(engine, micro_batches):
    """A step of it, followed."""
    follower = Follower("cpu")
    follower.ignore([*(t for _, t in device_tensors(engine.built)), *engine.masters.parameters()])
    ring = ring_of(engine.built)
    follower.ignore(t for _, t in (ring.device_tensors() if ring is not None else ()))
    follower.ignore(t for state in engine.optimizer.state.values() for t in state.values())
    with follower:
        engine.step([Rows(ROWS, COLUMNS)] * micro_batches, step=1, lr=1e-3, observe=follower.mark)
    return follower


def really(name, plan, micro_batches, first_step=True):
    """A step on the CPU, followed."""
    engine = ready(name, plan)
    if first_step:
        parameters = list(engine.masters.parameters())
        engine.optimizer = build_optimizer(plan.optimizer, parameters, lr=1e-3, weight_decay=0.0)
    return followed(engine, micro_batches)


def same(ours, theirs):
    """Sizes and identities in order; the first difference with what is around it."""
    left, right = [e[:2] for e in ours], [e[:2] for e in theirs]
    if left == right:
        return None
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return at, len(left), len(right), ours[max(0, at - 3) : at + 3], theirs[max(0, at - 3) : at + 3]


@pytest.mark.parametrize(("case", "recompute"), [*((case, 2) for case in CASES), ("llama, LoRA, fp32", 0)])
def test_meta_says_what_the_cpu_does(case, recompute):
    name, changes = CASES[case]
    plan = tiny.make_plan(loss_chunk=CHUNK, recompute_layers=recompute, **changes)
    dry = DryRun(tiny.config_of(name), plan)
    said = dry.step([Rows(ROWS, COLUMNS)] * 2, loss_chunk=CHUNK, recompute_layers=recompute)
    assert same(of_the_step(said), of_the_step(really(name, plan, 2))) is None


SMALLEST = 100  # bytes; ops wrap the numbers they are called with in smaller blocks


def signed(follower):
    """Bytes of what is born and dies, in order."""
    return [follower.blocks[abs(e) - 1].num_bytes * (1 if e > 0 else -1) for e in follower.events]


def unexplained(real, said):
    """Where a list of signed bytes differs from the allocator's by more than what kernels make and let go of inside."""
    real, said = ([n for n in sizes if abs(n) >= SMALLEST] for sizes in (real, said))
    matcher = difflib.SequenceMatcher(None, real, said, autojunk=False)
    return [
        (real[a:b], said[c:d])
        for tag, a, b, c, d in matcher.get_opcodes()
        if tag != "equal" and (c < d or sum(real[a:b]) != 0)
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_without_anybody_looking(monkeypatch):
    """What the CPU's allocator is asked for in a step without a dispatch mode (which changes how autograd adds up
    gradients, see `memory.follow`), against the same step followed."""
    plan = tiny.make_plan(loss_chunk=CHUNK, recompute_layers=2)
    engine = ready("llama", plan)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.step([Rows(ROWS, COLUMNS)], step=2, lr=1e-3)
    noted = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    real = [e.nbytes() for e in sorted(noted, key=lambda e: e.start_ns())]
    assert unexplained(real, signed(followed(engine, 1))) == []
    monkeypatch.setattr(follow, "_sole_owner", lambda: (0, 0))
    assert unexplained(real, signed(followed(engine, 1))) != [], "sums in place were told from sums out of place"


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
