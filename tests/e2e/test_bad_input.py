"""Bad input through the real command line: one message that says what, why and what to do, the right exit code, and
nothing left half-written. The message parts that are asserted are what a person needs to mend it."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fitune import hardware
from fitune.cli.main import main
from fitune.hardware.torch_build import TorchBuild
from tests.hardware import fakes
from tests.train.tiny_run import write_rows

ROOT = Path(__file__).resolve().parents[2]


class Place:
    """An empty folder with copies of the model and the data that a test may break; `refused` runs the command in it."""

    def __init__(self, folder: Path, base: Path, data: Path, capsys: Any):
        self.folder, self.capsys = folder, capsys
        self.model = folder / "model"
        shutil.copytree(base, self.model)
        self.data = folder / "data.jsonl"
        shutil.copyfile(data, self.data)

    def write(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def config(self, **changes: Any) -> None:
        """Changes config.json of the model; None removes a field."""
        path = self.model / "config.json"
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    def refused(self, *arguments: str, parts: tuple[str, ...], code: int = 2) -> str:
        """Runs `fitune ARGUMENTS`; asserts its exit code, the parts of its message, and that no file has changed."""
        before = self._files()
        assert main([str(a) for a in arguments]) == code
        output = self.capsys.readouterr()
        assert output.err.count("error: ") == 1 and "Traceback" not in output.err, output.err
        for part in parts:
            assert part in output.err, f"{part!r} is not in:\n{output.err}"
        assert self._files() == before, "something was left behind"
        return output.err

    def train(self, *arguments: str, parts: tuple[str, ...], code: int = 2, **replaced: str) -> str:
        """A run of the small model on the small data that is refused."""
        model, data = replaced.get("model", str(self.model)), replaced.get("data", str(self.data))
        common = ("--data", data, "--out", str(self.folder / "run"), "--seq-len", "128", "--steps", "2")
        return self.refused("train", model, *common, *arguments, parts=parts, code=code)

    def _files(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.folder)): p.read_bytes() if p.is_file() else b"" for p in self.folder.rglob("*")}


@pytest.fixture
def place(tmp_path: Path, base: Path, data: Path, capsys, monkeypatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path, base, data, capsys)


def test_the_same_command_with_good_input_trains(place: Place):
    """What the other tests break works when nothing is broken."""
    arguments = ["train", str(place.model), "--data", str(place.data), "--out", "run", "--seq-len", "128"]
    assert main([*arguments, "--steps", "2"]) == 0
    assert (place.folder / "run" / "adapter" / "adapter_model.safetensors").exists()


# ---- data ------------------------------------------------------------------------------------------------------------

ROW = '{"prompt": "What is one plus one?", "response": "Two."}\n'
DATA = {
    "empty": ("x.jsonl", b"", ("cannot train on x.jsonl", "the file is empty", "at least one record")),
    "only blank lines": ("x.jsonl", b"\n \n", ("cannot train on x.jsonl", "the file is empty")),
    "an empty list": ("x.json", b"[]", ("cannot train on x.json", "it holds no records")),
    "binary": ("x.jsonl", bytes(range(256)) * 4, ("cannot read x.jsonl", "it is not UTF-8", "binary file")),
    "not UTF-8": ("x.jsonl", ROW.encode() + '{"prompt": "今天天气很好", "response": "很好，谢谢"}'.encode("gb18030"),
                  ("cannot read x.jsonl", "(line 2)", "it looks like GB18030", "iconv -f GB18030 -t UTF-8")),
    "UTF-16": ("x.csv", "prompt,response\na,b\n".encode("utf-16"), ("cannot read x.csv", "UTF-16", "iconv -f UTF-16")),
    "broken JSONL": ("x.jsonl", (ROW + '{"prompt": "a", "respon\n' + ROW).encode(),
                     ("cannot read x.jsonl", "line 2, column 17", "not valid JSON", "1 of 3 lines", "correct line 2")),
    "a line that is no object": ("x.jsonl", (ROW + '"text"\n').encode(), ("line 2", "a string where an object")),
    "broken JSON": ("x.json", b'[{"prompt": "a",}]', ("cannot read x.json", "line 1, column 17")),
    "no answer column": ("x.jsonl", b'{"prompt": "a", "colour": "red", "size": 3}\n' * 30,
                         ("prompt", "colour", "size", "--columns")),
    "no known column": ("x.jsonl", b'{"colour": "red", "size": "big"}\n' * 30, ("colour", "size", "--columns")),
    "empty answers": ("x.jsonl", b'{"prompt": "a", "response": ""}\n' * 5,
                      ("none of the 5 records", "5 x empty answer")),
    "broken Parquet": ("x.parquet", b"PAR1 and then nothing", ("cannot read x.parquet", "not a whole Parquet file")),
    "a spreadsheet": ("x.xlsx", b"PK\x03\x04", ("cannot read x.xlsx", "spreadsheet", "save the sheet as CSV")),
    "compressed": ("x.jsonl.gz", b"\x1f\x8b", ("cannot read x.jsonl.gz", "compressed", "gunzip -k")),
    "unknown suffix": ("x.docx", b"x", ("cannot read x.docx", "'.docx'", ".jsonl")),
    "broken CSV": ("x.csv", b'prompt,response\n"a,b\n', ("cannot read x.csv", "line 2", "not valid CSV", "quote")),
}  # fmt: skip


@pytest.mark.parametrize("kind", DATA)
def test_data(kind: str, place: Place):
    name, content, parts = DATA[kind]
    place.train(data=place.write(name, content), parts=parts)


def test_missing_data(place: Place):
    place.train(data="data.json", parts=("cannot find the data file data.json", "did you mean data.jsonl?"))
    place.train(data="folder/x.jsonl", parts=("cannot find the data file", "there is no folder folder"))
    place.train(data=str(place.model), parts=("is a folder, not a data file", "name one file"))
    parts = ("cannot find the data file", "held-out.jsonl")
    place.train("--eval-data", "held-out.jsonl", parts=parts)


def test_missing_data_is_said_before_the_model_is_read(place: Place):
    """A model may be gigabytes away."""
    place.train(model="somebody/far-away", data="no.jsonl", parts=("cannot find the data file no.jsonl",))


def test_columns(place: Place):
    place.train("--columns", "prompt=promt,response=response", parts=("promt", "prompt, response"))
    place.train("--columns", "colour=prompt,response=response", parts=("--columns cannot map 'colour'", "prompt"))
    place.train("--columns", "prompt", parts=("cannot use columns = 'prompt'", "name=value,name=value"))


def test_answers_beyond_the_sequence_length(place: Place):
    rows = [{"prompt": "why " * 100, "response": "Because."}] * 3
    data = write_rows(place.folder / "long.jsonl", rows)
    place.train(data=str(data), parts=("none of the 3 records", "starts after seq_len 128", "raise --seq-len"))


def test_unknown_dataset_and_unreachable_hub(place: Place):
    """The tests run offline, which is what an unreachable hub looks like."""
    place.train(data="somebody/no-such-set", parts=("somebody/no-such-set", "hub"))


# ---- settings --------------------------------------------------------------------------------------------------------

SETTINGS = {
    "unknown option": (["--btach", "8"], ("no such option --btach", "did you mean --batch?")),
    "negative lr": (["--lr", "-1e-4"], ("cannot use lr = '-1e-4'", "greater than 0")),
    "lr is a word": (["--lr", "fast"], ("cannot use lr = 'fast'", "number")),
    "seq_len 0": (["--seq-len", "0"], ("cannot use seq_len = '0'", "greater than or equal to 8")),
    "batch 0": (["--batch", "0"], ("cannot use batch = '0'", "greater than or equal to 1")),
    "steps 0": (["--steps", "0"], ("cannot use steps = '0'", "greater than or equal to 1")),
    "epochs 0": (["--epochs", "0"], ("cannot use epochs = '0'", "greater than 0")),
    "micro_batch > batch": (["--batch", "2", "--micro-batch", "4"], ("micro_batch 4 is larger than batch 2",)),
    "full and nf4": (["--method", "full", "--base-format", "nf4"],
                     ("settings that contradict", "full fine-tuning trains every weight", "use method qlora")),
    "qlora and bf16": (["--method", "qlora", "--base-format", "bf16"], ("qlora means a quantised base", "nf4")),
    "full and dora": (["--method", "full", "--dora"], ("dora is a kind of adapter", "lora or qlora")),
    "unknown method": (["--method", "qloar"], ("cannot use method = 'qloar'", "one of: auto, full, lora, qlora")),
    "unknown optimizer": (["--optimizer", "adam"], ("cannot use optimizer = 'adam'", "adamw8bit")),
    "dropout 1": (["--lora-dropout", "1"], ("cannot use lora_dropout = '1'", "less than 1")),
    "rank 0": (["--lora-r", "0"], ("cannot use lora_r = '0'", "greater than or equal to 1")),
    "no targets": (["--lora-targets", ","], ("lora_targets is empty", "all-linear")),
    "eval share": (["--eval-share", "0.9"], ("cannot use eval_share = '0.9'", "less than or equal to 0.5")),
    "vram is a word": (["--vram", "lots"], ("'lots' is not a size", "10GiB")),
    "negative recompute": (["--recompute", "-2"], ("cannot use recompute = '-2'", "cannot be negative")),
    "too many layers recomputed": (["--recompute", "9"], ("cannot recompute 9 layers", "the model has 4")),
    "unknown lora target": (["--lora-targets", "q_proj,qv_proj"],
                            ("no layer is called 'qv_proj'", "q_proj", "up_proj", "--lora-targets all-linear")),
    "unknown device": (["--devices", "7"], ("no GPU 7", "--devices cpu")),
    "device is a word": (["--devices", "tpu"], ("no GPU tpu", "--devices cpu")),
    "gpu with train": (["--gpu", "rtx3080"], ("--gpu is for planning", "fitune plan", "--vram")),
    "paged optimizer on the CPU": (["--devices", "cpu", "--optimizer", "paged_adamw8bit"],
                                   ("optimizer paged_adamw8bit cannot run here", "NVIDIA", "--optimizer adamw")),
    "rope scaling without a type": (["--rope-scaling", "factor=2"], ("cannot use rope_scaling", "type=yarn,factor=4")),
    "unknown logger": (["--log-to", "mlflow"], ("cannot use log_to", "'tensorboard' or 'wandb'")),
    "unknown hub": (["--hub", "github"], ("cannot use hub = 'github'", "one of: huggingface, modelscope")),
}  # fmt: skip


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings(kind: str, place: Place):
    arguments, parts = SETTINGS[kind]
    place.train(*arguments, parts=parts)


RECIPES = {
    "unknown setting": ("model: smollm2\nlearning_rat: 3\n", ("unknown setting 'learning_rat'", "job.yaml")),
    "nearest setting": ("model: smollm2\nlora_rank: 8\n", ("unknown setting 'lora_rank'", "did you mean lora_r")),
    "bad YAML": ("model: smollm2\n  data: [demo\n", ("cannot read recipe job.yaml", "line 2", "one `setting: value`")),
    "a list": ("- model\n- data\n", ("cannot read recipe job.yaml", "start with `model: smollm2`")),
    "empty": ("", ("cannot read recipe job.yaml", "start with `model: smollm2`")),
    "wrong type": ("model: smollm2\ndata: demo\nbatch: [1, 2]\n", ("cannot use batch = [1, 2]", "job.yaml", "integer")),
    "no model": ("data: demo\n", ("no model named in job.yaml", "add `model: smollm2`")),
    "not UTF-8": ("data: caf\xe9.jsonl\n".encode("latin-1"), ("job.yaml", "not UTF-8", "save it as UTF-8")),
}  # fmt: skip


@pytest.mark.parametrize("kind", RECIPES)
def test_recipes(kind: str, place: Place):
    content, parts = RECIPES[kind]
    place.write("job.yaml", content)
    place.refused("train", "job.yaml", parts=parts)


# ---- models ----------------------------------------------------------------------------------------------------------


def test_unknown_models(place: Place):
    place.train(model="smolm2", parts=("unknown model 'smolm2'", "the nearest names", "SmolLM2-135M"))
    place.train(model="./nowhere", parts=("no model folder at", "does not exist", "check the path"))
    place.train(model="model.gguf", parts=("no GGUF file at model.gguf", "check the path"))
    place.train(model=str(place.data), parts=("data.jsonl is not a model", "a folder, a .gguf file or a hub id"))
    place.train(model=place.write("x.gguf", b"GGUF or not"), parts=("x.gguf",))


def test_a_hub_that_cannot_be_reached(place: Place):
    """Exit code 1: nothing is wrong with what was asked."""
    parts = ("cannot get somebody/some-model from Hugging Face", "cannot be reached", "HF_ENDPOINT", "--hub modelscope")
    place.train(model="somebody/some-model", code=1, parts=parts)


def test_folders_that_are_no_models(place: Place):
    (place.model / "config.json").rename(place.model / "other.json")
    place.train(parts=("is not a model folder", "it has no config.json", "*.safetensors"))
    (place.model / "adapter_config.json").write_text("{}")
    place.train(parts=("it is an adapter, not a model", "name the adapter's base model"))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (dict(quantization_config={"quant_method": "gptq", "bits": 4}),
         ("is already quantised (gptq, 4 bit)", "--base-format nf4")),
        (dict(model_type="mystery", auto_map={"AutoModelForCausalLM": "m.Mystery"}, architectures=["Mystery"]),
         ("needs code that is shipped with the model", "mystery", "--trust-remote-code")),
        (dict(model_type="mystery"), ("unknown model type (mystery)", "upgrade transformers")),
        (dict(hidden_size=96), ("shape", "config.json")),
        (dict(num_hidden_layers=5), ("model.layers.4",)),
        (dict(num_hidden_layers=3), ("model.layers.3",)),
        (dict(hidden_size="big"), ("cannot use", "config.json", "hidden_size")),
    ],
    ids=["quantised", "remote code", "unknown type", "wrong shape", "missing layer", "extra layer", "not a number"],
)  # fmt: skip
def test_configurations(changes: dict[str, Any], parts: tuple[str, ...], place: Place):
    place.config(**changes)
    place.train(parts=parts)


def test_config_that_is_not_json(place: Place):
    (place.model / "config.json").write_text("{ 'model_type': llama }")
    place.train(parts=("cannot read", "config.json", "it is not JSON", "download or copy the file again"))


def test_corrupt_weights(place: Place):
    weights = place.model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    place.train(parts=("model.safetensors is damaged", "the file has", "download or copy this file again"))
    weights.write_bytes(b"")
    place.train(parts=("model.safetensors is damaged", "nearly empty"))
    weights.write_bytes(struct.pack("<Q", 10) + b"not a JSON" + content)
    place.train(parts=("model.safetensors is damaged", "its header is not JSON"))


def test_missing_shard(place: Place):
    from safetensors.torch import load_file, save_file

    tensors = load_file(place.model / "model.safetensors")
    (place.model / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, place.model / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (place.model / "model.safetensors.index.json").write_text(json.dumps(index))
    (place.model / "model-00002-of-00002.safetensors").unlink()
    place.train(parts=("is incomplete", "1 of 2 weight files are missing: model-00002-of-00002.safetensors"))


def test_pickles_are_not_loaded(place: Place):
    (place.model / "model.safetensors").unlink()
    place.train(parts=("has no weights", "there is no *.safetensors file"))
    (place.model / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    place.train(parts=("has its weights only as pickle (pytorch_model.bin)", "any code", "save_pretrained"))


def test_no_tokenizer(place: Place):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (place.model / name).unlink()
    place.train(parts=("has no tokenizer", "download the whole model"))
    (place.model / "tokenizer.json").write_text("{}")
    place.train(parts=("cannot read the tokenizer", "tokenizer.json"))


def test_broken_chat_template(place: Place):
    (place.model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}")
    place.train(parts=("the model's chat template cannot render a question and its answer", "instruct version"))


def test_vocabulary_of_another_model(place: Place):
    """Tokens beyond the embedding would be an index error in the middle of the run."""
    tokenizer = json.loads((place.model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {t: number if number < 60 else number + 400 for t, number in vocabulary.items()}
    (place.model / "tokenizer.json").write_text(json.dumps(tokenizer))
    place.train(parts=("does not belong to this model", "the model's vocabulary ends at 319", "tokenizer"))


# ---- hardware --------------------------------------------------------------------------------------------------------


def machine_with(card: dict[str, Any], tmp_path: Path, **nvml: Any) -> hardware.Machine:
    """A Linux machine with one card, as `hardware.probe` finds it."""
    root = fakes.linux(tmp_path / "elsewhere-machine", proc__driver__nvidia__version="NVRM version: 570.86.10")
    return hardware.probe(root=root, nvml=fakes.FakeNvml([card], **nvml), platform="linux", environ={})


def test_nvidia_card_and_a_cpu_build_of_torch(place: Place, tmp_path_factory, monkeypatch):
    """The exact command that mends it; said before anything is read, and `--devices cpu` is a way out."""
    machine = machine_with(fakes.RTX_3080, tmp_path_factory.mktemp("machine"))
    monkeypatch.setattr(hardware, "probe", lambda *arguments, **options: machine)
    monkeypatch.setattr(hardware, "torch_build", lambda *arguments: TorchBuild(True, "2.13.0+cpu"))
    parts = ("torch 2.13.0+cpu cannot use the NVIDIA card in this machine",
             "it is a CPU build; NVIDIA GeForce RTX 3080 (driver 570.86.10) needs a CUDA build")  # fmt: skip
    error = place.train(parts=parts)
    assert (
        'fix: python -m pip uninstall -y torch && python -m pip install "torch>=2.11" '
        "--index-url https://download.pytorch.org/whl/cu128  (to train on the CPU all the same, set "
        "CUDA_VISIBLE_DEVICES to an empty value)" in error
    )
    place.refused("chat", str(place.model), "--prompt", "Hello", parts=("cannot use the NVIDIA card",))
    arguments = ["train", str(place.model), "--data", str(place.data), "--out", "run", "--seq-len", "128"]
    assert main([*arguments, "--steps", "1", "--devices", "cpu"]) == 0


def test_bf16_on_a_card_without_it(place: Place, tmp_path_factory, monkeypatch):
    machine = machine_with(fakes.TESLA_T4, tmp_path_factory.mktemp("machine"))
    monkeypatch.setattr(hardware, "probe", lambda *arguments, **options: machine)
    monkeypatch.setattr(hardware, "torch_build", lambda *arguments: TorchBuild(True, "2.13.0+cu128", "12.8"))
    parts = ("bf16 does not run on Tesla T4", "no bf16 arithmetic", "--precision fp16")
    place.train("--precision", "bf16", parts=parts)
    place.train("--devices", "3", parts=("no GPU 3", "the GPUs here are 0 (Tesla T4)", "--devices 0"))


def test_planning_for_unknown_cards(place: Place):
    place.refused("plan", str(place.model), "--gpu", "rtx3180", parts=("rtx3180", "RTX 3080"))
    place.refused("plan", str(place.model), "--gpu", "t4", "--precision", "bf16", parts=("bf16 does not run on",))
    place.refused("gpus", "radeon 9", parts=("radeon 9",))


def test_what_does_not_fit_names_what_would(place: Place):
    """Exit code 3."""
    parts = ("does not fit on CPU", "the smallest plan needs", "the budget is", "fix: ")
    place.train("--ram", "0.001", code=3, parts=parts)
    code = main(["plan", "meta-llama/Llama-3.1-8B", "--gpu", "rtx3080", "--method", "lora", "--base-format", "bf16",
                 "--batch", "1", "--loss-chunk", "64", "--vram", "2", "--json"])  # fmt: skip
    result = json.loads(place.capsys.readouterr().out)
    assert code == 3 and result["fits"] is False
    assert result["nearest_fits"]
    assert all(entry["needs_bytes"] > 0 and entry["change"] for entry in result["nearest_fits"])


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_out_folders(place: Place):
    run = place.folder / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("model: smollm2\n")
    place.train(parts=("cannot create a run in", "recipe.yaml is already there", "--out"))
    (run / "plan.json").write_text("{}")
    place.train(parts=("already holds a run", "never overwritten", f"fitune train --resume {run}"))
    shutil.rmtree(run)
    run.write_text("a file")
    place.train(parts=("cannot create the run folder", "a file is in the way", "--out"))


def test_resume_of_what_is_no_run(place: Place):
    place.refused("train", "--resume", "runs/none", parts=("no run 'runs/none'", "fitune train"))
    place.refused("train", "--resume", str(place.model), parts=("model is not a run", "it holds no plan.json"))
    parts = ("cannot resume with other settings: MODEL, lr", "leave them out, or start a new run")
    place.refused("train", "smollm2", "--resume", "runs/none", "--lr", "1", parts=parts)


def test_resume_of_a_damaged_run(place: Place):
    run = place.folder / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(f"model: {place.model}\ndata: {place.data}\n")
    (run / "plan.json").write_text("{ half")
    place.refused("train", "--resume", "run", parts=("cannot read the plan", "it is not JSON"))
    (run / "plan.json").write_text('{"version": 99}')
    place.refused("train", "--resume", "run", parts=("cannot use this plan", "it has version 99"))


# ---- as people run it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["train", "MODEL", "--data", "nothing.jsonl"], 2, ("cannot find the data file nothing.jsonl",)),
        (["train", "MODEL", "--data", "DATA", "--ram", "0.001", "--seq-len", "64"], 3, ("does not fit on CPU",)),
    ],
)
def test_the_real_command(arguments, code, parts, place: Place):
    """In a process of its own: no traceback, nothing on the disk."""
    named = {"MODEL": str(place.model), "DATA": str(place.data)}
    before = sorted(place.folder.rglob("*"))
    done = subprocess.run([sys.executable, "-m", "fitune", *(named.get(a, a) for a in arguments)], cwd=place.folder,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == code, done.stderr
    assert all(part in done.stderr for part in parts) and "Traceback" not in done.stderr
    assert sorted(place.folder.rglob("*")) == before
