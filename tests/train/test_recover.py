"""Out of memory in the middle of a run: one notch changes, the same step runs again, nothing is lost or repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fitune import recipe as recipes
from fitune.engine.driver import Driver
from fitune.engine.engine import Engine
from fitune.errors import EXIT_DOES_NOT_FIT, EXIT_FAILED, EXIT_RESTART, UserError
from fitune.parallel.world import Single
from fitune.planner.notch import next_notch
from fitune.train import recover, run
from fitune.train.loop import Run, _run
from fitune.train.oom import MemoryFailure
from fitune.train.recover import located
from fitune.train.session import plan_session
from tests import tiny
from tests.train.test_loop import assert_close, losses, weights
from tests.train.tiny_run import of_kind

OOM = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 9.77 GiB"
STEPS = 4


@pytest.fixture
def job(base: Path, data: Path, tmp_path: Path):
    """`job("name", ...)` runs a small training job and returns its folder."""

    def start(name: str, **settings: Any) -> Path:
        values = dict(model=str(base), data=str(data), seq_len=128, batch=4, steps=STEPS, lr=1e-2, lora_r=4,
                      lora_dropout=0.1, eval_share=0.2, eval_every=2, precision="fp32")  # fmt: skip
        return run(recipes.build(values | settings | {"out": str(tmp_path / name)})).run_folder

    return start


def fail(monkeypatch, owner: type, method: str, at_call: int, error: Exception) -> None:
    """The `at_call`-th call of a method raises, -1: every one; the others are real, and so is the planner's trace."""
    real, count = getattr(owner, method), [0]

    def wrapper(self, *args, **kwargs):
        count[0] += self.built.device.type != "meta"
        if self.built.device.type != "meta" and at_call in (count[0], -1):
            raise error
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, wrapper)


# The calls of run_layer come 4 a pass: the first evaluation, two steps and the last evaluation are hit.
@pytest.mark.parametrize("at_call", [1, 7, 14, 27])
def test_the_run_ends_as_if_nothing_had_happened(job, monkeypatch, at_call):
    undisturbed = job("plain", micro_batch=4)
    fail(monkeypatch, Driver, "run_layer", at_call, torch.OutOfMemoryError(OOM))
    recovered = job("recovered")
    steps = [e["step"] for e in of_kind(recovered, "step")]
    assert steps == list(range(1, STEPS + 1)), "no step is lost or repeated"
    assert losses(recovered) == pytest.approx(losses(undisturbed), rel=1e-5)
    assert_close(weights(recovered), weights(undisturbed), tolerance=1e-3)
    (replan,) = of_kind(recovered, "replan")
    assert replan["change"] == "micro-batch 4 -> 2" and replan["cause"] == OOM
    assert json.loads((recovered / "plan.1.json").read_text())["micro_batch"] == 2
    assert json.loads((recovered / "plan.json").read_text())["micro_batch"] == 4
    assert any("ran out of GPU memory" in e["text"] for e in of_kind(recovered, "notice"))


def test_recomputing_more_is_bit_identical(job, monkeypatch):
    plain = job("plain", micro_batch=4)
    fail(monkeypatch, Driver, "run_layer", 25, RuntimeError("CUDA error: out of memory"))
    recovered = job("recovered", micro_batch=4)
    assert of_kind(recovered, "replan")[0]["change"] == "recomputed layers 0 -> 2"
    assert losses(recovered) == losses(plain)
    assert all(torch.equal(a, b) for a, b in zip(weights(recovered).values(), weights(plain).values(), strict=True))


def test_no_notch_left(job, monkeypatch):
    fail(monkeypatch, Driver, "run_layer", -1, torch.OutOfMemoryError(OOM))
    with pytest.raises(UserError, match="out of GPU memory at step 1, and nothing is left to change") as caught:
        job("hopeless", micro_batch=4, recompute="all", loss_chunk=64)
    assert caught.value.exit_code == EXIT_DOES_NOT_FIT


@pytest.mark.parametrize("at_call", [1, 3])
def test_a_failed_update_goes_on_from_the_last_state(job, monkeypatch, at_call):
    """Half of the parameters may have been changed: the model is built again and the steps since then are repeated."""
    plain = job("plain", micro_batch=4, save_every=2)
    real, count = Engine._update, [0]

    def half_done(self, lr, norm):
        count[0] += 1
        real(self, lr, norm)
        if count[0] == at_call:
            raise torch.OutOfMemoryError(OOM)

    monkeypatch.setattr(Engine, "_update", half_done)
    recovered = job("update", micro_batch=4, save_every=2)
    assert [e["step"] for e in of_kind(recovered, "step")] == list(range(1, STEPS + 1))
    assert losses(recovered) == losses(plain), "only recomputation changed"
    assert [e["resumed_from"] for e in of_kind(recovered, "start")] == [None, at_call - 1]
    assert all(torch.equal(a, b) for a, b in zip(weights(recovered).values(), weights(plain).values(), strict=True))


