"""A small model and data on the disk, shared by the runs of these tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.parallel.runs import assert_same_run, train
from tests.train.tiny_run import make_base, questions, write_rows


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`job(out, ...)`: settings of a small run on the CPU."""
    folder = tmp_path_factory.mktemp("parallel")
    base = make_base(folder / "base", num_hidden_layers=2)
    data = write_rows(folder / "data.jsonl", questions(24))

    def settings(out: Path, **changes: Any) -> dict[str, Any]:
        values = dict(model=str(base), data=str(data), seq_len=128, batch=5, steps=6, lr=1e-2, lora_r=4, devices="cpu",
                      lora_dropout=0.1, eval_share=0.2, eval_every=3, save_every=2, precision="fp32", warmup=0,
                      schedule="constant", packing=False, out=str(out))  # fmt: skip
        return values | changes

    return settings


FULL: dict[str, Any] = dict(method="full", lr=1e-3, lora_dropout=0.0, steps=3, eval_share=0)


@pytest.fixture(scope="session")
def alone(job: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job on one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert train(1, job(out))[0][0] == "done"
    return out


@pytest.fixture(scope="session")
def assert_same_model(job: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], None]:
    """`assert_same_model(out, way)`: full fine-tuning by two ranks writes the model that one process writes."""
    one = tmp_path_factory.mktemp("alone-full") / "run"
    assert train(1, job(one, **FULL))[0][0] == "done"
    theirs = load_file(one / "model" / "model.safetensors")

    def check(out: Path, way: str) -> None:
        train(2, job(out, **FULL, parallel=way))
        assert_same_run(out, one)
        ours = load_file(out / "model" / "model.safetensors")
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype and (ours[name] - tensor).norm() <= 1e-3 * tensor.norm(), name

    return check
