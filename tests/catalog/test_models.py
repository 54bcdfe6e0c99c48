"""Model names, and configurations whose parameter count is the published one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fitune.catalog import models

FACTS = Path(__file__).resolve().parents[2] / ".." / "shared" / "catalog" / "models"
# transformers keeps the routing bias of DeepSeek-V3's 58 expert layers (256 experts each) as a buffer.
KNOWN_DIFFERENCE = {"deepseek-ai/DeepSeek-V3": -58 * 256}


@pytest.mark.parametrize(
    ("name", "model_id", "catalog_id"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("META-LLAMA/llama-3.1-8b", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M"),
        ("mistral-7b", "mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("gpt2", "gpt2", "openai-community/gpt2"),
        ("unsloth/Llama-3.2-1B-Instruct", "unsloth/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B"),
        ("LLM-Research/Meta-Llama-3.1-8B-Instruct", "LLM-Research/Meta-Llama-3.1-8B-Instruct",
         "meta-llama/Llama-3.1-8B"),
    ],
)  # fmt: skip
def test_finds_ids_aliases_and_short_names(name, model_id, catalog_id):
    shape = models.find(name)
    assert shape is not None
    assert (shape.id, shape.catalog_id) == (model_id, catalog_id)


@pytest.mark.parametrize(
    "name",
    ["llama-3.1", "Qwen/Qwen2.5-7B-Instruct-AWQ", "someone/Llama-3.1-8B", "unsloth/gemma-2-2b-bnb-4bit", "qwen", ""],
)
def test_does_not_guess(name):
    assert models.find(name) is None


def test_nearest_names_the_likely_models():
    assert "Qwen/Qwen2.5-7B" in models.nearest("qwen-2.5-8b")
    assert models.nearest("meta-llama/Llama-3-8B", 2)[0] == "meta-llama/Llama-3.1-8B"
    assert len(models.nearest("qwen", 2)) == 2


def test_nothing_is_suggested_for_a_name_that_is_like_none():
    assert models.nearest("zzz", 5) == models.nearest("foo/bar") == []
    assert models.hint("lama-3.1-8b").startswith("the nearest names: meta-llama/Llama-3.1-8B, ")
    assert models.hint("zzz") == "names the catalog knows are like smollm2, Qwen/Qwen3-8B, meta-llama/Llama-3.1-8B"
    assert all(models.find(name) for name in models.EXAMPLES)


def test_every_id_and_alias_finds_its_row_and_names_its_source():
    shapes = models.all_models()
    assert len(shapes) == len({shape.id for shape in shapes}) == 96
    for shape in shapes:
        for name in (shape.id, *shape.aliases):
            found = models.find(name)
            assert found is not None and (found.id, found.catalog_id) == (name, shape.id)
        assert shape.sources and shape.licence
        assert json.loads(json.dumps(shape.as_dict()))["params_total"] == shape.params_total


def test_models_without_a_class_name_the_nearest_and_a_native_one_of_similar_size():
    foreign = [shape for shape in models.all_models() if not shape.native]
    assert {shape.model_type for shape in foreign} == {"internlm", "internlm2", "baichuan", "chatglm"}
    for shape in foreign:
        other = models.find(shape.native_alternative)
        assert other is not None and other.native
        assert 0.9 < other.params_total / shape.params_total < 1.1
        assert shape.nearest_class in ("llama", "glm")
    note = models.find("internlm2_5-7b").training_note
    assert note == (
        "internlm/internlm2_5-7b has no class in transformers: planning uses the llama class (q, k and v are stored as "
        "one matrix); training needs the publisher's remote code, or a native model of similar size: Qwen/Qwen2.5-7B"
    )
    converted = models.find("THUDM/glm-4-9b-chat-hf")
    assert converted.native and converted.training_note == ""


def _parameters(shape: models.ModelShape) -> tuple[int, object]:
    """Parameters of the model built on meta (tied ones once), and the model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = models.to_hf_config_dict(shape)
    try:
        config = AutoConfig.for_model(**values)
    except ValueError as error:
        if "model identifier" in str(error) or "Unrecognized" in str(error):
            pytest.skip(f"the installed transformers has no model type {values['model_type']}")
        raise
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters()), model


@pytest.mark.parametrize("shape", models.all_models(), ids=lambda shape: shape.id)
def test_configuration_gives_exactly_the_parameters_of_the_catalog(shape):
    count, model = _parameters(shape)
    assert count - shape.params_total == KNOWN_DIFFERENCE.get(shape.id, 0)
    assert type(model).__name__ == models.to_hf_config_dict(shape)["architectures"][0]
    if shape.native and "ForConditionalGeneration" not in shape.architectures[0]:
        assert type(model).__name__ == shape.architectures[0]


def test_configuration_carries_what_does_not_show_in_the_count():
    from transformers import AutoConfig

    def config(name: str):
        return AutoConfig.for_model(**models.to_hf_config_dict(models.find(name)))

    llama = config("llama-3.1-8b")
    assert llama.rope_parameters["rope_type"] == "llama3" and llama.rope_parameters["factor"] == 8.0
    assert llama.rope_parameters["rope_theta"] == 500000.0 and llama.max_position_embeddings == 131072
    gemma = config("google/gemma-3-27b-it")
    assert gemma.query_pre_attn_scalar == 168 and gemma.sliding_window == 1024
    assert gemma.layer_types.count("full_attention") == 10
    assert gemma.rope_parameters["full_attention"]["factor"] == 8.0
    assert gemma.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0
    assert config("microsoft/Phi-4-mini-instruct").rope_parameters["partial_rotary_factor"] == 0.75
    assert config("pythia-1b").rope_parameters["partial_rotary_factor"] == 0.25
    qwen = config("Qwen/Qwen3.5-4B")
    assert qwen.layer_types[:4] == ["linear_attention"] * 3 + ["full_attention"]
    assert config("deepseek-ai/DeepSeek-V2-Lite").q_lora_rank is None
    assert config("facebook/opt-350m").do_layer_norm_before is False
    assert config("THUDM/chatglm3-6b").pad_token_id == 0


@pytest.mark.skipif(not FACTS.is_dir(), reason="the folder of collected facts is not beside this checkout")
def test_shapes_agree_with_the_collected_facts():
    ours = {shape.id: shape for shape in models.all_models()}
    files = sorted(FACTS.glob("*.json"))
    assert len(files) == len(ours)
    for file in files:
        fact = json.loads(file.read_text(encoding="utf-8"))
        shape = ours[fact["id"]]
        keys = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        keys += "vocab_size rope_theta sliding_window params_total params_active licence chat_template dtype"
        for key in keys.split():
            assert getattr(shape, key) == fact[key], (shape.id, key)
