"""Corrupted and hostile inputs: refused with one message, or trained on; never a traceback, nothing outside the run.

Everything a person may have downloaded or been sent: weights, configurations, tokenizers, data, recipes, run folders.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fitune.cli.main import main

Break = Callable[[Path, Path], None]  # (folder of the model, data file)


def write(name: str, content: str | bytes) -> Break:
    """Puts a file into the model's folder."""

    def change(model: Path, data: Path) -> None:
        (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def header(change: Callable[[dict[str, Any]], Any], *, length: int | None = None, pad: int = 0) -> Break:
    """Changes the header of model.safetensors; its bytes of data stay."""

    def apply(model: Path, data: Path) -> None:
        path = model / "model.safetensors"
        content = path.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        changed = change(json.loads(content[8 : 8 + size]))
        text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        start = struct.pack("<Q", len(text) if length is None else length)
        path.write_bytes(start + text + content[8 + size :] + b"\0" * pad)

    return apply


def entry(**changes: Any) -> Break:
    """Changes one tensor's entry in the header."""

    def change(values: dict[str, Any]) -> dict[str, Any]:
        name = next(n for n in values if n.endswith("q_proj.weight"))
        values[name] = {k: v for k, v in (values[name] | changes).items() if v is not None}
        return values

    return header(change)


def edit(name: str, **changes: Any) -> Break:
    """Changes fields of a JSON file of the model."""

    def change(model: Path, data: Path) -> None:
        path = model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def cut(name: str, keep: float) -> Break:
    def change(model: Path, data: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(len(content) * keep)])

    return change


