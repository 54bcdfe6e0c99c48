"""GGUF files of several architectures give what transformers' own reader gives; damaged ones are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fitune.errors import UserError
from fitune.model import gguf as ours
from fitune.model.source import resolve
from fitune.model.weights import tied_names

HIDDEN, MLP, HEADS, KV_HEADS, LAYERS, VOCAB, EXPERTS = 64, 128, 4, 2, 2, 300, 4
EXPERT_MLP = 768  # what transformers takes whatever the file says
QUANTISED = (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, architecture: str, kind: gguf.GGMLQuantizationType, seed: int = 0, tied: bool = False) -> Path:
    """A small random model as the llama.cpp converter lays it out."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name(f"tiny {architecture}")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_key_length(HIDDEN // HEADS)
    writer.add_value_length(HIDDEN // HEADS)
    if architecture == "qwen3moe":
        expert_mlp = _shapes(architecture, tied)["blk.0.ffn_gate_exps.weight"][1]
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(expert_mlp)
    _tokenizer(writer)
    random = numpy.random.default_rng(seed)
    for name, shape in _shapes(architecture, tied).items():
        values = random.standard_normal(shape, dtype=numpy.float32)
        if len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def _tokenizer(writer: gguf.GGUFWriter) -> None:
    alphabet = sorted({chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))})
    tokens = ["<|bos|>", "<|eos|>", *alphabet, "he", "ll"]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (VOCAB - 2))
    writer.add_token_scores([0.0] * VOCAB)  # read for Gemma only
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _shapes(architecture: str, tied: bool) -> dict[str, tuple[int, ...]]:
    head = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HEADS * head, HIDDEN),
            "attn_k": (KV_HEADS * head, HIDDEN),
            "attn_v": (KV_HEADS * head, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
        }
        if architecture == "gemma2":
            layer |= {"post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)}
        if architecture == "qwen3moe":
            layer |= {
                "attn_q_norm": (head,),
                "attn_k_norm": (head,),
                "ffn_gate_inp": (EXPERTS, HIDDEN),
                "ffn_gate_exps": (EXPERTS, EXPERT_MLP, HIDDEN),
                "ffn_up_exps": (EXPERTS, EXPERT_MLP, HIDDEN),
                "ffn_down_exps": (EXPERTS, HIDDEN, EXPERT_MLP),
            }
        else:
            layer |= {"ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN), "ffn_down": (HIDDEN, MLP)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def reference(path: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tied = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


@pytest.mark.parametrize(
    "architecture, kind, tied",
    [
        ("llama", QUANTISED[0], True),
        ("llama", QUANTISED[1], False),
        ("gemma2", QUANTISED[1], True),
        ("qwen3moe", QUANTISED[1], False),
    ],
)
def test_same_weights_as_transformers(tmp_path: Path, monkeypatch, architecture, kind, tied: bool) -> None:
    path = write(tmp_path / "tiny.gguf", architecture, kind, tied=tied)
    want = reference(path)
    source = resolve(str(path))
    got = dict(source.iter_weights())
    assert list(got) == list(want) and source.dtype == "fp32"
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert source.notes == (
        f"tiny.gguf holds {kind.name} weights: they are dequantised to fp32, which holds every value exactly",
    )
    # The same file as if it were too large to be converted: read in place, rounded to bf16.
    monkeypatch.setattr(ours, "CONVERT_BELOW_PARAMS", 0)
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path / "other cache"))
    large = resolve(str(path))
    assert (large.path, large.dtype) == (path, "bf16") and "which rounds them" in large.notes[0]
    assert not list((tmp_path / "other cache").rglob("*.safetensors"))
    got = dict(large.iter_weights())
    assert list(got) == list(want)
    assert all(torch.equal(got[name], want[name].bfloat16()) for name in want)


def test_experts_of_another_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "EXPERT_MLP", 32)
    source = resolve(str(write(tmp_path / "tiny.gguf", "qwen3moe", QUANTISED[1])))
    assert source.config.moe_intermediate_size == 32
    assert source.weight_shapes()["model.layers.0.mlp.experts.gate_up_proj"] == (EXPERTS, 64, HIDDEN)


