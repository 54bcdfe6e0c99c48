"""Fused expert weights in a packed base: the plain model with the same values, and no wide copy left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fitune.model.build import build, fill, wanted_weights
from fitune.model.experts import PackedExperts, has_fused_experts
from tests import tiny
from tests.model.packed import assert_equals_plain, engine_on

MOE = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("format", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("name", MOE)
def test_packed_experts_equal_the_plain_model_with_the_same_values(name, format):
    assert_equals_plain(tiny.reference(name, num_hidden_layers=2), base_format=format, recompute_layers=1)


@pytest.mark.parametrize("name", MOE)
def test_every_expert_weight_is_packed(name):
    model = tiny.reference(name)
    plan = tiny.make_plan(base_format="nf4")
    built = build(model.config, plan, "cpu")
    fill(built, model.state_dict().items(), plan)
    fused = {n: tuple(p.shape) for n, p in model.named_parameters() if p.dim() == 3}
    assert fused and {n: s for e in built.experts for n, s in zip(e.names(), e.shapes.values(), strict=True)} == fused
    assert not any(p.dim() == 3 for p in built.model.parameters()), "no wide expert stays a parameter"
    held = sum(packed.num_bytes() for e in built.experts for packed in e.packed.values())
    assert held < 0.65 * sum(torch.Size(s).numel() for s in fused.values()), "about half a byte a weight"
    assert built.num_parameters() == sum(p.numel() for p in model.parameters())


def test_experts_are_there_only_while_their_layer_runs():
    engine = engine_on(tiny.reference("mixtral", num_hidden_layers=2), base_format="nf4")
    (first,) = engine.built.experts_of(0)
    (second,) = engine.built.experts_of(1)
    with first.unpacked(torch.bfloat16):
        weight = first.module.gate_up_proj
        assert weight.dtype == torch.bfloat16 and tuple(weight.shape) == first.shapes["gate_up_proj"]
        assert not hasattr(second.module, "gate_up_proj")
    assert not hasattr(first.module, "gate_up_proj")


def test_experts_are_let_go_after_an_error():
    module = nn.Module()
    module.experts = nn.Parameter(torch.randn(2, 8, 64))
    packed = PackedExperts(module, "layer")
    packed.set_weight("layer.experts", torch.randn(2, 8, 64), "nf4", True)
    with pytest.raises(RuntimeError, match="out of memory"), packed.unpacked(torch.float32):
        raise RuntimeError("out of memory")
    assert "experts" not in module.__dict__


def test_full_fine_tuning_keeps_experts_as_parameters():
    model = tiny.reference("mixtral")
    built = build(model.config, tiny.make_plan(method="full"), "cpu")
    assert built.experts == []
    assert set(wanted_weights(built)) == set(model.state_dict())


def test_what_counts_as_fused_experts():
    experts, convolution = nn.Module(), nn.Conv1d(4, 4, 3)
    experts.weight = nn.Parameter(torch.randn(2, 4, 4))
    assert has_fused_experts(experts)
    assert not has_fused_experts(convolution) and not has_fused_experts(nn.Linear(4, 4))
