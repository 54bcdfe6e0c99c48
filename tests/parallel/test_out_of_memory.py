"""Memory runs out on one rank where the others are about to meet it: they learn of it, and the same step runs again."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fitune.engine.engine import Engine
from fitune.parallel.context import ContextEngine
from fitune.parallel.group import Group
from fitune.parallel.pipeline import PipelineEngine, open_stage
from fitune.parallel.replicated import Replicated, share_of
from fitune.parallel.tensor_engine import TensorEngine
from fitune.parallel.world import SAME_RECORDS
from fitune.plan import Plan
from fitune.train import evaluation
from fitune.train.oom import DEVICE, MemoryFailure
from fitune.train.ranks import Agreement
from fitune.train.recover import AGREED, PeerFailed, _vote
from tests.parallel.jobs import assert_same, batches_of, make_built, plan_of, records, train
from tests.parallel.ranks import run_ranks
from tests.parallel.test_sharded import SHARDED
from tests.parallel.test_sharded import make as make_sharded
from tests.parallel.test_tensor import LLAMA
from tests.parallel.test_tensor import make_built as make_split
from tests.parallel.zero_ranks import make as make_zero
from tests.parallel.zero_ranks import needs_deepspeed

OOM = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 9.77 GiB"
ALLOCATING = ("empty", "zeros", "empty_like", "zeros_like")
Fault = tuple[str, str, int]
"""A module of the program, a function that it calls (torch: any that allocates), and which call of a step fails."""


class Scarce:
    """Fails at the `at`-th call. In place of `torch` the calls are those that allocate."""

    def __init__(self, real: Any, at: int):
        self.real, self.left = real, at

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        return functools.partial(self._called, found) if name in ALLOCATING else found

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self._called(self.real, *given, **options)

    def _called(self, real: Any, *given: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError(OOM)
        return real(*given, **options)


@contextmanager
def scarce(fault: Fault) -> Iterator[None]:
    name, attribute, at = fault
    module: Any = importlib.import_module(f"fitune.{name}")
    real = getattr(module, attribute)
    put = Scarce(real, at)
    setattr(module, attribute, put)
    try:
        yield
    finally:
        setattr(module, attribute, real)
    assert put.left <= 0, f"{fault} has not struck"


def engine_of(group: Group, plan: Plan) -> Engine:
    if plan.parallel == "fsdp2":
        return make_sharded(group, plan)
    if plan.parallel == "pp":
        built = make_built(plan, before_fill=lambda made: open_stage(made, plan, group))
        return PipelineEngine(built, plan, group)
    if plan.parallel == "tp":
        return TensorEngine(make_split(LLAMA, plan, group), plan, group)
    if plan.parallel == "cp":
        return ContextEngine(make_built(plan), plan, group)
    if plan.parallel.startswith("zero"):
        return make_zero(group, plan)
    return Engine(make_built(plan), plan, Replicated(group))


def shared(group: Group, plan: Plan, some: Sequence[Any]) -> Sequence[Any]:
    return some if plan.parallel in SAME_RECORDS else share_of(some, group.rank, group.size)


def step_that_fails(engine: Engine, group: Group) -> str:
    """How a step ended on this rank, with the agreement of `fitune.train`: done, failed, told of it, or told after this
    rank's own part of the update."""
    agree, plan = Agreement(group), engine.plan

    def observe(part: str, index: int) -> None:
        if part in AGREED and (told := agree(None)) is not None:
            raise PeerFailed(told)

    try:
        engine.step(batches_of(shared(group, plan, records(5)), plan), step=0, lr=plan.lr, observe=observe)
    except PeerFailed:
        return "told after its update" if engine.updating else "told"
    except RuntimeError:
        engine.ranks.drain()
        agree(MemoryFailure(DEVICE, "torch", OOM))
        return "failed"
    return "done" if agree(None) is None else "told"


def evaluation_that_fails(engine: Engine, group: Group) -> str:
    plan = engine.plan
    active: Any = SimpleNamespace(
        pulse=lambda: None, stop=SimpleNamespace(sync=lambda: None, requested=None), group=group,
        share=lambda some: shared(group, plan, some), batches=lambda some: batches_of(some, plan),
    )  # fmt: skip
    agree = Agreement(group)
    held_out: Any = [records(5), records(3, seed=9)]
    try:
        evaluation.losses(active, engine, held_out)
    except RuntimeError:
        agree(MemoryFailure(DEVICE, "torch", OOM))
        return "failed"
    return "done" if agree(None) is None else "told"


