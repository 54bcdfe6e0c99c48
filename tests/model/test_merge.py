"""Merged exports load in transformers and give peft's merged logits; bad requests are refused before any writing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fitune.errors import UserError
from fitune.model import cache, merge, shards
from fitune.model.adapter_io import write_adapter
from fitune.model.checkpoint import open_folder, read_header
from fitune.model.source import resolve
from fitune.model.weights import tensor_names
from fitune.plan import Adapter
from tests import tiny

SIZES = tiny.SIZES | tiny.TOKENS
MODELS = {
    "llama": {},
    "qwen2": {},
    "gemma2": {"head_dim": 8},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
TARGETS = {"phi3": ("qkv_proj", "down_proj"), "gpt2": ("c_attn", "c_proj")}
KINDS = {"plain": {}, "rslora": {"rslora": True}, "dora": {"dora": True}, "bias": {"bias": "all"}}


def base(folder: Path, kind: str, **changes) -> Path:
    from transformers import AutoConfig

    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if kind != "gpt2" or k in ("vocab_size", "bos_token_id", "eos_token_id")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **MODELS[kind], **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def adapt(folder: Path, model_folder: Path, targets: tuple[str, ...], **changes) -> Path:
    """Random adapter tensors for the model, written in PEFT's format."""
    from transformers.pytorch_utils import Conv1D

    spec = Adapter(**{"r": 4, "alpha": 6.0, "dropout": 0.0, "bias": "none", "targets": targets, **changes})
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    torch.manual_seed(1)
    tensors = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in targets:
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            tensors[f"{path}.lora_A"] = torch.randn(4, weight.shape[1]) * 0.2
            tensors[f"{path}.lora_B"] = torch.randn(weight.shape[0], 4) * 0.2
            if spec.dora:
                tensors[f"{path}.magnitude"] = weight.detach().norm(dim=1) * (1 + torch.rand(weight.shape[0]))
    if spec.bias == "all":
        tensors |= {name: torch.randn_like(p) for name, p in model.named_parameters() if name.endswith("bias")}
    write_adapter(folder, spec, {name: t.detach() for name, t in tensors.items()}, base_model=str(model_folder))
    return folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 35).reshape(2, 16)).logits


@pytest.mark.parametrize(
    "model, kind",
    [
        *(("llama", kind) for kind in ("plain", "rslora", "dora")),
        ("qwen2", "bias"),
        ("qwen2", "dora"),
        *((model, "plain") for model in ("gemma2", "phi3", "mixtral", "gpt2")),
        ("gpt2", "dora"),
    ],
)
def test_same_logits_as_peft(tmp_path: Path, model: str, kind: str) -> None:
    folder = base(tmp_path / "base", model)
    adapt(tmp_path / "adapter", folder, TARGETS.get(model, ("q_proj", "o_proj")), **KINDS[kind])
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    want = logits(peft.merge_and_unload())
    source = resolve(str(folder))
    done = merge.merge(source, tmp_path / "adapter", tmp_path / "out", dtype="fp32", max_shard_bytes=50_000)
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits(merged), want, atol=2e-5, rtol=1e-4)
    assert (logits(merged) - logits(AutoModelForCausalLM.from_pretrained(folder))).abs().max() > 0.01
    assert done.num_files == len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert done.num_bytes == sum(t.num_bytes for t in open_folder(tmp_path / "out").values())


def test_bf16_is_rounded_once_from_the_fp32_sum(tmp_path: Path) -> None:
    folder = base(tmp_path / "base", "llama")
    adapt(tmp_path / "adapter", folder, ("q_proj",))
    merge.merge(resolve(str(folder)), tmp_path / "adapter", tmp_path / "exact", dtype="fp32")
    merge.merge(resolve(str(folder)), tmp_path / "adapter", tmp_path / "out")
    exact, rounded = (dict(resolve(str(tmp_path / name)).iter_weights()) for name in ("exact", "out"))
    assert resolve(str(tmp_path / "out")).dtype == "bf16"
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)


def test_rows_are_merged_in_pieces_and_the_weight_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, a, b, magnitude = torch.randn(50, 8), torch.randn(4, 8), torch.randn(50, 4), torch.rand(50)
    before = weight.clone()
    spec = Adapter(r=4, alpha=6.0, dropout=0.0, bias="none", targets=(), dora=True)
    whole = merge.merged_weight(weight, spec, a, b, magnitude, torch.float32)
    monkeypatch.setattr(merge, "MERGE_ROWS_BYTES", 7 * 4 * 8)
    torch.testing.assert_close(merge.merged_weight(weight, spec, a, b, magnitude, torch.float32), whole)
    assert torch.equal(weight, before)
    torch.testing.assert_close(whole.norm(dim=1), magnitude)


def test_files_have_the_publishers_names(tmp_path: Path) -> None:
    folder = base(tmp_path / "base", "mixtral")
    adapt(tmp_path / "adapter", folder, ("q_proj",))
    merge.merge(resolve(str(folder)), tmp_path / "adapter", tmp_path / "out", dtype="fp32")
    assert set(open_folder(tmp_path / "out")) == set(open_folder(folder))
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_tied_head_is_written_once(tmp_path: Path) -> None:
    folder = base(tmp_path / "base", "llama", tie_word_embeddings=True)
    adapt(tmp_path / "adapter", folder, ("q_proj",))
    merge.merge(resolve(str(folder)), tmp_path / "adapter", tmp_path / "out", dtype="fp32", max_shard_bytes=50_000)
    assert "lm_head.weight" not in open_folder(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.num_bytes for t in open_folder(tmp_path / "out").values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_other_files_come_along(tmp_path: Path) -> None:
    from fitune.model.tokenizers import _bytes

    folder = base(tmp_path / "base", "llama")
    _bytes("test", 300).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')
    adapt(tmp_path / "adapter", folder, ("q_proj",))
    seen: list[tuple[int, int]] = []
    merge.merge(resolve(str(folder)), tmp_path / "adapter", tmp_path / "out", progress=lambda *at: seen.append(at))
    out = resolve(str(tmp_path / "out"))
    assert out.tokenizer()("hé").input_ids == resolve(str(folder)).tokenizer()("hé").input_ids
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"temperature": 0.7}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]
    assert [b for _, b in seen] == [seen[-1][0]] * len(seen) and [a for a, _ in seen] == sorted({a for a, _ in seen})


