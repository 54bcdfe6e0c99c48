"""TensorBoard and Weights & Biases, fed with the same events as `events.jsonl`. Both packages are optional."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from fitune.errors import UserError
from fitune.train.events import number
from fitune.train.run_folder import RunFolder
from fitune.units import gb_per_s, gib

# Event field -> (tag, its value in the unit that the tag names)
_STEP_TAGS: dict[str, tuple[str, Callable[[float], float]]] = {
    "loss": ("train/loss", float),
    "lr": ("train/lr", float),
    "grad_norm": ("train/grad_norm", float),
    "loss_scale": ("train/loss_scale", float),
    "tokens_per_s": ("speed/tokens_per_s", float),
    "step_s": ("speed/step_s", float),
    "peak_allocated_bytes": ("memory/peak_allocated_gib", gib),
    "link_bytes": ("link/moved_gib", gib),
    "link_bytes_per_s": ("link/gb_per_s", gb_per_s),
    "link_wait_share": ("link/wait_share", float),
}
_PHASE_BYTES = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes")


class Logger(Protocol):
    """Takes every event of a run, as `EventLog.write` returned it."""

    def log(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def open_loggers(names: Sequence[str], run: RunFolder) -> list[Logger]:
    """The loggers called `tensorboard` and `wandb`, writing below the run's folder.

    Raises:
        UserError: an unknown name, a missing package (with the command that installs it), or Weights & Biases without
            an account while it is not offline. Nobody is ever asked to log in.
    """
    for name in names:
        if name not in _LOGGERS:
            raise UserError(f"cannot log to {name!r}", "there is no such logger", f"one of: {', '.join(_LOGGERS)}")
    opened: list[Logger] = []
    try:
        for name in dict.fromkeys(names):
            opened.append(_LOGGERS[name](run))
    except UserError:
        for logger in opened:
            logger.close()
        raise
    return opened


def scalars(event: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a step's, evaluation's or phase's event as (tag, value); what is null is left out."""
    kind = event["event"]
    if kind == "step":
        for field, (tag, in_unit) in _STEP_TAGS.items():
            if (value := number(event.get(field))) is not None:
                yield tag, in_unit(value)
    elif kind == "eval":
        if (value := number(event.get("eval_loss"))) is not None:
            yield "eval/loss", value
        for language, loss in (event.get("by_language") or {}).items():
            if (value := number(loss)) is not None:
                yield f"eval/loss_{language}", value
    elif kind == "phase":
        for field in _PHASE_BYTES:
            if (value := number(event.get(field))) is not None:
                yield f"phase/{event.get('phase')}_{field.removesuffix('_bytes')}_gib", gib(value)


class TensorBoardLogger:
    """Writes `tensorboard/` in the run's folder. After a resume, points past the resumed step are hidden."""

    def __init__(self, run: RunFolder):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", error) from None
        self._make_writer = SummaryWriter
        self._run = run
        self._writer: Any = None
        self._step = 0

    def log(self, event: dict[str, Any]) -> None:
        if self._writer is None:
            self._open(event)
        self._step = int(number(event.get("step")) or self._step)
        for tag, value in scalars(event):
            self._writer.add_scalar(tag, value, self._step, event["time"])
        if event["event"] == "sample":
            text = f"**{event.get('prompt')}**\n\n{event.get('answer')}"
            self._writer.add_text(f"sample/{event.get('language')}/{event.get('when')}", text, self._step)
        elif event["event"] == "notice":
            self._writer.add_text("notice", str(event.get("text")), self._step)
        elif event["event"] in ("eval", "checkpoint", "end"):
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, first: dict[str, Any]) -> None:
        resumed = number(first.get("resumed_from")) if first["event"] == "start" else None
        self._step = int(resumed or 0)
        purge_step = None if resumed is None else int(resumed) + 1
        self._writer = self._make_writer(str(self._run.path / "tensorboard"), purge_step=purge_step)
        self._writer.add_text("recipe", _code(self._run.recipe_text()), self._step)
        self._writer.add_text("plan", _code(self._run.plan_path.read_text(encoding="utf-8")), self._step)


class WandbLogger:
    """Writes to Weights & Biases, project `fitune`; `WANDB_MODE=offline` keeps it below the run's folder.

    A resumed run continues the same W&B run: its id stands in `wandb_id`.
    """

    def __init__(self, run: RunFolder):
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", error) from None
        online = os.environ.get("WANDB_MODE", "online") not in ("offline", "disabled", "dryrun")
        if online and not _has_wandb_account():
            raise UserError(
                "cannot log to wandb", "nobody is logged in to Weights & Biases on this machine",
                "run `wandb login` once, or set WANDB_MODE=offline and upload later with `wandb sync`",
            )  # fmt: skip
        id_path = run.path / "wandb_id"
        if not id_path.exists():
            id_path.write_text(secrets.token_hex(4) + "\n", encoding="ascii")
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "fitune"),
                name=run.name,
                id=id_path.read_text(encoding="ascii").strip(),
                resume="allow" if online else None,  # offline there is nothing to look up
                dir=str(run.path),
                config={"recipe": run.recipe_text(), "plan": run.plan_values()},
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise UserError(
                "cannot log to wandb", str(error), "check `wandb login` and the network, or set WANDB_MODE=offline"
            ) from None  # fmt: skip
        # Our own step as the axis: W&B's counter refuses to go back, and evaluations share a step with training.
        self._run.define_metric("*", step_metric="step")
        self._step, self._exit_code = 0, 0

    def log(self, event: dict[str, Any]) -> None:
        self._step = int(number(event.get("step")) or number(event.get("resumed_from")) or self._step)
        values: dict[str, Any] = dict(scalars(event))
        if event["event"] == "sample":
            text = f"{event.get('prompt')}\n\n{event.get('answer')}"
            values = {f"sample/{event.get('language')}/{event.get('when')}": text}
        elif event["event"] == "end":
            self._run.summary["status"] = event.get("status")
            self._exit_code = int(event.get("status") == "failed")
        if values:
            self._run.log(values | {"step": self._step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)
            self._run = None


_LOGGERS: dict[str, Callable[[RunFolder], Logger]] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}


def _missing(package: str, error: ImportError) -> UserError:
    is_absent = error.name == package
    why = f"the package {package} is not installed" if is_absent else f"the package {package} does not load: {error}"
    return UserError(f"cannot log to {package}", why, f"pip install -U {package}  (or leave {package} out of --log-to)")


def _has_wandb_account() -> bool:
    """Whether wandb would find a key without asking: in the environment or in the netrc file `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if netrc.netrc(str(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _code(text: str) -> str:
    """Text as a Markdown code block, which is how TensorBoard shows text."""
    return "\n".join(f"    {line}" for line in text.splitlines())