def index(weight_map: Any) -> Break:
    def change(model: Path, data: Path) -> None:
        (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return change


def outside(name: str) -> Break:
    """An index that names a file outside the folder, which is there."""

    def change(model: Path, data: Path) -> None:
        shutil.copyfile(model / "model.safetensors", model.parent / "outside.safetensors")
        named = str(model.parent / "outside.safetensors") if name == "absolute" else name
        index({"model.embed_tokens.weight": named})(model, data)

    return change


def remote_code(model: Path, data: Path) -> None:
    mark = model.parent / "code-was-run"
    (model / "modeling_evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    edit(
        "config.json",
        model_type="evil",
        auto_map={"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"},
    )(model, data)


def pickled(model: Path, data: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n(S'touch code-was-run'\ntR.")


def template(text: str) -> Break:
    def change(model: Path, data: Path) -> None:
        edit("tokenizer_config.json", chat_template=text)(model, data)

    return change


DEEP = "[" * 100_000
MODELS: dict[str, tuple[Break, tuple[str, ...]]] = {
    "weights cut in half": (cut("model.safetensors", 0.5), ("is damaged or not a safetensors", "its header promises")),
    "weights cut in the header": (cut("model.safetensors", 0.001), ("is damaged or not a safetensors file",)),
    "empty weights": (write("model.safetensors", b""), ("it is nearly empty",)),
    "header of 2**60 bytes": (header(lambda h: h, length=2**60), ("its header promises",)),
    "header of 2**64 - 1 bytes": (header(lambda h: h, length=2**64 - 1), ("its header promises",)),
    "header of no bytes": (header(lambda h: h, length=0), ("its header promises 0",)),
    "header is no JSON": (header(lambda h: b"{" * 50), ("its header is not JSON",)),
    "header is a list": (header(lambda h: []), ("is damaged or not a safetensors file",)),
    "header nested deeply": (header(lambda h: DEEP.encode()), ("is damaged or not a safetensors file",)),
    "entry is no object": (header(lambda h: h | {"x": 3}), ("is damaged or not a safetensors file",)),
    "no offsets": (entry(data_offsets=None), ("is damaged or not a safetensors file",)),
    "offsets are words": (entry(data_offsets=["a", "b"]), ("is damaged or not a safetensors file",)),
    "negative offsets": (entry(data_offsets=[-8, 4]), ("is damaged or not a safetensors file",)),
    "offsets beyond the file": (entry(data_offsets=[0, 2**50]), ("which do not make its shape",)),
    "offsets that overlap": (entry(data_offsets=[0, 16384]), ("is damaged or not a safetensors file",)),
    "shape of other size": (entry(shape=[2, 2]), ("is damaged or not a safetensors file",)),
    "negative shape": (entry(shape=[-64, -64]), ("is damaged or not a safetensors file",)),
    "enormous shape": (entry(shape=[2**40, 2**40]), ("is damaged or not a safetensors file",)),
    "shape of words": (entry(shape="64x64"), ("is damaged or not a safetensors file",)),
    "unknown dtype": (entry(dtype="F31"), ("is damaged or not a safetensors file",)),
    "more bytes than promised": (header(lambda h: h, pad=100), ("the file has",)),
    "another shape than the configuration": (edit("config.json", hidden_size=128), ("model",)),
    "index leaves the folder": (outside("../outside.safetensors"), ("leaves the model's folder", "../outside")),
    "index is absolute": (outside("absolute"), ("leaves the model's folder",)),
    "index of numbers": (index({"a": 3}), ("it is not an index of safetensors files",)),
    "index is a list": (index([1, 2]), ("it is not an index of safetensors files",)),
    "index nested deeply": (write("model.safetensors.index.json", DEEP), ("it is not an index of safetensors files",)),
    "index of missing files": (index({"a": "gone.safetensors"}), ("1 of 1 weight files are missing",)),
    "only a pickle": (pickled, ("only as pickle", "can run any code")),
    "code of the model": (remote_code, ("trust", "code")),
    "config cut": (cut("config.json", 0.5), ("config.json",)),
    "config is a list": (write("config.json", "[]"), ("config.json",)),
    "config nested deeply": (write("config.json", DEEP), ("config.json",)),
    "config of a billion layers": (edit("config.json", num_hidden_layers=10**9), ("config.json", "num_hidden_layers")),
    "config of negative size": (edit("config.json", hidden_size=-64), ("config.json",)),
    "config of words": (edit("config.json", vocab_size="many"), ("config.json",)),
    "config without heads": (edit("config.json", num_attention_heads=0), ("config.json",)),
    "tokenizer cut": (cut("tokenizer.json", 0.5), ("tokenizer",)),
    "tokenizer is a list": (write("tokenizer.json", "[]"), ("tokenizer",)),
    "tokenizer nested deeply": (write("tokenizer.json", DEEP), ("tokenizer",)),
    "template reaches for the system": (
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}"
                 "{{ cycler.__init__.__globals__.os.system('touch code-was-run') }}"),
        ("chat template cannot render",)),
    "template changes what it is given": (template("{% set _ = messages.clear() %}{{ messages }}"), ("chat template",)),
    "template without an end": (template("{% for m in messages %}{{ m"), ("chat template",)),
    "template loops": (template("{% for i in range(10**12) %}x{% endfor %}"), ("chat template",)),
    "template of 100 GB": (template("{{ 'a' * 10**11 }}"), ("chat template", "memory")),
    "template imports": (template("{% import 'os' as os %}{{ os }}"), ("chat template",)),
}  # fmt: skip

TOOLS = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": 3}\n'
ROW = '{"prompt": "What is one plus one?", "response": "Two."}\n'
DATA: dict[str, tuple[str, bytes, tuple[str, ...]]] = {
    "nested JSON": ("x.json", DEEP.encode(), ("cannot read x.json", "nested")),
    "nested JSONL": ("x.jsonl", (ROW + '{"prompt": ' + DEEP + "\n").encode(), ("cannot read x.jsonl", "nested")),
    "a number of 5,000 digits": ("x.jsonl", (ROW + '{"prompt": ' + "9" * 5000 + "}\n").encode(),
                                 ("cannot read x.jsonl", "line 2")),
    "a number of 5,000 digits as JSON": ("x.json", ("[" + "9" * 5000 + "]").encode(), ("cannot read x.json",)),
    "NUL bytes": ("x.jsonl", b"\0" * 4096, ("cannot read x.jsonl",)),
    "NUL bytes in CSV": ("x.csv", b"prompt,response\na\0b,c\n", ()),
    "half a surrogate pair": ("x.jsonl", (ROW * 3 + '{"prompt": "\\ud800", "response": "\\udfff"}\n').encode(), ()),
    "prompts that are numbers": ("x.jsonl", b'{"prompt": 3, "response": 4}\n' * 4, ()),
    "prompts that are objects": ("x.jsonl", b'{"prompt": {"a": [1]}, "response": [[{}]]}\n' * 4, ()),
    "roles that are objects": ("x.jsonl", b'{"messages": [{"role": {}, "content": []}, {"role": 3}]}\n' * 4, ()),
    "messages that are no list": ("x.jsonl", b'{"messages": {"role": "user"}}\n' * 4, ()),
    "a conversation of strings": ("x.jsonl", b'{"messages": ["a", "b"]}\n' * 4, ()),
    "tools that are no list": ("x.jsonl", TOOLS.encode() * 4, ()),
    "rows of different kinds": ("x.jsonl", (ROW + '{"messages": []}\n{"text": 3}\n').encode(), ()),
    "NaN and infinities": ("x.jsonl", b'{"prompt": NaN, "response": Infinity}\n' * 4, ()),
    "an empty Parquet file": ("x.parquet", b"", ("x.parquet",)),
    "a Parquet footer of 2 GiB": ("x.parquet", b"PAR1" + b"\0" * 64 + struct.pack("<I", 2**31 - 1) + b"PAR1",
                                  ("not a whole Parquet file",)),
    "a Parquet file of noise": ("x.parquet", b"PAR1" + bytes(range(256)) * 8 + struct.pack("<I", 1024) + b"PAR1",
                                ("not a whole Parquet file",)),
    "a pickle": ("x.jsonl", b"\x80\x04cposix\nsystem\n(S'touch code-was-run'\ntR.", ("cannot read x.jsonl",)),
    "a pickle by its name": ("x.pkl", b"\x80\x04.", ("cannot read x.pkl", "'.pkl'")),
    "a zip by another name": ("x.jsonl", b"PK\x03\x04" + b"\xff" * 64, ("cannot read x.jsonl",)),
    "a text of one endless line": ("x.txt", b"word " * 40_000, ()),
    "CSV of many columns": ("x.csv", (",".join(f"c{i}" for i in range(5000)) + "\n").encode() * 2, ()),
}  # fmt: skip

RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "objects of Python": ("model: !!python/object/apply:os.system ['touch code-was-run']\n", ("cannot read recipe",)),
    "nested": ("model: " + "[" * 20_000, ("cannot read recipe", "nested")),
    "aliases of aliases": (
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 25)),
        ("no model named in job.yaml",)),
    "a date as a seed": ("model: smollm2\ndata: demo\nseed: 2026-11-30\n", ("cannot use seed",)),
    "keys that are lists": ("? [a, b]\n: 3\n", ("recipe",)),
}  # fmt: skip


