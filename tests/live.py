"""Live bytes of `meta` storages while something runs: a small tracker for memory tests of the engine itself."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fitune.engine.batch import meta_batch
from fitune.engine.driver import Driver
from fitune.engine.inputs import OffloadedInputs
from fitune.engine.step import forward_backward
from fitune.model.build import add_adapter, build, fill, meta_weights
from tests import tiny


class Live(TorchDispatchMode):
    """Counts storages born under it until they die; `peak` is the highest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.known:
                storage = leaf.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._died, storage._cdata, storage.nbytes())
        return out

    def _died(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def pass_peak_bytes(config: Any, num_columns: int, *, num_batches: int = 1, **changes: Any) -> int:
    """Peak above the model's own tensors of a forward and backward pass over micro-batches of one row each, everything
    recomputed, in bf16."""
    layers = config.num_hidden_layers
    values = dict(num_layers=layers, recompute_layers=layers, precision="bf16", base_format="bf16") | changes
    plan = tiny.make_plan(**values)
    built = build(config, plan, "meta")
    fill(built, meta_weights(built), plan)
    add_adapter(built, plan)
    driver = Driver(built)
    driver.check()
    held = [*built.model.parameters(), *built.model.buffers()]
    held += [t for linear in built.linears.values() for t in linear.packed.tensors.values()]
    if plan.streamed_layers():
        held += [t for _, t in driver.weights.device_tensors()]
    live = Live()
    live.known |= {t.untyped_storage()._cdata for t in held}
    with live:
        forward_backward(
            driver,
            [meta_batch(1, num_columns, with_dropout=False) for _ in range(num_batches)],
            recompute_layers=plan.recompute_layers,
            loss_chunk=plan.loss_chunk,
            grad_scale=1.0,
            offload=OffloadedInputs(built.device) if plan.offload_inputs else None,
            mlp_tiles=plan.mlp_tiles,
        )
    return live.peak
