"""The whole model's step on `meta`, nothing added up: what a prediction from a few layers must equal."""

from __future__ import annotations

from typing import Any

import torch

from fitune.memory.dry import DryRun, Rows
from fitune.memory.events import Event
from fitune.memory.held import device_tensors, ring_of
from fitune.memory.trace import events_of
from fitune.model.build import make_scratch
from tests import tiny


class WholeModel:
    """Every layer of a model on `meta`, run as the engine runs it."""

    def __init__(self, config: Any, plan: Any):
        self.plan = plan
        self.granule = 512 if plan.device == "cuda" else 1
        self.dry = DryRun(config, plan)

    def step(self, rows: int, columns: int, chunk: int, recompute_layers: int, micro_batches: int = 1) -> list[Event]:
        """Every block of the run's first step, the head of the list (what is there before) left out."""
        batches = [Rows(rows, columns)] * micro_batches
        follower = self.dry.step(batches, loss_chunk=chunk, recompute_layers=recompute_layers)
        return events_of(follower, self.dry.built.layers_prefix)

    def evaluation(self, rows: int, columns: int, chunk: int) -> list[Event]:
        follower = self.dry.evaluation(Rows(rows, columns), loss_chunk=chunk)
        return events_of(follower, self.dry.built.layers_prefix, evaluation=True)

    def tensors(self, chunk: int) -> list[torch.Tensor]:
        """All that is on the device before the first step."""
        self.dry.built.context.scratch = make_scratch(self.dry.built, chunk)
        ring = ring_of(self.dry.built)
        buffers = [t for _, t in ring.device_tensors()] if ring is not None else []
        held = [t for _, t in device_tensors(self.dry.built)]
        return [*held, *buffers, *self.dry.engine.masters.parameters()]

    def rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.granule) * self.granule

    def weight_bytes(self, chunk: int) -> int:
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self.tensors(chunk)}
        return sum(self.rounded(size) for size in storages.values())

    def gradient_bytes(self) -> int:
        return sum(self.rounded(m.numel() * 4) for m in self.dry.engine.masters.parameters())

    def peak(self, events: list[Event]) -> int:
        """Bytes above what was there before."""
        live = highest = 0
        for event in events:
            live += self.rounded(event.num_bytes) if event.num_bytes > 0 else -self.rounded(-event.num_bytes)
            highest = max(highest, live)
        return highest


def cuda_plan(config: Any, **changes: Any) -> Any:
    """A plan for a card with bf16 and flash attention."""
    values = dict(
        num_layers=config.num_hidden_layers, device="cuda", device_name="card", precision="bf16", base_format="bf16",
        attention="flash",
    )  # fmt: skip
    return tiny.make_plan(**(values | changes))
