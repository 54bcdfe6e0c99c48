"""The matrices read off a configuration are those of the model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fitune.catalog import models
from fitune.speed.shape import decoder_of
from tests import tiny

PROJECTED = "facebook/opt-350m"  # its embedding is narrower than its layers: 7 % too many counted, as documented


def test_every_catalog_model_has_its_parameters():
    """Stored and active, within what routers, norms, biases and convolutions take."""
    wrong = {}
    for shape in models.all_models():
        decoder = decoder_of(shape)
        positions = shape.max_position_embeddings * shape.hidden_size if shape.model_type in ("gpt2", "opt") else 0
        embedding = 0 if decoder.tied else decoder.hidden * decoder.vocab
        stored = (decoder.params + positions) / shape.params_total - 1
        active = (decoder.active_params + embedding + positions) / shape.params_active - 1
        if shape.id != PROJECTED and (abs(stored) > 0.004 or abs(active) > 0.007 or not decoder.known):
            wrong[shape.id] = (stored, active, decoder.known)
    assert not wrong


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "falcon", "gemma3", "gpt2", "gpt_neox", "llama", "phi3", "qwen3_5", "qwen3_moe"]
)
def test_linears_are_those_of_transformers(name):
    """Names and sizes of every linear module of every layer, from the real configuration class."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    from fitune.model.build import find_layers

    config = tiny.config_of(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = getattr(*find_layers(model)[:2])
    for layer, counted in zip(layers, decoder_of(config).layers, strict=True):
        real = sorted(
            (n.rpartition(".")[2], tuple(m.weight.shape) if isinstance(m, nn.Linear) else tuple(m.weight.shape)[::-1])
            for n, m in layer.named_modules()
            if isinstance(m, (nn.Linear, Conv1D))
        )
        assert sorted((m.name, (m.outputs, m.inputs)) for m in counted.linears) == real
        fused = sum(p.numel() for p in layer.parameters() if p.dim() == 3 and p.shape[1] > 1 and p.shape[2] > 4)
        assert (counted.experts.stored * counted.experts.params_each if counted.experts else 0) == fused


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-4B", "deepseek-ai/DeepSeek-V2-Lite", "google/gemma-2-2b",
        "google/gemma-3-1b-it", "meta-llama/Llama-3.1-8B", "microsoft/phi-4", "mistralai/Mistral-7B-v0.3", "gpt2",
    ],
)  # fmt: skip
def test_a_configuration_gives_what_the_catalog_gives(name):
    """With the real class's defaults and layer types in place of the family's rules."""
    from transformers import AutoConfig

    shape = models.find(name)
    if shape is None:
        pytest.skip(f"{name} is not in the catalog")
    assert decoder_of(AutoConfig.for_model(**models.to_hf_config_dict(shape))) == decoder_of(shape)


def test_an_unknown_hybrid_is_counted_as_attention():
    config = dict(
        model_type="newhybrid", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        vocab_size=100, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    decoder = decoder_of(config)
    assert not decoder.known and [layer.kind for layer in decoder.layers] == ["linear", "attention"]
    assert decoder.layers[0].params == decoder.layers[1].params


def test_windows_follow_the_family():
    windows = [layer.window for layer in decoder_of(models.find("google/gemma-3-1b-it")).layers]
    assert windows[:6] == [windows[0]] * 5 + [None] and windows[0] is not None
    assert {layer.window for layer in decoder_of(models.find("meta-llama/Llama-3.1-8B")).layers} == {None}
    assert [layer.capped for layer in decoder_of(models.find("google/gemma-2-2b")).layers] == [True] * 26


def test_an_unknown_family_is_said_to_be_one():
    config = dict(
        model_type="somethingnew", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        vocab_size=100,
    )  # fmt: skip
    decoder = decoder_of(config)
    assert not decoder.known and decoder.layers[0].params == 4 * 64 * 64 + 3 * 64 * 128


def test_what_holds_a_catalog_shape_is_that_shape():
    shape = models.find("llama-3.1-8b")
    assert decoder_of(SimpleNamespace(shape=shape)) == decoder_of(shape)
