"""The whole model's step on `meta`, nothing added up: what a prediction from a few layers must equal."""

from __future__ import annotations

from typing import Any

import torch

from fitune.engine.batch import meta_batch
from fitune.engine.driver import Driver
from fitune.engine.optimizers import Masters
from fitune.engine.step import evaluate, forward_backward
from fitune.memory.trace import StorageTracker
from fitune.model.build import add_adapter, build, fill, make_scratch, meta_weights
from tests import tiny


class WholeModel:
    """Every layer of a model on `meta`. Peaks are bytes above weights and optimizer state, inputs left out."""

    def __init__(self, config: Any, plan: Any):
        self.plan = plan
        self.granule = 512 if plan.device == "cuda" else 1
        self.built = build(config, plan, "meta")
        fill(self.built, meta_weights(self.built), plan)
        add_adapter(self.built, plan)
        self.masters = Masters(self.built.trainable())
        self.driver = Driver(self.built)
        self.driver.check()
        self.trains_embedding = any(p.requires_grad for p in self.built.model.get_input_embeddings().parameters())

    def prepare(self, chunk: int) -> None:
        """As the engine does before its first step."""
        self.built.context.scratch = make_scratch(self.built, chunk)

    def tensors(self) -> list[torch.Tensor]:
        """All that is on the device before the first step."""
        scratch = self.built.context.scratch
        found = [scratch.buffer] if scratch is not None else []
        found += [*self.built.model.parameters(), *self.built.model.buffers(), *self.masters.parameters()]
        found += [t for linear in self.built.linears.values() for t in linear.packed.tensors.values()]
        return found + [t for e in self.built.experts for p in e.packed.values() for t in p.tensors.values()]

    def rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.granule) * self.granule

    def weight_bytes(self) -> int:
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self.tensors()}
        return sum(self.rounded(size) for size in storages.values())

    def gradient_bytes(self) -> int:
        return sum(self.rounded(m.numel() * 4) for m in self.masters.parameters())

    def step_peak(self, rows: int, columns: int, chunk: int, recompute_layers: int, num_micro_batches: int = 1) -> int:
        with_dropout = bool(self.plan.adapter and self.plan.adapter.dropout)
        batches = [meta_batch(rows, columns, with_dropout=with_dropout) for _ in range(num_micro_batches)]
        names = list(self.masters.pairs)
        tracker = self._tracker(batches)
        with tracker:
            for batch in batches:
                forward_backward(
                    self.driver,
                    [batch],
                    recompute_layers=recompute_layers,
                    loss_chunk=chunk,
                    grad_scale=1.0,
                    trains_embedding=self.trains_embedding,
                    grads_ready=lambda part, index: self.masters.collect(names),
                )
        left = tracker.live_bytes
        for p, master in self.masters.pairs.values():
            p.grad = master.grad = None
        assert left == self.gradient_bytes(), "only gradients are left"
        return tracker.peak_bytes

    def eval_peak(self, rows: int, columns: int, chunk: int) -> int:
        batch = meta_batch(rows, columns, with_dropout=False)
        tracker = self._tracker([batch])
        with tracker:
            evaluate(self.driver, batch, chunk)
        return tracker.peak_bytes

    def _tracker(self, batches: list[Any]) -> StorageTracker:
        tracker = StorageTracker(self.granule)
        inputs = [t for b in batches for t in (b.input_ids, b.targets, b.position_ids, b.token_keys) if t is not None]
        tracker.ignore([*self.tensors(), *inputs])
        return tracker


def cuda_plan(config: Any, **changes: Any) -> Any:
    """A plan for a card with bf16 and flash attention."""
    values = dict(
        num_layers=config.num_hidden_layers, device="cuda", device_name="card", precision="bf16", base_format="bf16",
        attention="flash",
    )  # fmt: skip
    return tiny.make_plan(**(values | changes))
