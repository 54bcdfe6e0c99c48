"""A small model and data on the disk, shared by the runs of these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.runs import train
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


@pytest.fixture(scope="session")
def alone(job: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job on one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert train(1, job(out))[0][0] == "done"
    return out