def disturbed(group: Group, plan: Plan, failing: int, steps: Sequence[Fault], evaluations: Sequence[Fault]) -> Any:
    """Steps and evaluations that one rank fails in, each dropped by all; then ten whole steps."""
    torch.set_num_threads(1)
    engine = engine_of(group, plan)
    told = []
    for work, faults in ((step_that_fails, steps), (evaluation_that_fails, evaluations)):
        for fault in faults:
            if group.rank == failing:
                with scarce(fault):
                    told.append(work(engine, group))
            else:
                told.append(work(engine, group))
            engine.abandon()
    return told, train(engine, lambda some: shared(group, plan, some))


REPLICATED: list[Fault] = [("parallel.replicated", "torch", 1)]
# The row of what is outside the layers' sums, its part, and where the sum of a layer's gradients comes.
SHARDED_FAULTS: list[Fault] = [("parallel.sharded_state", "torch", at) for at in (1, 2, 4)]
# Room for exchanges after a failure, what comes from both neighbours, the records on their way to the device.
STAGED: list[Fault] = [*(("parallel.pipeline", "torch", at) for at in (1, 2, 6)), ("engine.engine", "to_device", 1)]
EVALUATED: list[Fault] = [("parallel.pipeline", "to_device", 1), *(("parallel.pipeline", "torch", at) for at in (1, 2))]


@pytest.mark.parametrize(
    ("size", "failing", "changes", "steps", "evaluations"),
    [
        (2, 1, dict(parallel="ddp"), REPLICATED, []),
        (2, 0, dict(parallel="tp", recompute_layers=2), REPLICATED, []),
        (2, 1, dict(parallel="cp"), REPLICATED, [("parallel.context", "slices_of", 1)]),
        (2, 1, dict(**SHARDED, method="full", adapter=None), SHARDED_FAULTS, []),
        (3, 1, dict(parallel="pp"), STAGED, EVALUATED),
    ],
    ids=["ddp", "tp", "cp", "fsdp2", "pp"],
)
def test_all_learn_of_it_and_go_on(
    size: int, failing: int, changes: dict[str, Any], steps: list[Fault], evaluations: list[Fault]
):
    changes = dict(micro_batch=2) | changes
    plan = plan_of(**changes, world_size=size)
    results = run_ranks(size, disturbed, plan, failing, steps, evaluations, timeout_s=60)
    for rank, (told, _) in enumerate(results):
        assert told == ["failed" if rank == failing else "told"] * len([*steps, *evaluations])
    alone = {name: value for name, value in changes.items() if name not in ("parallel", *SHARDED)}
    one = plan_of(**alone)
    built = make_split(LLAMA, one) if plan.parallel == "tp" else make_built(one)
    assert_same(results[0][1], train(Engine(built, one)))


def replay_that_fails(group: Group, plan: Plan) -> str:
    """Gradients overflow, and the first rank has no room for the pass that is made again."""
    torch.set_num_threads(1)
    engine = engine_of(group, plan)
    engine.scaler.enabled, engine.scaler.scale = True, 2.0
    real, factors = engine.ranks.norm, iter((math.inf, 1.0))
    engine.ranks.norm = lambda grads: real(grads) * next(factors)  # type: ignore[method-assign]
    # In each try: the loss, room for exchanges after a failure, what comes from the next rank.
    with scarce(("parallel.pipeline", "torch", 5)) if group.rank == 0 else nullcontext():
        return step_that_fails(engine, group)


def test_a_stage_that_fails_in_a_replay_tells_it():
    plan = plan_of(parallel="pp", world_size=2, micro_batch=5)
    assert run_ranks(2, replay_that_fails, plan, timeout_s=30) == ["failed", "told"]