def test_memory_is_that_of_the_largest_tensor_not_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = base(tmp_path / "base", "llama", num_hidden_layers=12)
    adapt(tmp_path / "adapter", folder, ("q_proj",))
    monkeypatch.setattr(merge, "MERGE_ROWS_BYTES", 4096)
    source = resolve(str(folder))
    done = merge.merge(source, tmp_path / "adapter", tmp_path / "out", dtype="fp32", max_shard_bytes=1 << 30)
    largest = max(4 * torch.Size(shape).numel() for shape in tensor_names(source.meta_model()).values())
    header = read_header(tmp_path / "adapter" / "adapter_model.safetensors")
    adapter_bytes = sum(4 * torch.Size(shape).numel() for _, shape in header.values())
    assert done.ram_bytes == 2 * largest + adapter_bytes + 2 * 4096 < done.num_bytes
    with pytest.raises(UserError, match="not enough RAM for the merge"):
        merge.merge(source, tmp_path / "adapter", tmp_path / "again", ram_cap_bytes=done.ram_bytes // 2)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("gpt2", {"dora": True}), ("mixtral", {})])
def test_a_frugal_merge_is_the_same(kind: str, changes: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the memory is not there: merged weights lie on the disk, few rows at a time are in RAM."""
    folder = base(tmp_path / "base", kind)
    adapt(tmp_path / "adapter", folder, TARGETS.get(kind, ("q_proj",)), **changes)
    monkeypatch.setattr(merge, "MERGE_ROWS_BYTES", 4096)
    done = merge.merge(resolve(str(folder)), tmp_path / "adapter", tmp_path / "out")
    within = merge.merge(resolve(str(folder)), tmp_path / "adapter", tmp_path / "capped",
                         ram_cap_bytes=done.ram_bytes - 1)  # fmt: skip
    asked = merge.merge(resolve(str(folder)), tmp_path / "adapter", tmp_path / "asked", frugal=True)
    assert asked.ram_bytes == within.ram_bytes < done.ram_bytes
    files = {file.name for file in (tmp_path / "out").iterdir()}
    wanted = dict(resolve(str(tmp_path / "out")).iter_weights())
    for name in ("capped", "asked"):
        assert {file.name for file in (tmp_path / name).iterdir()} == files
        for key, tensor in resolve(str(tmp_path / name)).iter_weights():
            torch.testing.assert_close(tensor, wanted[key], rtol=2**-7, atol=1e-6)  # one unit of bfloat16


def test_random_weights_can_be_merged(tmp_path: Path) -> None:
    folder = base(tmp_path / "base", "mixtral")
    adapt(tmp_path / "adapter", folder, ("q_proj",))
    source = resolve(f"random:{folder / 'config.json'}", seed=5)
    merge.merge(source, tmp_path / "adapter", tmp_path / "out", dtype="fp32")
    assert set(open_folder(tmp_path / "out")) == set(open_folder(folder))
    got, want = dict(resolve(str(tmp_path / "out")).iter_weights()), dict(source.iter_weights())
    assert all(torch.equal(got[n], want[n].float()) for n in want if "q_proj" not in n)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(got[name], want[name])


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_adapter_of_another_model(tmp_path: Path) -> None:
    small, other = base(tmp_path / "small", "llama"), base(tmp_path / "other", "llama", hidden_size=64)
    adapt(tmp_path / "adapter", other, ("q_proj",))
    with pytest.raises(
        UserError,
        match=r"not one of this model \(LlamaForCausalLM\)\n  why: 4 tensors do not fit: "
        r"model.layers.0.self_attn.q_proj.lora_A is \[4, 64\], the weight is \[32, ",
    ):
        merge.merge(resolve(str(small)), tmp_path / "adapter", tmp_path / "out")
    adapt(tmp_path / "third", base(tmp_path / "deep", "llama", num_hidden_layers=3), ("q_proj",))
    with pytest.raises(UserError, match="layers.2.self_attn.q_proj.lora_A has no place in it"):
        merge.merge(resolve(str(small)), tmp_path / "third", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folder_in_use_and_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = base(tmp_path / "base", "llama")
    adapt(tmp_path / "adapter", folder, ("q_proj",))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="it exists and is not empty"):
        merge.merge(resolve(str(folder)), tmp_path / "adapter", tmp_path / "out")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"not enough disk space for the merged model\n.* free"):
        merge.merge(resolve(str(folder)), tmp_path / "adapter", tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    folder = base(tmp_path / "base", "llama")
    adapt(tmp_path / "adapter", folder, ("q_proj",))

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge.merge(resolve(str(folder)), tmp_path / "adapter", tmp_path / "out", progress=stop)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


def test_shards_split_and_refuse_another_order(tmp_path: Path) -> None:
    entries = [shards.Entry(name, "F32", (size,)) for name, size in (("a", 10), ("b", 10), ("c", 30), ("d", 5))]
    assert [[e.name for e in shard] for shard in shards.split(entries, 80)] == [["a", "b"], ["c"], ["d"]]
    with pytest.raises(AssertionError, match="b came, a was due"):
        shards.write(tmp_path, entries, iter([("b", torch.zeros(10))]), 1 << 20)
