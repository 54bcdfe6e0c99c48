"""`fitune.train(..., supervise=True)`: from Python, with the training in a process of its own."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED, UserError
from fitune.recipe import WHERE
from fitune.train.events import number
from fitune.train.run_folder import RunFolder
from fitune.train.supervise import OnEvent, Supervisor, is_possible

if TYPE_CHECKING:
    from fitune.recipe import Recipe
    from fitune.train.result import TrainResult


def run_supervised(recipe: Recipe, *, resume: Path | None = None, on_event: OnEvent | None = None) -> TrainResult:
    """As `fitune.train.run`, in a process of its own that is started again when the system kills it.

    What the workers print goes to this process' standard error.

    Raises:
        UserError: the run failed (its exit code is the error's); or this system cannot supervise.
    """
    if not is_possible():
        raise UserError("cannot train in a supervised process here", "it needs POSIX signals",
                        "leave supervise out, or use WSL")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="fitune-") as folder:
        wanted = Path(folder) / "recipe.yaml"
        wanted.write_text(recipe.to_yaml(), encoding="utf-8")
        where = _where(recipe)
        first = ["--resume", str(resume), *where] if resume is not None else [str(wanted)]

        def command(what: list[str]) -> list[str]:
            code = f"import sys; sys.path[:] = {sys.path!r}; from fitune.cli.main import main; sys.exit(main())"
            return [sys.executable, "-c", code, "train", *what]

        supervisor = Supervisor(command(first), lambda run: command(["--resume", str(run), *where]),
                                on_event=on_event, to_stderr=True)  # fmt: skip
        code = supervisor.run()
    if supervisor.folder is None or code not in (EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED):
        raise _failed(supervisor.folder, code)
    return _result(RunFolder(supervisor.folder), code)


def _where(recipe: Recipe) -> list[str]:
    """Options that say where it runs: a resumed run's own recipe may say something else."""
    values = {name: getattr(recipe, name) for name in WHERE}
    return [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]


def _failed(folder: Path | None, code: int) -> UserError:
    events = RunFolder(folder).events() if folder is not None else []
    error = next((e.get("error") for e in reversed(events) if e.get("event") == "end"), None)
    return UserError(str(error or "the training process failed"), f"its exit code is {code}",
                     "its own message stands in the standard error above", code)  # fmt: skip


def _result(folder: RunFolder, code: int) -> TrainResult:
    from fitune.train.result import TrainResult, eval_losses

    events = folder.events()
    info = folder.info()
    last: dict[str, Any] = next((e for e in reversed(events) if e.get("event") == "step"), {})
    before, after = eval_losses(events)
    return TrainResult(folder.path, info.status, code, info.steps_done, number(last.get("loss")), before, after,
                       info.link_bytes, info.link_bytes_per_s, info.link_wait_share)  # fmt: skip
