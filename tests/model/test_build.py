"""Building and filling: the weights that are asked for, buffers, tied and host embeddings, positions, adapters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fitune.engine.engine import Engine
from fitune.errors import UserError
from fitune.model.attention import uses_interface
from fitune.model.build import (
    add_adapter,
    build,
    fill,
    find_layers,
    meta_weights,
    wanted_weights,
    with_rope_scaling,
)
from fitune.plan import Adapter
from tests import tiny
from tests.engine.test_step import gradients
from tests.model.packed import assert_equals_plain


def adapter(**changes):
    return Adapter(**(dict(r=4, alpha=8, dropout=0.0, bias="none", targets=("all-linear",)) | changes))


def built_from(model, device="cpu", **changes):
    kernel = "cpu" if uses_interface(type(model)) else "native"
    plan = tiny.make_plan(num_layers=model.config.num_hidden_layers, attention=kernel, **changes)
    built = build(model.config, plan, device)
    fill(built, meta_weights(built) if device == "meta" else model.state_dict().items(), plan)
    return built, plan


# -- the same model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*tiny.REQUIRED, "gpt2"])
def test_nf4_base_equals_the_plain_model_with_the_same_values(name):
    """Every required architecture: loss and adapters' gradients."""
    layers = 2 if name != "gemma3" else 4
    assert_equals_plain(tiny.reference(name, num_hidden_layers=layers), base_format="nf4", recompute_layers=1)


@pytest.mark.parametrize("kind", ["PhimoeConfig", "Llama4TextConfig"])
def test_a_linear_layer_with_a_forward_of_its_own_is_not_replaced(kind, monkeypatch):
    """Their routers are linear layers that choose experts too."""
    monkeypatch.setitem(tiny.ARCHITECTURES, "routed", (kind, dict(head_dim=16, num_local_experts=4)))
    model = tiny.reference("routed", num_hidden_layers=2)
    assert_equals_plain(model, base_format="nf4", recompute_layers=1)
    built, _ = built_from(model)
    assert not any("router" in name for name in built.linears) and "model.layers.0.self_attn.q_proj" in built.linears


@pytest.mark.parametrize("format", ["fp32", "nf4", "int8"])
@pytest.mark.parametrize("name", list(tiny.ARCHITECTURES))
def test_number_of_parameters_is_that_of_the_plain_model(name, format):
    model = tiny.reference(name)
    expected = sum(p.numel() for p in model.parameters())
    built, plan = built_from(model, base_format=format)
    add_adapter(built, plan)
    assert built.num_parameters() == expected, "adapters are not counted"
    abstract, _ = built_from(model, "meta", base_format=format)
    assert abstract.num_parameters() == expected


def test_number_of_parameters_with_a_host_embedding_and_in_full_fine_tuning():
    model = tiny.reference("llama")
    expected = sum(p.numel() for p in model.parameters())
    assert built_from(model, embedding_place="host")[0].num_parameters() == expected
    full, _ = built_from(model, method="full")
    assert full.num_parameters() == expected == sum(p.numel() for p in full.trainable().values())


# -- buffers --------------------------------------------------------------------------------------------------------

