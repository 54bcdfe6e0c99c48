"""Export of a run: the adapter as it is, a merge that answers like model plus adapter, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fitune.cli import main as cli
from fitune.errors import UserError
from fitune.export import export_run
from fitune.model.adapter_io import write_adapter
from fitune.plan import Adapter
from fitune.train.run_folder import RunFolder
from tests.train.fake_run import make_plan

TARGETS = ("q_proj", "down_proj")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A random model of two small layers, with a tokenizer, as a folder of safetensors."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=64)  # fmt: skip
    folder = tmp_path / "base"
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, base: Path) -> RunFolder:
    """A finished run with an adapter that changes the answers, and a tokenizer with a chat template beside it."""
    import torch
    from transformers import AutoTokenizer

    adapter = Adapter(r=4, alpha=8, dropout=0.0, bias="none", targets=TARGETS)
    shapes = {"self_attn.q_proj": (32, 32), "mlp.down_proj": (32, 48)}
    tensors = {}
    torch.manual_seed(1)
    for layer in range(2):
        for name, (rows, columns) in shapes.items():
            tensors[f"model.layers.{layer}.{name}.lora_A"] = torch.randn(4, columns)
            tensors[f"model.layers.{layer}.{name}.lora_B"] = torch.randn(rows, 4)
    folder = RunFolder.create(tmp_path / "r", str(base), f"model: {base}\ndata: demo\n", make_plan("cpu").to_json())
    write_adapter(folder.adapter_path, adapter, tensors, base_model=str(base))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder.adapter_path)
    return folder


def test_adapter_is_copied_whole(run: RunFolder, tmp_path: Path):
    written = export_run(run, out=tmp_path / "a")
    names = {file.name for file in run.adapter_path.iterdir()}
    assert {file.name for file in written.path.iterdir()} == names >= {"adapter_model.safetensors", "tokenizer.json"}
    assert all((written.path / name).read_bytes() == (run.adapter_path / name).read_bytes() for name in names)
    assert (written.kind, written.ram_bytes) == ("adapter", None)


def test_merged_answers_like_model_and_adapter(run: RunFolder, base: Path, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    peft = pytest.importorskip("peft")
    written = export_run(run, merged=True, dtype="fp32", out=tmp_path / "m")
    ids = torch.arange(2, 22).unsqueeze(0)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(written.path, dtype=torch.float32)
    with torch.no_grad():
        before = plain(ids).logits
        wanted = peft.PeftModel.from_pretrained(plain, str(run.adapter_path))(ids).logits
        got = merged(ids).logits
    assert (wanted - before).abs().max() > 0.1
    assert (got - wanted).abs().max() < 1e-4
    assert AutoTokenizer.from_pretrained(written.path).chat_template == "{{ messages[0]['content'] }}"
    assert not (written.path / "adapter_config.json").exists()


def test_merged_model_keeps_the_runs_position_scaling(run: RunFolder, tmp_path: Path):
    text = run.recipe_path.read_text() + "rope_scaling: {type: linear, factor: 4}\n"
    run.recipe_path.write_text(text)
    written = export_run(run, merged=True, out=tmp_path / "m")
    config = json.loads((written.path / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "linear" and config["rope_parameters"]["factor"] == 4
    assert config["dtype"] == "bfloat16"


def test_command_prints_what_was_written(run: RunFolder, capsys):
    assert cli.main(["export", str(run.path), "--merged", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["kind"] == "merged" and value["path"] == str(run.path / "merged")
    assert value["size_bytes"] > 0 and value["ram_bytes"] > 0
    assert cli.main(["export", str(run.path)]) == 0
    assert capsys.readouterr().out.startswith(f"adapter written to {run.path / 'export'} (")


def test_full_fine_tuning_exports_its_model(run: RunFolder, base: Path, tmp_path: Path):
    run.adapter_path.rename(tmp_path / "gone")
    base.rename(run.model_path)
    assert export_run(run, out=tmp_path / "f").kind == "model"
    with pytest.raises(UserError) as caught:
        export_run(run, merged=True, out=tmp_path / "g")
    assert str(caught.value) == (f"there is no adapter to merge in {run.path}\n  why: the run trained every weight\n"
                                 "  fix: leave --merged out: its model is whole already")  # fmt: skip


def test_run_without_a_result(run: RunFolder, tmp_path: Path):
    run.adapter_path.rename(tmp_path / "gone")
    with pytest.raises(UserError) as caught:
        export_run(run, out=tmp_path / "a")
    assert str(caught.value) == (f"nothing to export from {run.path}\n"
                                 "  why: it has no adapter and no model yet (planned)\n"
                                 f"  fix: finish it first: fitune train --resume {run.path}")  # fmt: skip


@pytest.mark.parametrize("merged", [False, True])
def test_a_folder_with_files_is_left_alone(run: RunFolder, tmp_path: Path, merged: bool):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.txt").write_text("mine")
    with pytest.raises(UserError) as caught:
        export_run(run, merged=merged, out=tmp_path / "a")
    assert str(caught.value) == (f"cannot export to {tmp_path / 'a'}\n  why: it exists and is not empty\n"
                                 "  fix: choose a new folder with --out")  # fmt: skip
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["mine.txt"]


def test_merge_within_a_stated_ram(run: RunFolder, tmp_path: Path):
    with pytest.raises(UserError, match="not enough RAM for the merge"):
        export_run(run, merged=True, out=tmp_path / "m", ram_bytes=1024)
    assert not (tmp_path / "m").exists()


@pytest.fixture
def best(run: RunFolder, base: Path) -> dict:
    """A run whose second step of four was its best; the last adapter is another one. The best adapter's tensors."""
    import torch

    from fitune.model.adapter_io import read_adapter
    from fitune.plan import Adapter
    from fitune.train import checkpoint

    plan = make_plan("cpu").with_(adapter=Adapter(r=4, alpha=8, dropout=0.0, bias="none", targets=TARGETS))
    run.plan_path.write_text(plan.to_json())
    last = read_adapter(run.adapter_path)[1]
    tensors = {name: torch.randn_like(tensor) for name, tensor in last.items()}
    for step, values in ((2, tensors), (4, last)):
        checkpoint.save(run.checkpoints_path, step, {f"parameter|{n}": t for n, t in values.items()}, {}, keep=2)
    checkpoint.mark_best(run.checkpoints_path, 2, 1.5)
    return tensors


