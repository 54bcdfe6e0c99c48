"""A gated MLP in pieces of its tokens: the same numbers, a fraction of its inner activations."""

from __future__ import annotations

import pytest
import torch

from fitune.engine.batch import meta_batch
from fitune.engine.driver import Driver
from fitune.engine.step import forward_backward
from fitune.model.build import add_adapter, build, fill, meta_weights
from tests import tiny
from tests.engine.test_step import engine_for, gradients

RECS = tiny.records(4)
BATCHES = [tiny.padded(RECS[:2]), tiny.padded(RECS[2:], 2)]
ADAPTERS = {
    "all": tiny.Adapter(4, 8, 0.0, "none", ("all-linear",)),
    "dropout": tiny.Adapter(4, 8, 0.3, "none", ("all-linear",)),
    "attention only": tiny.Adapter(4, 8, 0.0, "none", ("q_proj",)),
    "inside only": tiny.Adapter(4, 8, 0.0, "none", ("down_proj",)),
}


def start(engine):
    for linear in engine.built.linears.values():
        if linear.lora_B is not None:
            linear.lora_B.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(linear.module_key & 0xFFFF))
    return engine


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_pieces_equal_the_whole(name, adapter):
    model = tiny.reference(name, num_hidden_layers=2)
    common = dict(adapter=ADAPTERS[adapter], recompute_layers=2)
    loss, whole = gradients(start(engine_for(model, **common)), BATCHES)
    for tiles in (2, 7):
        tiled_loss, grads = gradients(start(engine_for(model, mlp_tiles=tiles, **common)), BATCHES)
        assert tiled_loss == pytest.approx(loss, rel=1e-6)
        assert set(grads) == set(whole)
        for key, grad in whole.items():
            assert (grads[key] - grad).abs().max() <= 2e-6 * grad.abs().max() + 1e-9, key


def test_kept_layers_run_whole():
    """Their activations are kept: to run pieces again in backward would only cost time."""
    model = tiny.reference("llama", num_hidden_layers=2)
    made = [start(engine_for(model, recompute_layers=0, mlp_tiles=tiles)) for tiles in (1, 4)]
    (loss, whole), (other, grads) = (gradients(engine, BATCHES) for engine in made)
    assert loss == other and all(torch.equal(grads[n], g) for n, g in whole.items())


def peak_bytes(tiles: int) -> int:
    """Highest sum of live meta storages during a step of one row of 512 tokens."""
    import weakref

    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Live(TorchDispatchMode):
        now = peak = 0
        known: set[int] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    storage = leaf.untyped_storage()
                    if storage._cdata not in self.known:
                        self.known.add(storage._cdata)
                        self.now += storage.nbytes()
                        self.peak = max(self.peak, self.now)
                        weakref.finalize(storage, self.died, storage._cdata, storage.nbytes())
            return out

        def died(self, key, size):
            self.known.discard(key)
            self.now -= size

    config = tiny.config_of("llama", num_hidden_layers=2, intermediate_size=1024, max_position_embeddings=1024)
    plan = tiny.make_plan(num_layers=2, recompute_layers=2, precision="bf16", base_format="bf16", mlp_tiles=tiles)
    built = build(config, plan, "meta")
    fill(built, meta_weights(built), plan)
    add_adapter(built, plan)
    driver = Driver(built)
    driver.check()
    live = Live()
    with live:
        forward_backward(
            driver, [meta_batch(1, 512, with_dropout=False)], recompute_layers=2, loss_chunk=32, grad_scale=1.0,
            mlp_tiles=tiles,
        )  # fmt: skip
    return live.peak


def test_inner_activations_shrink_by_the_number_of_pieces():
    """Gate, up, their product and gradients of [512, 1024] in 16 bit are a mebibyte each."""
    whole, four, eight = (peak_bytes(tiles) for tiles in (1, 4, 8))
    inner = 512 * 1024 * 2
    assert whole - four >= 4 * inner * 3 / 4 * 0.9
    assert four - eight >= 4 * inner / 8 * 0.9