class Place:
    """An empty folder with copies of the model and the data; `run` runs the command in it."""

    def __init__(self, folder: Path, base: Path, data: Path, capsys: Any):
        self.folder, self.capsys = folder, capsys
        self.model, self.data = folder / "model", folder / "data.jsonl"
        shutil.copytree(base, self.model)
        shutil.copyfile(data, self.data)

    def survives(self, *arguments: str, parts: tuple[str, ...]) -> str:
        """The command ends with a clear message that has these parts (or trains, where none are asked for), and
        everything outside the run's folder is as it was."""
        before = self._outside()
        code = main([str(a) for a in arguments])
        error = self.capsys.readouterr().err
        assert self._outside() == before, "something was written outside the run"
        assert "Traceback" not in error
        if parts or code:
            assert code in (1, 2) and error.count("error: ") == 1, (code, error)
            assert "\n  fix: " in error or "\n  why: " in error, error
        for part in parts:
            assert part in error, f"{part!r} is not in:\n{error}"
        return error

    def train(self, parts: tuple[str, ...], model: Path | None = None, data: Path | None = None) -> str:
        what = (str(model or self.model), "--data", str(data or self.data), "--out", "run")
        return self.survives("train", *what, "--seq-len", "64", "--steps", "1", "--eval-share", "0", parts=parts)

    def _outside(self) -> dict[str, bytes]:
        inside = self.folder / "run"
        files = [p for p in self.folder.rglob("*") if inside not in (p, *p.parents) and p.is_file()]
        return {str(p.relative_to(self.folder)): p.read_bytes() for p in files}


