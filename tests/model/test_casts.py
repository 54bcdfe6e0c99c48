"""A layer's adapters rounded to the format that computes, all at once: the same numbers, one launch."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny
from tests.engine.test_step import gradients
from tests.engine.test_streaming import engine_for

RECS = tiny.records(4)
BATCHES = [tiny.padded(RECS[:2]), tiny.padded(RECS[2:], 2)]
BF16 = dict(precision="bf16", base_format="bf16")
POLICIES = {
    "recomputed": {},
    "one of four recomputed": dict(recompute_layers=1),
    "together": dict(accumulation_order="layer-major"),
    "tiled MLP": dict(mlp_tiles=3),
    "dropout": dict(adapter=tiny.Adapter(4, 8, 0.2, "none", ("all-linear",))),
    "DoRA": dict(adapter=tiny.Adapter(4, 8, 0.0, "none", ("all-linear",), dora=True)),
}


@pytest.fixture(scope="module")
def model():
    return tiny.reference("llama")


class Roundings(TorchDispatchMode):
    """Counts what makes the shapes of adapters in bf16, and what fills many tensors at once."""

    def __init__(self, shapes):
        super().__init__()
        self.shapes, self.alone, self.at_once = shapes, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._opname in ("to", "_to_copy") and tuple(out.shape) in self.shapes:
            self.alone += out.dtype == torch.bfloat16
        self.at_once += func is torch.ops.aten._foreach_copy_.default
        return out


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_the_same_to_the_bit(model, policy):
    changes = BF16 | POLICIES[policy]
    loss, ours = gradients(engine_for(model, **changes), BATCHES)
    engine = engine_for(model, **changes)
    engine.driver.casts = [nullcontext()] * 4
    other, each = gradients(engine, BATCHES)
    assert loss == other and ours.keys() == each.keys()
    for name, grad in each.items():
        assert torch.equal(ours[name], grad), name


def test_one_launch_per_layer_and_pass(model):
    engine = engine_for(model, **BF16)
    gradients(engine, BATCHES)
    shapes = {tuple(p.shape) for lin in engine.built.linears.values() for p in (lin.lora_A, lin.lora_B)}
    with Roundings(shapes) as seen:
        gradients(engine, BATCHES[:1])
    assert (seen.alone, seen.at_once) == (0, 8), "4 layers, forward and backward"
    engine.driver.casts = [nullcontext()] * 4
    with Roundings(shapes) as seen:
        gradients(engine, BATCHES[:1])
    assert (seen.alone, seen.at_once) == (4 * (14 + 12 + 14), 0), "the product that is left out needs none"


def test_nothing_is_rounded_where_nothing_has_to_be(model):
    engine = engine_for(model)
    with Roundings(set()) as seen:
        gradients(engine, BATCHES)
    assert seen.at_once == 0


def test_copies_go_with_the_layer_and_are_new_the_next_time(model):
    engine = engine_for(model, **BF16)
    context, casts = engine.built.context, engine.driver.casts[1]
    linear = engine.built.linears["model.layers.1.self_attn.q_proj"]
    with casts:
        first = linear.rounded(0, linear.lora_A, torch.bfloat16)
        assert linear.rounded(0, linear.lora_A, torch.bfloat16) is first
    assert context.casts is None
    assert linear.rounded(0, linear.lora_A, torch.bfloat16) is not first, "outside, each use has its own"
    with torch.no_grad():
        linear.lora_A.add_(1.0)
    with casts:
        second = linear.rounded(0, linear.lora_A, torch.bfloat16)
    assert torch.equal(second, linear.lora_A.to(torch.bfloat16)) and not torch.equal(second, first)


def test_another_layers_linear_rounds_its_own(model):
    engine = engine_for(model, **BF16)
    other = engine.built.linears["model.layers.2.self_attn.q_proj"]
    with engine.driver.casts[1]:
        assert torch.equal(other.rounded(1, other.lora_B, torch.bfloat16), other.lora_B.to(torch.bfloat16))


def test_a_layer_that_fails_leaves_nothing(model):
    engine = engine_for(model, **BF16)
    run_layer = engine.driver.run_layer

    def failing(index, *arguments, **options):
        out = run_layer(index, *arguments, **options)
        if index == 2:
            raise torch.OutOfMemoryError("no room")
        return out

    engine.driver.run_layer = failing
    with pytest.raises(torch.OutOfMemoryError):
        gradients(engine, BATCHES)
    assert engine.built.context.casts is None and not engine.driver.casts[2]._made
