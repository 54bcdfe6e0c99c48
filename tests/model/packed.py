"""A model with a packed base and adapters, and the plain transformers model that computes the same."""

from __future__ import annotations

from typing import Any

import torch

from fitune.engine.engine import Engine
from fitune.model.attention import uses_interface
from fitune.model.build import Built, add_adapter, build, fill
from fitune.model.formats import unpack
from tests import tiny
from tests.engine.test_step import gradients, plain_gradients


def engine_on(model: Any, **changes: Any) -> Engine:
    """An engine over a tiny model's weights in another base format, its adapters away from zero."""
    kernel = "cpu" if uses_interface(type(model)) else "native"
    plan = tiny.make_plan(num_layers=model.config.num_hidden_layers, attention=kernel, **changes)
    built = build(model.config, plan, "cpu")
    fill(built, model.state_dict().items(), plan)
    add_adapter(built, plan)
    generator = torch.Generator().manual_seed(1)
    for linear in built.linears.values():
        if linear.lora_B is not None:
            linear.lora_B.data.normal_(0, 0.05, generator=generator)
    return Engine(built, plan)


def plain_equal(model: Any, built: Built) -> Any:
    """`model` with every packed weight replaced by its unpacked values, adapters merged in."""
    with torch.no_grad():
        for name, linear in built.linears.items():
            weight = linear.dense_weight(torch.float32).clone()
            if linear.lora_A is not None:
                weight += linear.scaling * linear.lora_B @ linear.lora_A
            model.get_parameter(f"{name}.weight").copy_(weight.t() if linear.transposed else weight)
        for experts in built.experts:
            for name, packed in experts.packed.items():
                model.get_parameter(f"{experts.prefix}.{name}").copy_(unpack(packed, torch.float32))
    return model


def assert_equals_plain(model: Any, **changes: Any) -> None:
    """Loss, and the adapters' gradients by the chain rule: dA = s B^T dW and dB = s dW A^T of the merged weight."""
    recs = tiny.records()
    engine = engine_on(model, **changes)
    loss, ours = gradients(engine, [tiny.padded(recs)])
    plain_loss, d_weights = plain_gradients(plain_equal(model, engine.built), recs)
    assert abs(loss - plain_loss) < 2e-6 * plain_loss
    assert len(ours) == 2 * sum(linear.lora_A is not None for linear in engine.built.linears.values()) > 0
    for name, linear in engine.built.linears.items():
        if linear.lora_A is None:
            continue
        d_weight = d_weights[f"{name}.weight"]
        d_weight = d_weight.t() if linear.transposed else d_weight
        for leaf, expected in (
            ("lora_A", linear.scaling * linear.lora_B.t() @ d_weight),
            ("lora_B", linear.scaling * d_weight @ linear.lora_A.t()),
        ):
            scale = max(expected.abs().max().item(), 1e-3)
            assert (ours[f"{name}.{leaf}"] - expected).abs().max().item() < 1e-4 * scale, f"{name}.{leaf}"