@pytest.fixture
def place(tmp_path: Path, base: Path, data: Path, capsys, monkeypatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path, base, data, capsys)


@pytest.mark.parametrize("kind", MODELS)
def test_models(kind: str, place: Place):
    change, parts = MODELS[kind]
    change(place.model, place.data)
    place.train(parts)


@pytest.mark.parametrize("kind", DATA)
def test_data(kind: str, place: Place):
    name, content, parts = DATA[kind]
    (place.folder / name).write_bytes(content)
    place.train(parts, data=place.folder / name)


@pytest.mark.parametrize("kind", RECIPES)
def test_recipes(kind: str, place: Place):
    text, parts = RECIPES[kind]
    (place.folder / "job.yaml").write_text(text)
    place.survives("train", "job.yaml", "--out", "run", parts=parts)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_data_file_that_never_ends(place: Place):
    """A named pipe that nobody writes to would be waited for until the end of days."""
    os.mkfifo(place.folder / "x.jsonl")
    place.train(("cannot read x.jsonl", "not a regular file"), data=place.folder / "x.jsonl")


def test_a_link_that_leads_to_itself(place: Place):
    (place.folder / "x.jsonl").symlink_to(place.folder / "x.jsonl")
    place.train(("x.jsonl",), data=place.folder / "x.jsonl")


GGUF = b"GGUF" + struct.pack("<I", 3)
GGUFS = {
    "magic alone": b"GGUF",
    "no magic": b"FUGG" + b"\0" * 64,
    "unknown version": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    "no tensors": GGUF + struct.pack("<QQ", 0, 0),
    "2**62 tensors": GGUF + struct.pack("<QQ", 2**62, 0),
    "2**62 facts": GGUF + struct.pack("<QQ", 0, 2**62),
    "a name of 2**60 bytes": GGUF + struct.pack("<QQQ", 0, 1, 2**60) + b"general",
    "an unknown type of fact": GGUF + struct.pack("<QQQ", 0, 1, 1) + b"a" + struct.pack("<I", 77),
    "nested arrays": GGUF + struct.pack("<QQQ", 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 2**40) * 50,
}


@pytest.mark.parametrize("kind", GGUFS)
def test_gguf_files(kind: str, place: Place):
    path = place.folder / "x.gguf"
    path.write_bytes(GGUFS[kind])
    place.train(("x.gguf",), model=path)


RUNS = {
    "plan nested deeply": ("plan.json", DEEP, ("cannot read the plan",)),
    "plan is a number": ("plan.json", "3", ("cannot read the plan",)),
    "plan of other fields": ("plan.json", '{"version": 1, "adapter": 3, "reasons": []}', ("cannot use this plan",)),
    "recipe is a list": ("recipe.yaml", "[1]", ("cannot read recipe",)),
    "events are no objects": ("events.jsonl", "3\n4\n5\n", ("events.jsonl", "line 1 is not a JSON object")),
    "events nested deeply": ("events.jsonl", DEEP + "\n{}\n", ("events.jsonl", "line 1 is not a JSON object")),
}


@pytest.mark.parametrize("kind", RUNS)
def test_run_folders(kind: str, place: Place):
    """A run folder that somebody else made."""
    run = place.folder / "theirs"
    run.mkdir()
    (run / "recipe.yaml").write_text(f"model: {place.model}\ndata: {place.data}\n")
    (run / "plan.json").write_text('{"version": 99}')
    name, text, parts = RUNS[kind]
    (run / name).write_text(text)
    if name == "events.jsonl":
        assert main(["runs", str(place.folder)]) == 0
        assert all(part in place.capsys.readouterr().out.replace("\n", "") for part in ("unreadable",))
        return
    place.survives("train", "--resume", "theirs", parts=parts)
