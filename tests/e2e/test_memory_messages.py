"""A command that runs out of memory where nothing can be changed says so, without a traceback."""

from __future__ import annotations

import pytest
import torch

from fitune.cli import api
from fitune.cli.main import main


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "error: out of GPU memory"),
        (MemoryError("Unable to allocate 7.28 GiB for an array"), "error: out of host memory"),
    ],
)
def test_running_out(error: Exception, said: str, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(api, "planned", fail)
    assert main(["plan", "smollm2"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(said) and f"why: {str(error)[:30]}" in shown and "Traceback" not in shown


def test_another_error_is_a_bug(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(api, "planned", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        main(["plan", "smollm2"])
