"""What a name resolves to, with and without weights, and what is said when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fitune.errors import UserError
from fitune.model import bundled
from fitune.model.source import resolve
from tests import tiny

SMALL = tiny.SIZES


def config_file(folder: Path, **values) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder / "config.json"


# ---- planning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, kind, layers",
    [
        ("meta-llama/Llama-3.1-8B", "LlamaConfig", 32),
        ("llama-3.1-8b", "LlamaConfig", 32),
        ("smollm2", "LlamaConfig", 30),
        ("google/gemma-3-4b-it", "Gemma3TextConfig", 34),
        ("openai/gpt-oss-20b", "GptOssConfig", 24),
    ],
)
def test_planning_from_the_catalog(name: str, kind: str, layers: int) -> None:
    source = resolve(name, weights=False)
    assert (source.kind, type(source.config).__name__, source.config.num_hidden_layers) == ("shape", kind, layers)
    assert source.path is None
    with pytest.raises(UserError, match=f"{name} has no weights here"):
        source.iter_weights()


def test_planning_a_folder_or_a_config_alone(tmp_path: Path) -> None:
    path = config_file(tmp_path / "m", model_type="mistral", dtype="float16", **SMALL)
    for name in (path, path.parent):
        source = resolve(str(name), weights=False)
        assert source.dtype == "fp16" and source.weight_shapes()["model.embed_tokens.weight"] == (300, 32)
    with pytest.raises(UserError, match=r"config.json has no weights\n.*\n  fix: give the model's folder, or random:"):
        resolve(str(path))


def test_planning_models_without_a_class(tmp_path: Path) -> None:
    source = resolve("internlm/internlm2-chat-7b", weights=False)
    assert "has no class in transformers" in source.notes[0]
    values = {"model_type": "neverheard", "auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}, **SMALL}
    path = config_file(tmp_path / "x", **values)
    source = resolve(str(path.parent), weights=False)
    assert type(source.config).__name__ == "LlamaConfig" and source.config.num_key_value_heads == 2
    assert "this plan takes the llama class" in source.notes[0]


def test_planning_a_quantised_checkpoint_says_so(tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "bits": 4}
    path = config_file(tmp_path / "m", model_type="llama", quantization_config=awq, **SMALL)
    assert "it is quantised (awq, 4 bit): training needs the 16-bit original" in resolve(str(path), weights=False).notes


def test_references_for_adapter_files(tmp_path: Path) -> None:
    assert resolve("llama-3.1-8b", weights=False).reference == "meta-llama/Llama-3.1-8B"
    path = config_file(tmp_path / "m", model_type="llama", **SMALL)
    assert resolve(str(path.parent), weights=False).reference in (str(path.parent), str(path.parent.resolve()))
    assert resolve("smollm2", weights=False).reference == bundled.MODEL_ID


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    """transformers 5 writes infinity as an object; Mamba-2's configurations have one."""
    limit = [0.0, {"__float__": "Infinity"}]
    path = config_file(tmp_path / "m", model_type="mamba2", time_step_limit=limit, hidden_size=32, num_heads=8,
                       head_dim=8, num_hidden_layers=2)  # fmt: skip
    assert resolve(str(path), weights=False).config.time_step_limit == [0.0, float("inf")]


# ---- random weights --------------------------------------------------------------------------------------------------


def test_random_weights_depend_on_seed_and_name_only(tmp_path: Path) -> None:
    path = config_file(tmp_path / "m", model_type="llama", dtype="float32", attention_bias=True, **SMALL)
    source = resolve(f"random:{path}", seed=3)
    whole = dict(source.iter_weights())
    assert list(whole) == source.weight_names() and source.dtype == "fp32" and source.kind == "random"
    for name in reversed(source.weight_names()):
        torch.rand(3)  # the global generator has no say
        assert torch.equal(dict(source.iter_weights({name}))[name], whole[name]), name
    other = dict(resolve(f"random:{path}", seed=4).iter_weights())
    assert not torch.equal(other["lm_head.weight"], whole["lm_head.weight"])
    weights = [t for name, t in whole.items() if t.dim() == 2]
    assert len({round(t[0, 0].item(), 6) for t in weights}) == len(weights)


def test_random_weights_have_the_models_own_initialisation(tmp_path: Path) -> None:
    path = config_file(
        tmp_path / "m", model_type="llama", initializer_range=0.05, attention_bias=True, **{**SMALL, "hidden_size": 256}
    )
    got = dict(resolve(f"random:{path}").iter_weights())
    assert {t.dtype for t in got.values()} == {torch.bfloat16}
    assert abs(got["model.embed_tokens.weight"].float().std().item() - 0.05) < 0.002
    assert torch.all(got["model.norm.weight"] == 1) and torch.all(got["model.layers.1.self_attn.q_proj.bias"] == 0)
    gemma = config_file(tmp_path / "g", model_type="gemma2", head_dim=8, **SMALL)  # its norms are stored minus one
    assert torch.all(dict(resolve(f"random:{gemma}").iter_weights())["model.norm.weight"] == 0)


