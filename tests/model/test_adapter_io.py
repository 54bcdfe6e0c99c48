"""Adapters go to PEFT and back: peft itself loads what is written here, and what it writes is read here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fitune.errors import UserError
from fitune.model.adapter_io import read_adapter, write_adapter
from fitune.plan import Adapter

TARGETS = ("q_proj", "down_proj")
KINDS = {
    "plain": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "bias all": {"bias": "all"},
    "bias of the adapted": {"bias": "lora_only"},
    "everything": {"rslora": True, "dora": True, "bias": "all"},
}


def base(folder: Path) -> Path:
    """A tiny Llama with biases, saved."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


def adapter(**changes) -> Adapter:
    return Adapter(**{"r": 4, "alpha": 6.0, "dropout": 0.0, "bias": "none", "targets": TARGETS, **changes})


def tensors_for(folder: Path, spec: Adapter, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random adapter tensors, and biases where they are trained, in our names."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.4

    tensors = {}
    for name, weight in weights.items():
        path, _, last = name.rpartition(".")
        inside = path.rpartition(".")[2] in spec.targets
        if last == "weight" and inside:
            tensors[f"{path}.lora_A"] = noise(spec.r, weight.shape[1])
            tensors[f"{path}.lora_B"] = noise(weight.shape[0], spec.r)
            if spec.dora:
                tensors[f"{path}.magnitude"] = weight.norm(dim=1) + noise(weight.shape[0]).abs()
        if last == "bias" and (spec.bias == "all" or (spec.bias == "lora_only" and inside)):
            tensors[name] = noise(*weight.shape)
    return tensors


def by_hand(folder: Path, spec: Adapter, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The base model with the adapter's formula written into its weights."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            path = name.removesuffix(".weight")
            if f"{path}.lora_A" in tensors:
                total = parameter + spec.scaling * tensors[f"{path}.lora_B"] @ tensors[f"{path}.lora_A"]
                if spec.dora:
                    total = total * (tensors[f"{path}.magnitude"] / total.norm(dim=1))[:, None]
                parameter.copy_(total)
            elif name in tensors:
                parameter.copy_(tensors[name])
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(1, 25).reshape(2, 12)).logits


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_what_is_written(tmp_path: Path, kind: str) -> None:
    folder, spec = base(tmp_path / "base"), adapter(**KINDS[kind])
    tensors = tensors_for(folder, spec)
    write_adapter(tmp_path / "adapter", spec, tensors, base_model=str(folder))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(by_hand(folder, spec, tensors)), atol=1e-4, rtol=1e-4)
    assert (logits(loaded) - logits(AutoModelForCausalLM.from_pretrained(folder))).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_written_keys_are_those_peft_writes(tmp_path: Path, kind: str) -> None:
    folder, spec = base(tmp_path / "base"), adapter(**KINDS[kind])
    write_adapter(tmp_path / "ours", spec, tensors_for(folder, spec), base_model=str(folder))
    settings = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=list(TARGETS),
        bias=spec.bias,
        use_dora=spec.dora,
        use_rslora=spec.rslora,
        task_type="CAUSAL_LM",
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), settings).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
    ours, theirs = (json.loads((tmp_path / who / "adapter_config.json").read_text()) for who in ("ours", "theirs"))
    theirs["target_modules"] = sorted(theirs["target_modules"])
    assert ours == {key: theirs[key] for key in ours}


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(tmp_path: Path, kind: str) -> None:
    folder, spec = base(tmp_path / "base"), adapter(dropout=0.25, targets=tuple(sorted(TARGETS)), **KINDS[kind])
    tensors = tensors_for(folder, spec)
    write_adapter(tmp_path / "adapter", spec, tensors, base_model="some/model")
    got, read = read_adapter(tmp_path / "adapter")
    assert got == spec
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_an_adapter_peft_wrote_is_read(tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    settings = LoraConfig(r=2, lora_alpha=3.5, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), settings).save_pretrained(tmp_path / "theirs")
    spec, tensors = read_adapter(tmp_path / "theirs")
    assert spec == Adapter(r=2, alpha=3.5, dropout=0.0, bias="none", targets=("q_proj",), dora=True)
    assert {n: tuple(t.shape) for n, t in tensors.items() if ".layers.1." in n} == {
        "model.layers.1.self_attn.q_proj.lora_A": (2, 32),
        "model.layers.1.self_attn.q_proj.lora_B": (32, 2),
        "model.layers.1.self_attn.q_proj.magnitude": (32,),
    }


def test_all_linear_is_written_as_the_names_that_were_adapted(tmp_path: Path) -> None:
    folder, spec = base(tmp_path / "base"), adapter()
    write_adapter(tmp_path / "a", adapter(targets=("all-linear",)), tensors_for(folder, spec), base_model="some/model")
    assert read_adapter(tmp_path / "a")[0].targets == ("down_proj", "q_proj")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_failed_write_leaves_the_previous_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, spec = base(tmp_path / "base"), adapter()
    first, second = tensors_for(folder, spec, 1), tensors_for(folder, spec, 2)
    write_adapter(tmp_path / "adapter", spec, first, base_model="some/model")
    import safetensors.torch

    def full(tensors, path, metadata=None):
        Path(path).write_bytes(b"half")
        with open("/dev/full", "wb", buffering=0) as handle:  # the real error of a full disk
            handle.write(b"x")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(UserError, match=r"cannot write .*adapter\n  why: the disk is full"):
        write_adapter(tmp_path / "adapter", spec, second, base_model="some/model")
    assert torch.equal(
        read_adapter(tmp_path / "adapter")[1]["model.layers.0.mlp.down_proj.lora_A"],
        first["model.layers.0.mlp.down_proj.lora_A"],
    )
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    monkeypatch.undo()
    write_adapter(tmp_path / "adapter", spec, second, base_model="some/model")
    assert torch.equal(
        read_adapter(tmp_path / "adapter")[1]["model.layers.0.mlp.down_proj.lora_A"],
        second["model.layers.0.mlp.down_proj.lora_A"],
    )


# ---- bad input -------------------------------------------------------------------------------------------------------


def written(tmp_path: Path, **config) -> Path:
    folder = base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", adapter(), tensors_for(folder, adapter()), base_model="some/model")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    "config, message",
    [
        ({"peft_type": "IA3"}, "it is of type IA3, not LORA"),
        ({"rank_pattern": {"q_proj": 8}}, r"settings fitune does not have: rank_pattern = \{'q_proj': 8\}"),
        ({"modules_to_save": ["lm_head"]}, r"settings fitune does not have: modules_to_save = \['lm_head'\]"),
        ({"r": 8}, r"does not have matching lora_A and lora_B of rank 8"),
        ({"use_dora": True}, "of rank 4 and a magnitude"),
        ({"r": None}, "lacks or misstates a field"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path: Path, config: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_adapter(written(tmp_path, **config))


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no adapter in .*nowhere\n  why: there is no adapter_config.json"):
        read_adapter(tmp_path / "nowhere")
    folder = written(tmp_path)
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    with pytest.raises(UserError, match="adapter_model.safetensors is damaged or not a safetensors file"):
        read_adapter(folder)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match="pickle .*any code"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match="adapter_config.json\n  why: it is not JSON"):
        read_adapter(folder)
