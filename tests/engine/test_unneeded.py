"""A recomputed layer's last product, left out where nothing reads it: the same gradients to the bit, less work."""

from __future__ import annotations

import pytest
import torch

from fitune.model import linear as linears
from fitune.model.linear import OutputWatch
from tests import tiny
from tests.engine.test_step import gradients
from tests.engine.test_streaming import engine_for

RECS = tiny.records(4)
BATCHES = [tiny.padded(RECS[:2]), tiny.padded(RECS[2:], 2)]  # the first finds the module, the second leaves it out
READ_BY_NOBODY = {
    "llama": "mlp.down_proj", "phi3": "mlp.down_proj", "cohere2": "mlp.down_proj", "gpt2": "mlp.c_proj",
    "falcon": "mlp.dense_4h_to_h", "opt": "fc2", "gpt_neox": "mlp.dense_4h_to_h", "deepseek_v3": "mlp.down_proj",
    # a norm after the MLP reads it, or the layer ends with fused experts
    "gemma2": None, "olmo2": None, "glm4": None, "mixtral": None, "gpt_oss": None,
}  # fmt: skip


@pytest.mark.parametrize("name", READ_BY_NOBODY)
def test_gradients_are_those_of_kept_layers(name):
    model = tiny.reference(name)
    kept = gradients(engine_for(model, recompute_layers=0), BATCHES)
    engine = engine_for(model, recompute_layers=4)
    again = gradients(engine, BATCHES)
    assert kept[0] == again[0]
    assert all(torch.equal(again[1][n], g) for n, g in kept[1].items())
    first, expected = engine.driver._unneeded[0, False], READ_BY_NOBODY[name]
    assert (first is None) == (expected is None)
    assert first is None or first.name.endswith(f".0.{expected}")


def test_the_product_is_not_made(monkeypatch):
    model = tiny.reference("llama")
    made: list[tuple[int, ...]] = []
    plain = linears.F.linear

    def counted(x, weight, bias=None):
        made.append(tuple(weight.shape))
        return plain(x, weight, bias)

    monkeypatch.setattr(linears.F, "linear", counted)
    engine = engine_for(model, recompute_layers=4)
    counts = []
    for step in range(2):
        made.clear()
        engine.step(BATCHES[:1], step=step, lr=0.0)
        counts.append(made.count((64, 128)))
    assert counts == [8, 4], "down_proj runs in forward only"


@pytest.mark.parametrize(("dora", "tiles"), [(True, 1), (False, 3)])
def test_dora_and_tiled_mlps(dora, tiles):
    """DoRA's scale reads the product that it scales; a tiled MLP is left out as a whole."""
    model = tiny.reference("llama")
    common = dict(adapter=tiny.Adapter(4, 8, 0.0, "none", ("all-linear",), dora=dora))
    kept = gradients(engine_for(model, recompute_layers=0, **common), BATCHES)
    engine = engine_for(model, recompute_layers=4, mlp_tiles=tiles, **common)
    again = gradients(engine, BATCHES)
    found = engine.driver._unneeded[1, tiles > 1]
    assert found is (None if dora else engine.built.layers[1].mlp)
    for name, grad in kept[1].items():
        assert (again[1][name] - grad).abs().max() <= (0 if dora else 2e-6) * grad.abs().max() + 1e-9, name


def test_watch():
    a, b = object(), object()
    watch = OutputWatch()
    assert watch.found() is None
    watch.passed(a)
    watch.saved(torch.zeros(1))
    assert watch.found() is None, "something after it was saved"
    watch.passed(b)
    assert watch.found() is b
    watch.passed(a)
    assert watch.found() is None, "it runs twice, and the first time it is not the last"
