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


EXPERTS = tiny.Adapter(3, 6, 0.0, "none", ("q_proj", "experts"))


@pytest.fixture
def with_adapters():
    """(our engine, peft's model) with the same adapters on fused experts, away from zero."""

    def make(name, tmp_path, **changes):
        import peft

        from fitune.model.adapter_io import write_adapter

        model = tiny.reference(name, num_hidden_layers=2)
        engine = engine_on(model, adapter=EXPERTS, recompute_layers=1, **changes)
        tensors = engine.built.trainable()
        for number, tensor in enumerate(tensors.values()):
            tensor.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(number))
        write_adapter(tmp_path / "adapter", EXPERTS, tensors, base_model="tiny")
        theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
        return engine, theirs, tensors

    return make


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_adapters_of_experts_are_pefts(name, tmp_path, with_adapters):
    """Files that peft reads, and the same loss and gradients."""
    from fitune.model.adapter_io import read_adapter
    from tests.engine.test_step import gradients

    engine, theirs, tensors = with_adapters(name, tmp_path)
    back, read = read_adapter(tmp_path / "adapter")
    assert set(read) == set(tensors) and all(torch.equal(read[n], t) for n, t in tensors.items())
    assert set(back.targets) == {"q_proj", "experts.gate_up_proj", "experts.down_proj"}
    batch = tiny.padded(tiny.records(2))
    loss, ours = gradients(engine, [batch])
    ids, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.targets)
    logits = theirs(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    from fitune.model.adapter_io import _our_name

    found = {}
    for full, p in theirs.named_parameters():
        if p.requires_grad:
            found[_our_name(full.replace(".default", ""), tmp_path, list(back.targets[1:]))] = p.grad
    assert set(found) == set(ours)
    for key, grad in ours.items():
        assert (found[key] - grad).norm() <= 2e-4 * grad.norm() + 1e-9, key


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_merged_experts_are_what_the_adapter_adds(name, tmp_path, with_adapters):
    from fitune.model.merge import _merged_experts, _Place

    engine, _, tensors = with_adapters(name, tmp_path)
    (experts,) = engine.built.experts_of(0)
    for leaf, packed in experts.packed.items():
        adapter = experts.adapters[leaf]
        with torch.no_grad():
            expected = adapter.added_to(packed.tensors["weight"], is_own=False)
        made = _merged_experts(packed.tensors["weight"], EXPERTS, adapter.lora_A.detach(), adapter.lora_B.detach(),
                               adapter.transposed, torch.float32, _Place())  # fmt: skip
        assert torch.allclose(made, expected, atol=1e-6) and not torch.equal(made, packed.tensors["weight"])


def test_experts_are_adapted_only_where_they_are_named():
    plan = tiny.make_plan()
    engine = engine_on(tiny.reference("qwen3_moe", num_hidden_layers=2), adapter=plan.adapter)
    assert not any("experts" in name for name in engine.built.trainable())


@pytest.mark.parametrize("changes", [dict(dropout=0.1), dict(dora=True)])
def test_what_experts_cannot_have(changes):
    import dataclasses

    from fitune.errors import UserError

    with pytest.raises(UserError, match="cannot adapt fused experts like this"):
        engine_on(tiny.reference("qwen3_moe", num_hidden_layers=2), adapter=dataclasses.replace(EXPERTS, **changes))