def test_the_best_checkpoint(run: RunFolder, best: dict, tmp_path: Path, capsys):
    import torch

    from fitune.model.adapter_io import read_adapter

    assert cli.main(["export", str(run.path), "--best", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["kind"], value["step"], value["path"]) == ("adapter", 2, str(run.path / "best-export"))
    written = read_adapter(run.path / "best-export")[1]
    assert written.keys() == best.keys() and all(torch.equal(written[name], best[name]) for name in best)
    names = {file.name for file in run.adapter_path.iterdir()}
    assert {file.name for file in (run.path / "best-export").iterdir()} == names
    assert cli.main(["export", str(run.path), "--best", "--out", str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out.rstrip().endswith("as it was after step 2)")


def test_the_best_checkpoint_merged(run: RunFolder, best: dict, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    export_run(run, best=True, out=tmp_path / "adapter")
    run.adapter_path.rename(tmp_path / "gone")  # the run need not be finished
    done = export_run(run, best=True, merged=True, dtype="fp32", out=tmp_path / "m")
    assert (done.kind, done.step) == ("merged", 2)
    weights = AutoModelForCausalLM.from_pretrained(done.path, dtype=torch.float32).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(run.path.parent / "base", dtype=torch.float32).state_dict()
    name = "model.layers.1.mlp.down_proj"
    wanted = plain[f"{name}.weight"] + 2.0 * best[f"{name}.lora_B"] @ best[f"{name}.lora_A"]
    torch.testing.assert_close(weights[f"{name}.weight"], wanted)


def test_no_best_checkpoint(run: RunFolder, tmp_path: Path):
    with pytest.raises(UserError) as caught:
        export_run(run, best=True, out=tmp_path / "a")
    assert caught.value.what == f"{run.path} has no best checkpoint" and "--eval-share" in caught.value.fix


def test_a_damaged_best_checkpoint(run: RunFolder, best: dict, tmp_path: Path):
    path = run.checkpoints_path / "step-00000002" / "parameters.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError) as caught:
        export_run(run, best=True, out=tmp_path / "a")
    assert "it is damaged (the SHA-256 of parameters.safetensors" in caught.value.why
    assert not (tmp_path / "a").exists()


def test_the_best_of_a_full_fine_tuning(run: RunFolder, base: Path, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    from fitune.train import checkpoint

    run.plan_path.write_text(make_plan("cpu").with_(adapter=None, method="full", base_format="fp32").to_json())
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    trained = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    checkpoint.save(run.checkpoints_path, 3, {f"parameter|{n}": t for n, t in trained.items()}, {}, keep=1)
    checkpoint.mark_best(run.checkpoints_path, 3, 1.0)
    run.adapter_path.rename(tmp_path / "gone")
    assert export_run(run, best=True, out=tmp_path / "m").kind == "model"
    got = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "m").named_parameters())
    assert got.keys() == trained.keys() and all(torch.equal(got[name], trained[name]) for name in trained)
    assert (tmp_path / "m" / "tokenizer.json").exists()


def test_the_best_of_a_model_with_buffers(tmp_path: Path):
    """What is saved with a model and never trained (a router's correction) is the base's."""
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    from fitune.export.best import _put_model
    from fitune.model.source import resolve

    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1, n_shared_experts=1,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_config(config)
    base.model.layers[1].mlp.gate.e_score_correction_bias.normal_()
    base.save_pretrained(tmp_path / "base")
    trained = {name: torch.randn_like(p) for name, p in base.named_parameters()}
    plan = make_plan("cpu").with_(adapter=None, method="full", base_format="fp32")
    _put_model(resolve(str(tmp_path / "base")), plan, trained, tmp_path)
    got = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(p, trained[name]) for name, p in got.named_parameters())
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(got.state_dict()[name], base.state_dict()[name])


@pytest.mark.parametrize("times", [1, 2])
def test_a_merge_that_runs_out_of_memory(times: int, run: RunFolder, tmp_path: Path, monkeypatch):
    """It begins again with smaller pieces; when that is too much as well the adapter is still there, and said."""
    from fitune.model import merge

    real, calls = merge.merged_weight, []

    def fails(*arguments):
        calls.append(arguments[-1])
        if len(calls) <= times:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
            )
        return real(*arguments)

    whole = export_run(run, merged=True, out=tmp_path / "whole")
    monkeypatch.setattr(merge, "merged_weight", fails)
    if times == 2:
        with pytest.raises(UserError) as caught:
            export_run(run, merged=True, out=tmp_path / "m")
        assert caught.value.exit_code == 1 and str(run.adapter_path) in caught.value.fix
        assert not (tmp_path / "m").exists()
        return
    done = export_run(run, merged=True, out=tmp_path / "m")
    assert done.ram_bytes < whole.ram_bytes
    assert {f.name for f in (tmp_path / "m").iterdir()} == {f.name for f in (tmp_path / "whole").iterdir()}