ROPE = {
    "linear": dict(rope_type="linear", factor=4.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "longrope": dict(
        rope_type="longrope", factor=4.0, original_max_position_embeddings=64,
        short_factor=[1.0 + i / 8 for i in range(8)], long_factor=[2.0 + i for i in range(8)],
    ),
}  # fmt: skip


def assert_same_buffers(built, model):
    ours, theirs = dict(built.model.named_buffers()), dict(model.named_buffers())
    assert set(ours) == set(theirs)
    for name, buffer in theirs.items():
        assert ours[name].dtype == buffer.dtype and torch.equal(ours[name], buffer), name


@pytest.mark.parametrize("name", list(tiny.ARCHITECTURES))
def test_buffers_are_those_of_transformers(name):
    model = tiny.reference(name)
    assert_same_buffers(built_from(model)[0], model)


@pytest.mark.parametrize("kind", ROPE)
def test_scaled_positions_are_those_of_transformers(kind):
    """Rotary frequencies and the factor on attention, which is an attribute and no buffer."""
    model = tiny.reference("llama", rope_parameters={"rope_theta": 10000.0, **ROPE[kind]})
    built, _ = built_from(model)
    assert len(dict(model.named_buffers())) > 0
    assert_same_buffers(built, model)
    assert built.model.model.rotary_emb.attention_scaling == model.model.rotary_emb.attention_scaling
    assert not torch.equal(model.model.rotary_emb.inv_freq, tiny.reference("llama").model.rotary_emb.inv_freq) or (
        kind == "longrope"
    )


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "deepseek_v3"])
def test_buffers_after_from_pretrained_in_bf16(name, tmp_path):
    """Read back from disk in 16 bit: rotary frequencies stay fp32, the scale of gemma's embedding does not."""
    from transformers import AutoModelForCausalLM

    tiny.reference(name).to(torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    built, _ = built_from(model, precision="bf16", base_format="bf16")
    assert_same_buffers(built, model)
    ours, theirs = dict(built.model.named_parameters()), dict(model.named_parameters())
    for parameter, value in ours.items():
        assert value.dtype == theirs[parameter].dtype and torch.equal(value, theirs[parameter]), parameter


# -- filling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(tiny.ARCHITECTURES))
def test_asks_for_the_checkpoints_tensors_a_tied_head_left_out(name):
    model = tiny.reference(name)
    built, _ = built_from(model, base_format="nf4")
    theirs = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        assert theirs.pop("lm_head.weight") == theirs[_embedding_name(model)]
    assert wanted_weights(built) == theirs


def _embedding_name(model):
    embedding = model.get_input_embeddings()
    return next(f"{n}.weight" for n, m in model.named_modules() if m is embedding)


@pytest.mark.parametrize("format", ["fp32", "nf4"])
def test_missing_weights(format):
    model = tiny.reference("llama")
    plan = tiny.make_plan(base_format=format)
    weights = {n: t for n, t in model.state_dict().items() if "mlp" not in n}
    with pytest.raises(UserError) as caught:
        fill(build(model.config, plan, "cpu"), weights.items(), plan)
    assert caught.value.what == "the model's files are incomplete"
    assert caught.value.why == (
        "missing: model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.gate_proj.weight, "
        "model.layers.0.mlp.up_proj.weight and 9 more"
    )
    assert caught.value.exit_code == 2


def test_missing_experts_and_buffers_are_named():
    model = tiny.reference("deepseek_v3")
    plan = tiny.make_plan(base_format="nf4")
    for lost in ("mlp.experts.down_proj", "e_score_correction_bias"):
        weights = {n: t for n, t in model.state_dict().items() if lost not in n}
        with pytest.raises(UserError, match=f"missing: .*{lost}"):
            fill(build(model.config, plan, "cpu"), weights.items(), plan)


@pytest.mark.parametrize(
    "lost", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_weight_of_another_shape(lost):
    model = tiny.reference("llama")
    plan = tiny.make_plan(base_format="nf4")
    weights = model.state_dict()
    shape = tuple(weights[lost].shape)
    weights[lost] = weights[lost][:-1]
    with pytest.raises(UserError) as caught:
        fill(build(model.config, plan, "cpu"), weights.items(), plan)
    assert caught.value.what == f"weight {lost} does not fit this model"
    assert caught.value.why == (f"the file has shape {(shape[0] - 1, *shape[1:])}, config.json asks for {shape}")


def test_other_tensors_are_passed_over_and_order_does_not_matter():
    model = tiny.reference("llama")
    plan = tiny.make_plan()
    weights = [("vision.patch.weight", torch.ones(3)), *reversed(list(model.state_dict().items()))]
    built = build(model.config, plan, "cpu")
    fill(built, weights, plan)
    assert all(torch.equal(p, model.get_parameter(n)) for n, p in built.model.named_parameters())


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_tied_head_is_the_embedding(method):
    model = tiny.reference("gemma2")
    weights = model.state_dict()
    weights["lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])  # a stored copy of a tied head is not read
    plan = tiny.make_plan(method=method)
    built = build(model.config, plan, "cpu")
    fill(built, weights.items(), plan)
    assert built.model.lm_head.weight is built.model.model.embed_tokens.weight
    assert torch.equal(built.model.lm_head.weight, model.lm_head.weight)
    assert built.model.lm_head.weight.requires_grad == (method == "full")


def test_weights_are_rounded_to_the_compute_dtype_and_frozen():
    model = tiny.reference("llama")
    built, _ = built_from(model, precision="bf16", base_format="nf4")
    assert {p.dtype for p in built.model.parameters()} == {torch.bfloat16}
    assert built.trainable() == {}


def test_on_meta_nothing_has_values():
    built, plan = built_from(tiny.reference("qwen3_moe"), "meta", base_format="nf4")
    add_adapter(built, plan)
    tensors = [*built.model.parameters(), *built.model.buffers()]
    tensors += [t for linear in built.linears.values() for t in linear.packed.tensors.values()]
    tensors += [t for e in built.experts for packed in e.packed.values() for t in packed.tensors.values()]
    assert {t.device.type for t in tensors} == {"meta"}


def test_a_model_without_a_list_of_layers():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = tiny.config_of("llama")
            self.blocks = nn.ModuleList([nn.Linear(2, 2)])

        def get_decoder(self):
            return self

    with pytest.raises(UserError) as caught:
        find_layers(Odd())
    assert (caught.value.what, caught.value.why) == ("cannot train Odd", "its decoder is not one list of layers")


# -- embedding in host memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_host_embedding_changes_nothing(name):
    """gemma scales its embedding by a buffer, which has to be where the table is."""
    model = tiny.reference(name, tie_word_embeddings=False)
    recs = tiny.records()
    outcomes = []
    for place in ("device", "host"):
        built, plan = built_from(model, embedding_place=place)
        add_adapter(built, plan)
        assert (built.host_embedding is not None) == (place == "host")
        outcomes.append(gradients(Engine(built, plan), [tiny.padded(recs)]))
    assert outcomes[0][0] == outcomes[1][0]
    assert all(torch.equal(outcomes[0][1][n], outcomes[1][1][n]) for n in outcomes[0][1])


def test_host_embedding_is_no_parameter_of_the_device():
    built, _ = built_from(tiny.reference("llama"), "meta", embedding_place="host")
    assert "model.embed_tokens.weight" not in dict(built.model.named_parameters())
    assert wanted_weights(built)["model.embed_tokens.weight"] == (256, 64)


def test_a_tied_embedding_stays_on_the_device():
    built, _ = built_from(tiny.reference("gemma2"), embedding_place="host")
    assert built.host_embedding is None
    assert built.notes == ["the embedding stays on the device: it is tied to the head"]


# -- positions ------------------------------------------------------------------------------------------------------


def scaled(settings, **changes):
    return with_rope_scaling(tiny.config_of("llama", **changes), settings)


def test_yarn_from_plain_positions():
    config = tiny.config_of("llama")
    made = with_rope_scaling(config, {"type": "yarn", "factor": 4})
    assert made.max_position_embeddings == 1024 and config.max_position_embeddings == 256, "a copy is changed"
    assert made.rope_parameters["rope_theta"] == config.rope_parameters["rope_theta"]
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4, "original_max_position_embeddings": 256}
    expected = tiny.config_of("llama", max_position_embeddings=1024, rope_parameters=yarn)
    assert_same_buffers(build(made, tiny.make_plan(), "cpu"), build(expected, tiny.make_plan(), "cpu").model)


def test_another_type_replaces_the_models_own_scaling():
    """Llama 3.1 has been stretched from 8 k to 128 k already: four times more is counted from 128 k."""
    made = scaled({"type": "yarn", "factor": 4}, rope_parameters={"rope_theta": 5e5, **ROPE["llama3"]})
    assert made.rope_parameters == {
        "rope_type": "yarn", "rope_theta": 5e5, "factor": 4, "original_max_position_embeddings": 256,
    }  # fmt: skip
    assert made.max_position_embeddings == 1024


def test_the_same_type_keeps_what_is_not_said():
    made = scaled({"type": "llama3", "factor": 16}, rope_parameters={"rope_theta": 5e5, **ROPE["llama3"]})
    assert made.rope_parameters == {"rope_theta": 5e5, **ROPE["llama3"], "factor": 16}
    assert made.max_position_embeddings == 16 * 64


def test_no_scaling_is_the_same_configuration():
    config = tiny.config_of("llama")
    assert with_rope_scaling(config, None) is config


@pytest.mark.parametrize(
    ("name", "settings", "what", "why"),
    [
        ("gpt2", {"type": "yarn", "factor": 4}, "cannot scale this model's positions",
         "gpt2 has no single set of rotary positions"),
        ("gemma3", {"type": "yarn", "factor": 4}, "cannot scale this model's positions",
         "gemma3_text has no single set of rotary positions"),
        ("llama", {"factor": 4}, "cannot use rope_scaling", "it names no type"),
        ("llama", {"type": "dynamic", "factor": 4}, "cannot use rope_scaling of type dynamic",
         "the types that can train are linear, yarn, llama3, longrope"),
        ("llama", {"type": "yarn"}, "cannot use rope_scaling of type yarn", "it lacks factor"),
        ("llama", {"type": "llama3", "factor": 8}, "cannot use rope_scaling of type llama3",
         "it lacks low_freq_factor, high_freq_factor"),
    ],
)  # fmt: skip
def test_positions_that_cannot_be_scaled(name, settings, what, why):
    with pytest.raises(UserError) as caught:
        with_rope_scaling(tiny.config_of(name), settings)
    assert (caught.value.what, caught.value.why) == (what, why)


# -- adapters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "leaves"),
    [
        (("all-linear",), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (("q_proj", "v_proj"), {"q_proj", "v_proj"}),
        (("self_attn.o_proj", "q_proj"), {"o_proj", "q_proj"}),
    ],
)
def test_targets(targets, leaves):
    built, plan = built_from(tiny.reference("llama"), adapter=adapter(targets=targets))
    adapted = add_adapter(built, plan)
    assert len(adapted) == len(set(adapted)) == 4 * len(leaves)
    assert {n.rpartition(".")[2] for n in adapted} == leaves
    assert set(built.trainable()) == {f"{n}.lora_{m}" for n in adapted for m in "AB"}


def test_one_layer_by_its_full_name():
    built, plan = built_from(tiny.reference("llama"), adapter=adapter(targets=("model.layers.2.mlp.up_proj",)))
    assert add_adapter(built, plan) == ["model.layers.2.mlp.up_proj"]


@pytest.mark.parametrize("target", ["qproj", "proj", "lm_head"])
def test_unknown_target(target):
    """`proj` is a part of many names and the name of none; the head is no layer of the decoder."""
    built, plan = built_from(tiny.reference("llama"), adapter=adapter(targets=("q_proj", target)))
    with pytest.raises(UserError) as caught:
        add_adapter(built, plan)
    assert caught.value.what == f"no layer is called {target!r}"
    assert caught.value.why == (
        "the linear layers of this model are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    assert caught.value.fix == "use --lora-targets all-linear, or names from that list"


@pytest.mark.parametrize(
    ("bias", "trained"),
    [("none", set()), ("lora_only", {"q_proj.bias"}), ("all", {"q_proj.bias", "k_proj.bias", "v_proj.bias"})],
)
def test_bias(bias, trained):
    built, plan = built_from(tiny.reference("qwen2"), adapter=adapter(targets=("q_proj",), bias=bias))
    add_adapter(built, plan)
    biases = {".".join(n.split(".")[-2:]) for n in built.trainable() if ".lora_" not in n}
    assert biases == trained


def test_all_bias_trains_those_outside_linear_layers_too():
    built, plan = built_from(tiny.reference("gpt2"), adapter=adapter(bias="all"))
    add_adapter(built, plan)
    expected = {n for n, _ in tiny.reference("gpt2").named_parameters() if n.endswith("bias")}
    assert {n for n in built.trainable() if ".lora_" not in n} == expected
    assert "transformer.ln_f.bias" in expected


def test_start_depends_on_seed_and_name_only():
    model = tiny.reference("llama")
    starts = []
    for changes in (dict(), dict(adapter=adapter(targets=("v_proj", "q_proj"))), dict(seed=1), dict(base_format="nf4")):
        built, plan = built_from(model, **changes)
        add_adapter(built, plan)
        starts.append({n: linear.lora_A for n, linear in built.linears.items() if linear.lora_A is not None})
    whole, few, other_seed, packed = starts
    name = "model.layers.1.self_attn.q_proj"
    assert torch.equal(whole[name], few[name]) and torch.equal(whole[name], packed[name])
    assert not torch.equal(whole[name], other_seed[name])
    assert not torch.equal(whole[name], whole["model.layers.2.self_attn.q_proj"])


def test_scaling_rank_and_dora():
    built, plan = built_from(
        tiny.reference("llama"), base_format="nf4", adapter=adapter(rslora=True, dora=True, alpha=6)
    )
    add_adapter(built, plan)
    linear = built.linears["model.layers.0.mlp.up_proj"]
    assert linear.scaling == 6 / 2 and linear.lora_A.shape == (4, 64) and linear.lora_B.shape == (128, 4)
    assert torch.allclose(linear.magnitude, linear.dense_weight(torch.float32).norm(dim=1))
    assert "model.layers.0.mlp.up_proj.magnitude" in built.trainable()


def test_full_fine_tuning_has_no_adapter():
    built, plan = built_from(tiny.reference("llama"), method="full")
    assert add_adapter(built, plan) == [] and built.linears == {}