def test_other_errors_are_not_taken_for_it(job, monkeypatch):
    fail(monkeypatch, Driver, "run_layer", 20, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        job("other")


def test_a_device_that_is_lost_needs_a_new_process(job, monkeypatch):
    """Without a supervisor the run ends and says how to go on; with one it asks for a restart with the changed plan."""
    nccl = RuntimeError("NCCL error in: NCCLUtils.hpp:317, unhandled cuda error\nCuda failure 2 'out of memory'")
    fail(monkeypatch, Driver, "run_layer", 20, nccl)
    with pytest.raises(UserError) as caught:
        job("lost", micro_batch=4, save_every=1)
    assert caught.value.what == "out of GPU memory, and this process cannot go on with the device"
    assert caught.value.exit_code == EXIT_FAILED and "the last checkpoint is at step" in caught.value.fix


def test_an_illegal_access_is_no_lack_of_memory(job, monkeypatch):
    """The context is lost with it: no notch is taken, and only a new process can go on."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")
    fail(monkeypatch, Driver, "run_layer", 20, error)
    monkeypatch.setattr(recover, "give_back", lambda device: False)
    with pytest.raises(UserError) as caught:
        job("lost", micro_batch=4, save_every=1)
    assert caught.value.what == "the device does not answer any more"
    assert caught.value.why == "CUDA error: an illegal memory access was encountered"
    assert caught.value.exit_code == EXIT_FAILED and "the last checkpoint is at step" in caught.value.fix


def test_a_lost_connection_of_a_single_process_is_no_peer(job, monkeypatch):
    fail(monkeypatch, Driver, "run_layer", 20, ConnectionResetError(104, "Connection reset by peer"))
    with pytest.raises(ConnectionResetError):
        job("other")


class GoneAfter(Single):
    """Two ranks, the other one of which is gone after the second step: the first then tells it how long a step took."""

    size, steps = 2, 0

    def hear(self, event):
        self.steps += event["event"] == "step"

    def share(self, value):
        if self.steps == 2:
            raise RuntimeError(self.words)
        return value

    words = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] writev [10.0.0.2]:4211: Broken pipe"


@pytest.mark.parametrize("supervised", [True, False])
def test_a_peer_that_is_gone_between_two_steps(supervised: bool, base: Path, data: Path, tmp_path: Path, monkeypatch):
    """Not in a step, which would be tried again: what saves, or tells the ranks of a stop, waits for others too. A
    supervisor is asked for new processes (no `end`: it would take the run for over); without one the run says how to
    go on."""
    values = dict(model=str(base), data=str(data), seq_len=128, batch=4, steps=STEPS, lora_r=4, eval_share=0,
                  save_every=1, precision="fp32", devices="cpu", out=str(tmp_path / "run"))  # fmt: skip
    monkeypatch.setattr("fitune.train.ranks.plan_for", lambda session, group: plan_session(session))
    monkeypatch.setattr("fitune.parallel.setup.open_host_together", lambda *arguments: None)
    monkeypatch.setattr("fitune.parallel.setup.finish_host_together", lambda *arguments: None)
    monkeypatch.setattr("fitune.parallel.setup.make_engine", lambda built, plan, group: Engine(built, plan))
    with pytest.raises(UserError) as caught:
        recipe, group = recipes.build(values), GoneAfter()
        _run(recipe, recipe, group, None, group.hear, supervised)
    assert caught.value.what == "another process of this run has ended, or hangs"
    assert caught.value.why == GoneAfter.words
    assert caught.value.exit_code == (EXIT_RESTART if supervised else EXIT_FAILED)
    ends = of_kind(tmp_path / "run", "end")
    assert ends == [] if supervised else ends[0]["status"] == "failed"
    assert len(of_kind(tmp_path / "run", "step")) == 2 < STEPS
    assert ("the last checkpoint is at step" in caught.value.fix) is not supervised


def test_ranks_agree_before_they_change(job, monkeypatch):
    """A rank that has not failed drops the same step before its update when another one tells that it did."""
    plain = job("plain", micro_batch=4)
    told, asked = [MemoryFailure("device", "torch", OOM)], []

    def agree(failure):
        asked.append(failure)
        return told.pop() if len(asked) == 4 else failure  # the evaluation, step 1 before and after its update, step 2

    monkeypatch.setattr("fitune.train.loop.Run.__init__", _with_agree(Run.__init__, agree))
    other = job("other", micro_batch=4)
    assert of_kind(other, "replan")[0]["step"] == 2
    assert len(asked) == 2 * STEPS + 3 + 1, "twice a step, once an evaluation, once for the attempt that was dropped"
    assert losses(other) == losses(plain)


def _with_agree(real, agree):
    def init(self, *arguments, **options):
        real(self, *arguments, **options | {"agree": agree})

    return init


def test_notches_in_order():
    plan = tiny.make_plan(micro_batch=4, recompute_layers=1, loss_chunk=512)
    seen = []
    while (found := next_notch(plan)) is not None:
        plan, change = found
        seen.append(change)
    assert seen == ["micro-batch 4 -> 2", "micro-batch 2 -> 1", "recomputed layers 1 -> 2", "recomputed layers 2 -> 4",
                    "loss chunk 512 -> 64 tokens"]  # fmt: skip
    fixed = frozenset({"micro_batch", "loss_chunk"})
    assert next_notch(tiny.make_plan(micro_batch=4, recompute_layers=4, loss_chunk=512), fixed) is None
    assert next_notch(tiny.make_plan(micro_batch=1, recompute_layers=0, loss_chunk=64), phase="eval") is None
    assert next_notch(tiny.make_plan(micro_batch=4, recompute_layers=0), phase="load") is None


def test_notches_of_a_gpu():
    plan = tiny.make_plan(micro_batch=1, recompute_layers=4, loss_chunk=64, device="cuda")
    seen = []
    while (found := next_notch(plan)) is not None:
        plan, change = found
        seen.append(change)
    assert seen == [
        "inputs of recomputed layers kept in host RAM",
        "frozen layers on the GPU 4 -> 2, the others stream from host RAM",
        "frozen layers on the GPU 2 -> 0, the others stream from host RAM",
        "the output head streams from host RAM",
    ]
    assert (plan.stream_from, plan.resident_layers) == ("pinned", 0)
    plan, change = next_notch(plan, where="pinned") or pytest.fail("pinned")
    assert plan.stream_from == "pageable" and change == "frozen weights in pageable instead of pinned RAM"
    plan, change = next_notch(plan, where="host") or pytest.fail("host")
    assert plan.offload_inputs is False
    assert next_notch(plan, where="host")[0].stream_from == "disk"
    full = dict(method="full", micro_batch=1, recompute_layers=4, loss_chunk=64, device="cuda", offload_inputs=True)
    assert next_notch(tiny.make_plan(**full)) is None, "what trains is not streamed"


@pytest.mark.parametrize(
    ("way", "stream_from", "begins"),
    [
        ("ddp", "none", ["inputs of", "frozen layers", "frozen layers", "the output head"]),
        ("cp", "none", ["inputs of", "frozen layers", "frozen layers", "the output head"]),
        ("fsdp2", "shards", ["inputs of", "the output head"]),
        ("tp", "none", ["inputs of"]),
        ("pp", "none", []),
        ("zero2", "none", []),
        ("zero3", "none", []),
    ],
)
def test_notches_that_a_way_of_sharing_can_have(way: str, stream_from: str, begins: list[str]):
    """tp, pp and DeepSpeed refuse weights that stream, when the model has been loaded again."""
    plan = tiny.make_plan(micro_batch=1, recompute_layers=4, loss_chunk=64, device="cuda", parallel=way, world_size=2,
                          stream_from=stream_from, resident_layers=0 if stream_from == "shards" else None)  # fmt: skip
    seen = []
    while (found := next_notch(plan)) is not None:
        plan, change = found
        seen.append(change)
    assert len(seen) == len(begins) and all(s.startswith(b) for s, b in zip(seen, begins, strict=True))


def test_a_bare_driver_error_while_the_card_is_free_is_about_pinned_memory(monkeypatch):
    """As under WSL 2 (unslothai/unsloth#1797)."""
    failure, cuda = MemoryFailure("device", "driver", "CUDA error: out of memory"), torch.device("cuda")
    plan = tiny.make_plan(device="cuda", stream_from="pinned", resident_layers=0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 << 30, 24 << 30))
    assert located(failure, plan, cuda).where == "pinned"
    assert located(failure, tiny.make_plan(device="cuda"), cuda) == failure, "nothing is pinned"
    assert located(MemoryFailure("device", "torch", OOM), plan, cuda).where == "device"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 24 << 30))
    assert located(failure, plan, cuda) == failure
