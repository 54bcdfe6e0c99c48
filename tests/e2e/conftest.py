"""The tiny model and data of `tests.train`, in an empty working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train import tiny_run


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A tiny random Llama with a byte-level tokenizer."""
    return tiny_run.make_base(tmp_path_factory.mktemp("base") / "tiny-llama")


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return tiny_run.write_rows(tmp_path_factory.mktemp("data") / "questions.jsonl", tiny_run.questions(24))
