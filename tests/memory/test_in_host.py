"""Host memory of full fine-tuning with masters there, against the buffers that the CPU's engine holds."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from fitune.engine import host_masters, host_parcels, streamed_update
from fitune.memory import in_host
from fitune.memory.in_host import held_bytes, piece_buffers
from fitune.memory.trace import Tracer
from tests import tiny
from tests.engine.test_streaming import BATCHES, STREAMED, engine_for
from tests.memory.brute import cuda_plan

FULL = dict(method="full", base_format="bf16", precision="bf16", optimizer_place="host")
TOGETHER = dict(accumulation_order="layer-major")
CASES = {
    "clipped, layer by layer": ("llama", dict(clip=0.1, **STREAMED, **TOGETHER), 2),
    "clipped, one after the other": ("llama", dict(clip=0.1, **STREAMED), 3),
    "clipped, one": ("llama", dict(clip=0.1, **STREAMED), 1),
    "unclipped": ("llama", dict(clip=0.0, **STREAMED), 1),
    "unclipped, layer by layer": ("llama", dict(clip=0.0, **STREAMED, **TOGETHER), 2),
    "unclipped, one after the other": ("llama", dict(clip=0.0, **STREAMED), 2),
    "8-bit state": ("llama", dict(clip=0.1, optimizer="adamw8bit", **STREAMED, **TOGETHER), 2),
    "8-bit state updated in pieces": (
        "llama", dict(clip=0.1, optimizer="adamw8bit", **STREAMED, **TOGETHER) | dict(optimizer_place="streamed"), 2),
    "tied, two layers stay": ("gemma3", dict(clip=0.1, **STREAMED) | dict(resident_layers=2), 2),
    "tied": ("qwen2", dict(clip=0.1, **STREAMED, **TOGETHER), 2),
    "experts": ("qwen3_moe", dict(clip=0.0, **STREAMED, **TOGETHER), 2),
    "fp32": ("llama", dict(clip=0.1, base_format="fp32", precision="fp32", **STREAMED), 2),
    "resident weights": ("llama", dict(clip=0.1), 1),
}  # fmt: skip


def held(engine):
    """What the engine has in host memory by owner."""
    masters = engine.in_host
    seen = {t.untyped_storage().data_ptr() for t in masters.stores.values()}
    own = [m for _, m in masters.pairs.values() if m.untyped_storage().data_ptr() not in seen]
    numbers = {}
    for optimizer in masters.optimizer.each.values():
        for state in optimizer.state.values():
            for tensor in state.values():
                if isinstance(tensor, torch.Tensor):
                    numbers[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    own_bytes = sum(m.numel() * 4 for m in own)
    return {"masters": own_bytes, "optimizer state": sum(numbers.values()),
            "gradients": masters.host_bytes() - own_bytes}  # fmt: skip


def _hold_back(masters, monkeypatch):
    """Nothing is taken in before the backward pass waits for it, or is over."""
    gate = threading.Event()
    arrive, norm, begin, wait = masters._arrive, masters.norm, masters.begin, host_masters.wait

    def waiting(futures):
        gate.set()
        wait(futures)
        gate.clear()

    def over(scale):
        gate.set()
        return norm(scale)

    def begun(lr):
        gate.clear()
        begin(lr)

    def slow(*args):
        gate.wait(60)
        arrive(*args)

    monkeypatch.setattr(host_masters, "wait", waiting)
    masters.norm, masters.begin, masters._arrive = over, begun, slow


@pytest.mark.parametrize("case", CASES)
def test_predicted_bytes_are_the_engines(case, monkeypatch):
    """With a thread that is slower than the backward pass: as many gradients wait as ever can."""
    name, changes, micro_batches = CASES[case]
    engine = engine_for(copy.deepcopy(tiny.reference(name)), **(FULL | changes))
    _hold_back(engine.in_host, monkeypatch)
    batches = (BATCHES * micro_batches)[:micro_batches]
    rows, columns = batches[0].input_ids.shape
    assert all(batch.input_ids.shape[0] == rows for batch in batches)
    for step in range(2):
        engine.step(batches, step=step, lr=1e-3)
    engine.settle()
    config = engine.built.model.config
    plan = engine.plan.with_(micro_batch=rows, batch=rows * micro_batches)
    found = Tracer(config, cuda_plan(config, **(FULL | changes))).in_host_sizes()
    targets = max(int((batch.targets >= 0).sum()) for batch in batches)
    said = held_bytes(found, plan, rows * micro_batches, targets)
    assert said == held(engine)
    assert found.num_trained == sum(m.numel() for _, m in engine.masters.pairs.values())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_predicted_pieces_are_the_buffers_of_the_update(optimizer, micro_batches):
    changes = dict(optimizer=optimizer, clip=0.1, **STREAMED, **TOGETHER) | dict(optimizer_place="streamed")
    engine = engine_for(copy.deepcopy(tiny.reference("llama")), **(FULL | changes))
    engine.step((BATCHES * 2)[:micro_batches], step=0, lr=1e-3)
    engine.settle()
    config, rows = engine.built.model.config, BATCHES[0].input_ids.shape[0]
    plan = engine.plan.with_(micro_batch=rows, batch=rows * micro_batches)
    found = Tracer(config, cuda_plan(config, **(FULL | changes))).in_host_sizes()
    made = sorted(b.nbytes for s in engine.in_host.updater._sets for b in s.buffers.values())
    said = piece_buffers(found, plan, plan.batch)
    assert sorted(size for name, size in said if name != "code table") == made
    coded = {id(t) for o in engine.in_host.optimizer.each.values() for s in o.state.values()
             for key, t in s.items() if key.startswith("qmap")}  # fmt: skip
    assert sum(name == "code table" for name, _ in said) == len(coded)


def test_constants_are_the_engines():
    assert in_host.UNDERWAY == host_masters.UNDERWAY
    assert in_host._ALIGNMENT_BYTES == host_parcels._ALIGNMENT_BYTES
    assert streamed_update.buffer_bytes("adamw") == 2 * streamed_update.PIECE_ELEMENTS * 18