@pytest.mark.parametrize(
    "kind, more",
    [
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4}),
        ("mixtral", {"num_local_experts": 4}),
        ("phi3", {}),
        ("gpt2", {}),
        (
            "glm4_moe",
            {
                "head_dim": 8,
                "n_routed_experts": 4,
                "moe_intermediate_size": 16,
                "first_k_dense_replace": 1,
                "num_experts_per_tok": 2,
            },
        ),
    ],
)
def test_random_weights_of_other_families_are_finite_and_run(tmp_path: Path, kind: str, more: dict) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 300} if kind == "gpt2" else SMALL
    path = config_file(tmp_path / "m", model_type=kind, dtype="float32", **{"pad_token_id": 0, **sizes, **more})
    source = resolve(f"random:{path}")
    model = AutoModelForCausalLM.from_config(source.config)
    missing, unexpected = model.load_state_dict(dict(source.iter_weights()), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(1, 9)[None]).logits).all()


def test_random_weights_of_a_catalog_shape() -> None:
    source = resolve("random:meta-llama/Llama-3.1-8B")
    name, tensor = next(iter(source.iter_weights({"model.layers.31.self_attn.k_proj.weight"})))
    assert (name, tuple(tensor.shape)) == ("model.layers.31.self_attn.k_proj.weight", (1024, 4096))
    assert any("random weights with seed 0" in note for note in source.notes)


def test_random_models_have_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = resolve(f"random:{config_file(tmp_path / 'm', model_type='llama', **SMALL)}").tokenizer()
    ids = tokenizer("Grüße, 世界").input_ids
    assert len(ids) == len("Grüße, 世界".encode()) and max(ids) < 256
    assert tokenizer.decode(ids) == "Grüße, 世界"
    assert sorted((tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)) == [256, 257, 258]
    tiny = config_file(tmp_path / "t", model_type="llama", **{**SMALL, "vocab_size": 100})
    with pytest.raises(UserError, match="its vocabulary of 100 is too small for bytes"):
        resolve(f"random:{tiny}").tokenizer()


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, message",
    [
        ("", "no model given"),
        ("random:", "no model is named after random:"),
        ("lama-3.1-8b", r"unknown model 'lama-3.1-8b'\n.*\n  fix: .*the nearest names: .*Llama-3.1-8B"),
        ("./nowhere", "no model folder at nowhere"),
        ("/no/such/place", "no model folder at /no/such/place"),
        ("a/b/c", "unknown model 'a/b/c'"),
    ],
)
@pytest.mark.parametrize("weights", [True, False])
def test_names_that_mean_nothing(name: str, message: str, weights: bool) -> None:
    with pytest.raises(UserError, match=message):
        resolve(name, weights=weights)


def test_folders_and_files_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a model folder\n  why: it has no config.json"):
        resolve(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"  fix: name the GGUF file: .*x.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="it is an adapter, not a model"):
        resolve(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match=r"notes.txt is not a model\n"):
        resolve(str(tmp_path / "notes.txt"))
    for text, why in (("{", "it is not JSON"), ("[]", "it is not the configuration of a model")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=why):
            resolve(str(tmp_path))


@pytest.mark.parametrize(
    "quantisation, shown",
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq, 4 bit"),
        ({"quant_method": "awq", "bits": 4}, "awq, 4 bit"),
        ({"load_in_4bit": True}, "bitsandbytes, 4 bit"),
        ({"quant_method": "fp8"}, "fp8"),
    ],
)
def test_quantised_checkpoints(tmp_path: Path, quantisation: dict, shown: str) -> None:
    path = config_file(tmp_path / "Llama-3.1-8B-GPTQ", model_type="llama", quantization_config=quantisation, **SMALL)
    with pytest.raises(
        UserError,
        match=rf"is already quantised \({shown}\)\n.*\n  fix: use the original 16-bit model "
        r"\(meta-llama/Llama-3.1-8B\)",
    ):
        resolve(str(path.parent))


def test_fp8_weights_without_a_word_in_the_configuration(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: t.to(torch.float8_e4m3fn) for name, t in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"already quantised \(fp8 weights\)"):
        resolve(str(tmp_path))


def test_remote_code_is_off_unless_asked_for(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "mymodel",
        "architectures": ["MyForCausalLM"],
        "auto_map": {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyForCausalLM"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\nclass MyConfig(LlamaConfig):\n"
        "    model_type = 'mymodel'\n\n\nclass MyForCausalLM(LlamaForCausalLM):\n    config_class = MyConfig\n"
    )
    with pytest.raises(
        UserError,
        match=r"needs code that is shipped with the model\n  why: .*model type mymodel.*\n"
        r"  fix: .*--trust-remote-code",
    ):
        resolve(str(tmp_path))
    source = resolve(str(tmp_path), trust_remote_code=True)
    assert type(source.meta_model()).__name__ == "MyForCausalLM" and len(dict(source.iter_weights())) == 21
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"has an unknown model type \(mymodel\)\n  why: transformers .* has no class"):
        resolve(str(tmp_path))


def test_models_of_the_catalog_that_need_remote_code() -> None:
    with pytest.raises(UserError, match=r"internlm2.*needs code.*\n.*\n  fix: train a native model of similar size: "):
        resolve("internlm/internlm2-chat-7b")


def test_not_a_language_model(tmp_path: Path) -> None:
    config_file(tmp_path / "m", model_type="vit")
    for weights in (True, False):
        with pytest.raises(UserError, match="model type vit cannot be trained as a language model"):
            resolve(str(tmp_path / "m"), weights=weights)


def test_tokenizer_missing_or_broken(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no tokenizer here"):
        resolve(str(tmp_path)).tokenizer()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot read the tokenizer of"):
        resolve(str(tmp_path)).tokenizer()
