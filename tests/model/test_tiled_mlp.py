"""A gated MLP in pieces of its tokens: the same numbers, a fraction of its inner activations."""

from __future__ import annotations

import pytest
import torch

from fitune.model import linear as linears
from tests import tiny
from tests.engine.test_step import engine_for, gradients
from tests.live import pass_peak_bytes

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
    """Of a step of one row of 512 tokens."""
    config = tiny.config_of("llama", num_hidden_layers=2, intermediate_size=1024, max_position_embeddings=1024)
    return pass_peak_bytes(config, 512, mlp_tiles=tiles)


def test_inner_activations_shrink_by_the_number_of_pieces():
    """Gate, up, their product and gradients of [512, 1024] in 16 bit are a mebibyte each."""
    whole, four, eight = (peak_bytes(tiles) for tiles in (1, 4, 8))
    inner = 512 * 1024 * 2
    assert whole - four >= 4 * inner * 3 / 4 * 0.9
    assert four - eight >= 4 * inner / 8 * 0.9


@pytest.mark.parametrize(("dora", "expected"), [(False, 3), (True, 6)])
def test_backward_leaves_out_the_last_product(monkeypatch, dora, expected):
    """Pieces run again for their graph alone; DoRA's scale reads the product that it scales."""
    model = tiny.reference("llama", num_hidden_layers=1)
    adapter = tiny.Adapter(4, 8, 0.0, "none", ("all-linear",), dora=dora)
    engine = start(engine_for(model, adapter=adapter, recompute_layers=1, mlp_tiles=3))
    gradients(engine, BATCHES)
    made, plain = [], linears.product

    def counted(x, bias, lora_A, lora_B, layer, keys):
        made.append(layer.name.rpartition(".")[2])
        return plain(x, bias, lora_A, lora_B, layer, keys)

    monkeypatch.setattr(linears, "product", counted)
    gradients(engine, BATCHES[:1])
    assert made.count("down_proj") == expected and made.count("up_proj") == 6
