from __future__ import annotations

import builtins
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fitune.errors import UserError
from fitune.train.loggers import open_loggers, scalars
from fitune.train.run_folder import RunFolder
from fitune.units import GIB

from .fake_run import make_run

HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
HAS_WANDB = importlib.util.find_spec("wandb") is not None


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes importing this package fail as if it were not installed."""
    for known in [known for known in sys.modules if known.startswith(("torch.utils.tensorboard", f"{name}."))]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, name, None)


def log_all(run: RunFolder, name: str, events: list[dict[str, Any]]) -> None:
    (logger,) = open_loggers([name], run)
    for event in events:
        logger.log(event)
    logger.close()
    logger.close()


def test_scalars_of_events() -> None:
    step = {"event": "step", "step": 3, "loss": 1.5, "grad_norm": None, "peak_allocated_bytes": 2 * GIB}
    assert dict(scalars(step)) == {"train/loss": 1.5, "memory/peak_allocated_gib": 2.0}
    evaluation = {"event": "eval", "step": 3, "eval_loss": 2.0, "by_language": {"en": 1.0, "zh": None}}
    assert dict(scalars(evaluation)) == {"eval/loss": 2.0, "eval/loss_en": 1.0}
    phase = {"event": "phase", "phase": "load", "peak_allocated_bytes": None, "host_bytes": GIB}
    assert dict(scalars(phase)) == {"phase/load_host_gib": 1.0}
    assert dict(scalars({"event": "notice", "text": "x"})) == {}


@pytest.mark.skipif(not HAS_TENSORBOARD, reason="tensorboard is not installed")
def test_tensorboard_holds_every_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(tmp_path / "run", steps=20, nan_steps=(3,))
    events = run.events()
    cut = [i for i, event in enumerate(events) if event.get("step") == 12 and event["event"] == "step"][0]
    log_all(run, "tensorboard", events[: cut + 1])  # killed after step 12, resumed from the checkpoint of step 10
    resumed = [dict(events[0], resumed_from=10), *(e for e in events[1:] if e.get("step", 0) > 10)]
    log_all(run, "tensorboard", resumed)

    board = EventAccumulator(str(run.path / "tensorboard"))
    board.Reload()
    losses = {event.step: event.value for event in board.Scalars("train/loss")}
    expected = {e["step"]: e["loss"] for e in events if e["event"] == "step" and e["loss"] is not None}
    assert losses == pytest.approx(expected, rel=1e-6) and 3 not in losses
    assert len(board.Scalars("train/loss")) == len(expected)
    evals = {event.step: event.value for event in board.Scalars("eval/loss_zh")}
    assert evals == pytest.approx({e["step"]: e["by_language"]["zh"] for e in events if e["event"] == "eval"}, rel=1e-6)
    assert {"speed/tokens_per_s", "train/lr", "memory/peak_allocated_gib"} <= set(board.Tags()["scalars"])
    assert "sample/zh/before/text_summary" in board.Tags()["tensors"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run = make_run(tmp_path / "run", begin=False)
    hide(monkeypatch, name)
    with pytest.raises(UserError) as caught:
        open_loggers([name], run)
    assert caught.value.what == f"cannot log to {name}" and caught.value.exit_code == 2
    assert f"the package {name} is not installed" in caught.value.why and f"pip install -U {name}" in caught.value.fix


def test_an_unknown_logger_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", begin=False)
    with pytest.raises(UserError, match="one of: tensorboard, wandb"):
        open_loggers(["mlflow"], run)
    assert open_loggers([], run) == []


@pytest.mark.skipif(not HAS_WANDB, reason="wandb is not installed")
def test_wandb_without_an_account_never_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked"))
    run = make_run(tmp_path / "run", begin=False)
    with pytest.raises(UserError) as caught:
        open_loggers(["wandb"], run)
    assert "nobody is logged in" in caught.value.why and "WANDB_MODE=offline" in caught.value.fix


@pytest.mark.skipif(not HAS_WANDB, reason="wandb is not installed")
def test_wandb_offline_keeps_the_run_below_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = make_run(tmp_path / "run", steps=8)
    log_all(run, "wandb", run.events())
    files = list((run.path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1
    run_id = (run.path / "wandb_id").read_text().strip()
    assert run_id in files[0].name
    content = files[0].read_bytes()
    assert b"train/loss" in content and b"eval/loss_zh" in content and b"Llama-3.1-8B" in content
    log_all(run, "wandb", run.events()[:1])
    assert (run.path / "wandb_id").read_text().strip() == run_id
    assert json.loads(run.plan_path.read_text())["model"] == "meta-llama/Llama-3.1-8B"
