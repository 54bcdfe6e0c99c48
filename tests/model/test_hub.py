"""Downloads against a real HTTP server on this machine that answers as the two hubs do."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaConfig, LlamaForCausalLM

from fitune.errors import UserError
from fitune.model import hub
from fitune.model.source import resolve

COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """Both hubs' answers for the models in ``server.models`` (id to folder)."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        url = urlsplit(self.path)
        self.server.seen.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        parts = url.path.strip("/").split("/")
        if parts[:3] == ["api", "v1", "models"]:
            self._modelscope("/".join(parts[3:5]), parts[5:], {k: v[0] for k, v in parse_qs(url.query).items()})
        elif parts[:2] == ["api", "models"]:
            self._huggingface("/".join(parts[2:4]), None, body)
        else:
            self._huggingface("/".join(parts[:2]), "/".join(parts[4:]), body)

    def _huggingface(self, model: str, file: str | None, body: bool) -> None:
        if model == "meta/gated":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, body)
        elif model == "some/broken":
            self._send(500, b"{}", {}, body)
        elif model not in self.server.models:
            self._send(401, b'{"error":"Repository not found"}', {"X-Error-Code": "RepoNotFound"}, body)
        elif file is None:
            names = sorted(p.name for p in self.server.models[model].iterdir())
            data = {"id": model, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            if "/tree/" in self.path:
                sizes = {p.name: p.stat().st_size for p in self.server.models[model].iterdir()}
                data = [{"type": "file", "path": n, "size": s, "oid": "b" * 40} for n, s in sizes.items()]
            self._send(200, json.dumps(data).encode(), {"Content-Type": "application/json"}, body)
        else:
            content = (self.server.models[model] / file).read_bytes()
            etag = hashlib.sha1(content).hexdigest()
            self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body)

    def _modelscope(self, model: str, tail: list[str], query: dict[str, str]) -> None:
        if model not in self.server.models:
            self._send(404, b"{}", {}, True)
        elif tail == ["repo", "files"]:
            files = [
                {
                    "Path": p.name,
                    "Type": "blob",
                    "Size": p.stat().st_size,
                    "Sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
                }
                for p in sorted(self.server.models[model].iterdir())
            ]
            self._send(200, json.dumps({"Code": 200, "Data": {"Files": files}}).encode(), {}, True)
        else:
            content = (self.server.models[model] / query["FilePath"]).read_bytes()
            start = int(self.headers.get("Range", "bytes=0-")[6:-1])
            cut = self.server.cut.pop(query["FilePath"], None)
            self._send(206 if start else 200, content[start:][:cut], {}, True, len(content) - start)

    def _send(self, code: int, content: bytes, headers: dict[str, str], body: bool, length: int | None = None) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    model = tmp_path / "published"
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(model)
    (model / "pytorch_model.bin").write_bytes(b"a pickle that nobody needs")
    (model / "README.md").write_text("hello")
    instance = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    instance.models, instance.seen, instance.cut = {"some/model": model}, [], {}
    thread = threading.Thread(target=instance.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{instance.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", address)
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield instance
    instance.shutdown()
    instance.server_close()
    thread.join()


@pytest.mark.parametrize("where", ["huggingface", "modelscope"])
def test_a_model_is_fetched_once_and_only_what_is_needed(server, tmp_path: Path, where: str) -> None:
    source = resolve("some/model", hub=where)
    want = dict(resolve(str(tmp_path / "published")).iter_weights())
    got = dict(source.iter_weights())
    assert source.kind == where and all(torch.equal(got[name], want[name]) for name in want)
    names = {p.name for p in source.path.iterdir() if not p.name.startswith(".")}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    before = [line for line in server.seen if "model.safetensors" in line and line.startswith("GET")]
    resolve("some/model", hub=where)
    assert [line for line in server.seen if "model.safetensors" in line and line.startswith("GET")] == before


@pytest.mark.parametrize("where", ["huggingface", "modelscope"])
def test_planning_fetches_the_configuration_only(server, where: str) -> None:
    source = resolve("some/model", hub=where, weights=False)
    assert source.kind == "shape" and source.config.hidden_size == 16
    assert not [line for line in server.seen if "safetensors" in line and "tree" not in line]
    server.seen.clear()
    assert resolve("some/model", hub=where, weights=False).config.hidden_size == 16
    assert not server.seen  # the second time from the cache


@pytest.mark.parametrize("where", ["huggingface", "modelscope"])
def test_what_cannot_be_trained_is_refused_before_its_weights_are_fetched(server, tmp_path: Path, where: str) -> None:
    config = tmp_path / "published" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(UserError, match=r"some/model is already quantised \(gptq, 4 bit\)"):
        resolve("some/model", hub=where)
    config.write_text(json.dumps({**values, "model_type": "newmodel"}))
    assert not [line for line in server.seen if "model.safetensors" in line]


@pytest.mark.parametrize(
    "name, message",
    [
        ("meta/gated", r"cannot get meta/gated from Hugging Face\n  why: the model is gated.*\n  fix: .*hf auth login"),
        ("some/absent", r"there is no model of this name, or it is private"),
        ("some/broken", r"cannot get some/broken from Hugging Face\n  why: .*500"),
    ],
)
def test_refusals_of_hugging_face(server, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(name)


def test_hugging_face_out_of_reach(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"cannot be reached .* not in the cache\n  fix: .*--hub modelscope"):
        resolve("some/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"cannot get some/model from Hugging Face\n  why: .*cannot be reached"):
        resolve("some/model")
    with pytest.raises(UserError, match=r"not in the catalog either\n  fix: .*nearest models that need no network: "):
        resolve("some/gpt-2b", weights=False)


def test_a_cached_model_needs_no_network(server, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("huggingface", "modelscope"):
        resolve("some/model", hub=where)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    for where in ("huggingface", "modelscope"):
        assert len(dict(resolve("some/model", hub=where).iter_weights())) == 12


def test_only_the_configuration_cached(server, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve("some/model", weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="some/model"):
        resolve("some/model")


# ---- ModelScope ------------------------------------------------------------------------------------------------------


def test_modelscope_download_continues(server, tmp_path: Path) -> None:
    server.cut["model.safetensors"] = 1000
    with pytest.raises(UserError, match="from ModelScope\n.*\n  fix: run it again: it continues where it stopped"):
        resolve("some/model", hub="modelscope")
    server.seen.clear()
    source = resolve("some/model", hub="modelscope")
    assert [line for line in server.seen if line.endswith("bytes=1000-")]
    assert (source.path / "model.safetensors").read_bytes() == (tmp_path / "published/model.safetensors").read_bytes()


def test_modelscope_damaged_download_starts_again(server, tmp_path: Path) -> None:
    part = hub._modelscope_folder("some/model") / "model.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * (tmp_path / "published/model.safetensors").stat().st_size)
    with pytest.raises(UserError, match="model.safetensors did not arrive whole"):
        resolve("some/model", hub="modelscope")
    assert len(dict(resolve("some/model", hub="modelscope").iter_weights())) == 12


def test_modelscope_refusals(server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"from ModelScope\n  why: there is no model of this name \(HTTP 404\)"):
        resolve("some/absent", hub="modelscope")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"modelscope.cn cannot be reached .* and the model is not in the cache"):
        resolve("some/model", hub="modelscope")