def test_converted_once_and_again_when_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moved").mkdir()
    path = write(tmp_path / "tiny.gguf", "llama", QUANTISED[1])
    first = dict(resolve(str(path)).iter_weights())
    convert = ours._convert
    calls: list[Path] = []
    monkeypatch.setattr(ours, "_convert", lambda *at: (calls.append(at[0]), convert(*at)))
    assert resolve(str(path)).weight_names() == list(first) and not calls
    shutil.copyfile(path, tmp_path / "moved" / path.name)
    assert resolve(str(tmp_path / "moved" / path.name)).weight_names() == list(first) and not calls
    write(path, "llama", QUANTISED[1], seed=1)
    second = dict(resolve(str(path)).iter_weights())
    assert len(calls) == 1
    assert not torch.equal(first["model.norm.weight"], second["model.norm.weight"])


def test_tokenizer_is_that_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "llama", QUANTISED[1])
    ids = resolve(str(path)).tokenizer()("hello 好").input_ids
    assert ids == AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")("hello 好").input_ids
    assert 2 < len(ids) < len("hello 好".encode())  # merges are used


def test_a_failed_conversion_leaves_no_half_cache(tmp_path: Path, _cache: Path, monkeypatch) -> None:
    path = write(tmp_path / "tiny.gguf", "llama", QUANTISED[1])

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ours.shards, "write", broken)
    with pytest.raises(KeyboardInterrupt):
        resolve(str(path))
    monkeypatch.undo()
    monkeypatch.setenv("FITUNE_CACHE", str(_cache))
    assert not any(p.is_file() for p in _cache.rglob("*"))
    assert len(dict(resolve(str(path)).iter_weights())) == 21


def test_unquantised_files_keep_their_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "CONVERT_BELOW_PARAMS", 0)
    path = write(tmp_path / "tiny.gguf", "llama", gguf.GGMLQuantizationType.F16)
    source = resolve(str(path))
    assert source.dtype == "fp16" and source.notes == ("tiny.gguf holds F16 weights",)


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_files_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no GGUF file at .*absent.gguf"):
        resolve(str(tmp_path / "absent.gguf"))
    (tmp_path / "page.gguf").write_bytes(b"<html>not found</html>")
    with pytest.raises(UserError, match=r"page.gguf is not a GGUF file\n  why: it does not begin with GGUF"):
        resolve(str(tmp_path / "page.gguf"))
    whole = write(tmp_path / "tiny.gguf", "llama", QUANTISED[1]).read_bytes()
    for length in (6, 100, len(whole) // 2, len(whole) - 5000):
        (tmp_path / "half.gguf").write_bytes(whole[:length])
        with pytest.raises(UserError, match="half.gguf is damaged or of an unknown GGUF version"):
            resolve(str(tmp_path / "half.gguf"))


@pytest.mark.parametrize(
    ("length", "why"), [(10**6, "it ends in the middle of a value"), (2**40, "it has a list of 1,0")]
)
def test_a_list_whose_length_is_damaged(tmp_path: Path, length: int, why: str) -> None:
    content = bytearray(write(tmp_path / "tiny.gguf", "llama", QUANTISED[1]).read_bytes())
    at = (
        content.index(key := b"tokenizer.ggml.token_type") + len(key) + 8
    )  # its type and its values' type stand between
    content[at : at + 8] = length.to_bytes(8, "little")
    (tmp_path / "tiny.gguf").write_bytes(content)
    with pytest.raises(UserError, match=f"tiny.gguf is damaged or of an unknown GGUF version\n  why: {why}"):
        resolve(str(tmp_path / "tiny.gguf"))


def test_architecture_transformers_cannot_read(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "rwkv6", QUANTISED[1])
    with pytest.raises(UserError, match=r"cannot read the model in .*\n  why: transformers: .*rwkv6.*not supported"):
        resolve(str(path))


def test_missing_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = _shapes("llama", False)
    del shapes["blk.1.ffn_up.weight"]
    monkeypatch.setitem(globals(), "_shapes", lambda *_: shapes)
    path = write(tmp_path / "tiny.gguf", "llama", QUANTISED[1])
    with pytest.raises(UserError, match=r"1 missing: model.layers.1.mlp.up_proj.weight"):
        resolve(str(path))
