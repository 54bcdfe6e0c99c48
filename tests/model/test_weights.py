"""Streamed weights equal what `from_pretrained` loads, for every family, sharded; bad files are named."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fitune.errors import UserError
from fitune.model import checkpoint, weights
from fitune.model import source as sources
from tests import tiny

SIZES = tiny.SIZES | tiny.TOKENS | {"vocab_size": 96}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "phi3": {},
    "olmo2": {},
    "glm4": {"head_dim": 8},
    "mixtral": EXPERTS,
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"head_dim": 8, **EXPERTS},
    "glm4_moe": {
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


def make(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16, shard: str = "20KB", **changes) -> Path:
    """A small random model of a family, saved in several shards."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **FAMILIES.get(kind, {}), **changes})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if "e_score" in n)):
            tensor.normal_()  # norms too: equal ones would hide a mix-up
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def expected(folder: Path) -> dict[str, torch.Tensor]:
    """The loaded model's state, tied tensors under their first name only."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tied = weights.tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


@pytest.mark.parametrize("kind", FAMILIES)
def test_stream_equals_from_pretrained(tmp_path: Path, kind: str) -> None:
    make(tmp_path, kind)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    source = sources.resolve(str(tmp_path))
    got = dict(source.iter_weights())
    want = expected(tmp_path)
    assert list(got) == list(want) == source.weight_names()
    for name, tensor in want.items():
        assert torch.equal(got[name].to(tensor.dtype), tensor), name
    assert source.dtype == "bf16"


def test_experts_are_stored_one_by_one_and_fused_on_the_way(tmp_path: Path) -> None:
    make(tmp_path, "mixtral")
    stored = checkpoint.open_folder(tmp_path)
    assert any("experts.3.w1" in name for name in stored)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    fused = dict(sources.resolve(str(tmp_path)).iter_weights({name}))
    assert {name: tuple(t.shape) for name, t in fused.items()} == {name: (4, 96, 32)}
    one = [stored[n] for n in stored if "layers.1." in n and "experts.2.w1" in n][0].read()
    assert torch.equal(fused[name][2, :48], one)


def test_layers_come_together_in_order(tmp_path: Path) -> None:
    make(tmp_path, "llama", num_hidden_layers=11)
    names = [name for name, _ in sources.resolve(str(tmp_path)).iter_weights()]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert names[0] == "model.embed_tokens.weight" and names[-1] == "lm_head.weight"


def test_stored_dtype_is_kept_and_named(tmp_path: Path) -> None:
    for name, dtype in (("fp16", torch.float16), ("fp32", torch.float32)):
        make(tmp_path / name, "qwen2", dtype)
        source = sources.resolve(str(tmp_path / name))
        assert source.dtype == name
        assert {t.dtype for _, t in source.iter_weights()} == {dtype}


def multimodal(folder: Path) -> transformers.PreTrainedModel:
    text = {**SIZES, "head_dim": 8}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="30KB")
    return model


def test_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    model = multimodal(tmp_path)
    source = sources.resolve(str(tmp_path))
    assert type(source.config).__name__ == "Gemma3TextConfig"
    assert any("only the text part of this multimodal model" in note for note in source.notes)
    body = model.model.language_model.state_dict()
    got = dict(source.iter_weights())
    assert list(got) == source.weight_names()
    assert set(got) == {f"model.{name}" for name in body}
    for name, tensor in body.items():
        assert torch.equal(got[f"model.{name}"], tensor), name


def test_text_part_under_the_names_of_older_files(tmp_path: Path) -> None:
    model = multimodal(tmp_path)
    old = {}
    for file in tmp_path.glob("*.safetensors"):
        old |= load_file(file)
        file.unlink()
    (tmp_path / checkpoint.INDEX).unlink()
    old = {name.replace("model.language_model.", "language_model.model."): t for name, t in old.items()}
    save_file({name.replace("model.vision", "vision"): t for name, t in old.items()}, tmp_path / "model.safetensors")
    assert "language_model.model.norm.weight" in checkpoint.open_folder(tmp_path)
    got = dict(sources.resolve(str(tmp_path)).iter_weights())
    assert torch.equal(got["model.norm.weight"], model.model.language_model.norm.weight)
    assert len(got) == len(model.model.language_model.state_dict())


def test_body_saved_without_its_head_is_refused_unless_tied(tmp_path: Path) -> None:
    make(tmp_path / "whole", "llama", tie_word_embeddings=True)
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole").model.save_pretrained(tmp_path / "body")
    assert "layers.0.mlp.up_proj.weight" in checkpoint.open_folder(tmp_path / "body")
    assert len(dict(sources.resolve(str(tmp_path / "body")).iter_weights())) == 20
    config = json.loads((tmp_path / "body" / "config.json").read_text())
    (tmp_path / "body" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(UserError, match=r"1 missing: lm_head\.weight"):
        sources.resolve(str(tmp_path / "body"))


def test_tied_head_stored_twice(tmp_path: Path) -> None:
    make(tmp_path, "llama", shard="1GB", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    source = sources.resolve(str(tmp_path))
    assert source.config.tie_word_embeddings and "lm_head.weight" not in dict(source.iter_weights())
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    source = sources.resolve(str(tmp_path))
    assert not source.config.tie_word_embeddings
    assert any("kept apart" in note for note in source.notes)
    got = dict(source.iter_weights())
    assert torch.equal(got["lm_head.weight"], tensors["lm_head.weight"])
    assert torch.equal(got["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])


def test_mxfp4_is_dequantised_exactly(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    make(tmp_path, "gpt_oss", shard="1GB", hidden_size=64, intermediate_size=64)
    tensors = load_file(tmp_path / "model.safetensors")
    want = {}
    generator = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 134, blocks.shape[:3], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        want[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = sources.resolve(str(tmp_path))
    assert any("MXFP4" in note for note in source.notes)
    got = dict(source.iter_weights())
    assert len(want) == 4
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor.to(torch.bfloat16)), name


# ---- bad input -------------------------------------------------------------------------------------------------------


def change(folder: Path, edit) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        (lambda t: t.update({"score.weight": torch.zeros(1, 32)}), r"1 unexpected: score\.weight"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(33)}),
            r"shape: model.norm.weight is .33., expected .32.",
        ),
    ],
)
def test_tensors_that_do_not_match(tmp_path: Path, edit, message: str) -> None:
    make(tmp_path, "llama", shard="1GB")
    change(tmp_path, edit)
    with pytest.raises(UserError, match=message):
        sources.resolve(str(tmp_path))


def test_expert_of_another_size(tmp_path: Path) -> None:
    make(tmp_path, "mixtral", shard="1GB")
    name = next(n for n in load_file(tmp_path / "model.safetensors") if "experts.1.w1" in n)
    change(tmp_path, lambda t: t.update({name: torch.zeros(47, 32)}))
    with pytest.raises(UserError, match=r"cannot convert the weights of .*\n.*gate_up_proj from 8 stored tensors"):
        dict(sources.resolve(str(tmp_path)).iter_weights())


def test_truncated_and_broken_files(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = victim.read_bytes()
    for content, why in (
        (whole[:-10], "its header promises"),
        (whole[:5], "nearly empty"),
        (b"", "nearly empty"),
        (struct.pack("<Q", 40) + b"{" * 40, "not JSON"),
        (b"<html>not found</html>" * 9, "promises"),
    ):
        victim.write_bytes(content)
        with pytest.raises(UserError, match=f"{victim.name} is damaged or not a safetensors file\n  why: .*{why}"):
            sources.resolve(str(tmp_path))


def test_missing_shard_and_broken_index(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(UserError, match=f"incomplete\n  why: 1 of .* weight files are missing: {victim.name}"):
        sources.resolve(str(tmp_path))
    (tmp_path / checkpoint.INDEX).write_text("{")
    with pytest.raises(UserError, match="not an index of safetensors files"):
        sources.resolve(str(tmp_path))


def test_pickles_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "llama", shard="1GB")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"only as pickle \(pytorch_model.bin\)\n.*any code.*\n.*save_pretrained"):
        sources.resolve(str(tmp_path))
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="has no weights"):
        sources.resolve(str(tmp_path))