@pytest.mark.parametrize(
    ("words", "times"), [(OOM, 1), ("NCCL error: unhandled cuda error, out of memory", 0)], ids=["left", "broken"]
)
def test_an_evaluation_that_cannot_go_on_beside_the_others_fails_as_what_it_is(words: str, times: int):
    """Where the others wait in an exchange that was left, or may: it is about memory, and new processes help."""
    drained: list[int] = []

    def fails(batches: Any) -> Any:
        raise torch.OutOfMemoryError(words)

    def drain() -> None:
        drained.append(1)
        raise RuntimeError("the other ranks wait in an exchange that this one has left")

    active: Any = SimpleNamespace(
        pulse=lambda: None, stop=SimpleNamespace(sync=lambda: None, requested=None), group=SimpleNamespace(size=2),
        share=lambda some: some, batches=lambda some: some,
    )  # fmt: skip
    engine: Any = SimpleNamespace(evaluate=fails, ranks=SimpleNamespace(drain=drain))
    with pytest.raises(torch.OutOfMemoryError, match=words):
        evaluation.losses(active, engine, [[]])
    assert len(drained) == times


def test_nobody_is_asked_after_a_broken_communicator():
    """The others may be in an exchange of it, and this rank is who stores the plan."""
    active: Any = SimpleNamespace(agree=lambda failure: pytest.fail("the others do not hear"))
    engine: Any = SimpleNamespace(ranks=SimpleNamespace(drain=lambda: pytest.fail("nothing can be exchanged")))
    failure = MemoryFailure(DEVICE, "nccl", "Cuda failure 2 'out of memory'", fatal=True)
    assert _vote(active, engine, failure).untold


def update_that_fails(group: Group, plan: Plan) -> tuple[str, bool]:
    """The first update makes the optimizer's state; one rank has no memory for its part."""
    torch.set_num_threads(1)
    engine = engine_of(group, plan)
    if group.rank == 1:

        def fails() -> None:
            raise torch.OutOfMemoryError(OOM)

        engine.optimizer.step = fails  # type: ignore[assignment,method-assign]
    how = step_that_fails(engine, group)
    return how, engine.updating


def test_an_update_that_fails_is_told_before_weights_are_gathered():
    plan = plan_of(**SHARDED, world_size=2)
    assert run_ranks(2, update_that_fails, plan, timeout_s=60) == [("told after its update", True), ("failed", True)]


def left_alone(group: Group, plan: Plan) -> str:
    """What fails between the agreement and the last sum."""
    engine = engine_of(group, plan)
    try:
        with scarce(("parallel.replicated", "sum_gradients", 1)):
            engine.step(batches_of(shared(group, plan, records(5)), plan), step=0, lr=plan.lr)
    except RuntimeError as problem:
        try:
            engine.ranks.drain()
        except RuntimeError as wanted:
            return f"{type(problem).__name__}: {wanted}"
    return "nothing"


def test_an_exchange_that_was_left_needs_new_processes():
    """The others are in it: nothing that this rank could do would meet them again."""
    words = "OutOfMemoryError: the other ranks wait in an exchange that this one has left"
    assert run_ranks(2, left_alone, plan_of(parallel="ddp", world_size=2), timeout_s=60) == [words] * 2


def zero_fails(group: Group, plan: Plan) -> list[str]:
    torch.set_num_threads(1)
    engine: Any = engine_of(group, plan)
    with scarce(("parallel.zero", "to_device", 2)) if group.rank == 1 else nullcontext():
        return [evaluation_that_fails(engine, group)]


@needs_deepspeed
def test_zero_makes_every_pass_of_an_evaluation():
    plan = plan_of(parallel="zero3", world_size=2, micro_batch=1)
    assert run_ranks(2, zero_fails, plan, timeout_s=60) == [["told"], ["failed"]]


def zero_update_fails(group: Group, plan: Plan) -> str:
    """DeepSpeed's own update exchanges weights."""
    engine: Any = engine_of(group, plan)

    def fails() -> None:
        raise torch.OutOfMemoryError(OOM)

    engine.zero.step = fails
    with pytest.raises(torch.OutOfMemoryError):
        engine.step(batches_of(shared(group, plan, records(5)), plan), step=0, lr=plan.lr)
    with pytest.raises(RuntimeError) as wanted:
        engine.ranks.drain()
    return str(wanted.value)


@needs_deepspeed
def test_an_update_of_zero_that_was_left_needs_new_processes():
    words = "the other ranks wait in an exchange that this one has left"
    plan = plan_of(parallel="zero2", world_size=2, micro_batch=1)
    assert run_ranks(2, zero_update_fails, plan, timeout_s=60) == [words] * 2
