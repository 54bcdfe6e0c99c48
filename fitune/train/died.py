"""Why a worker died, and what its next one does differently. Imports no torch: the supervisor is what survives."""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune import plan as plans
from fitune import recipe as recipes
from fitune.errors import EXIT_FAILED, UserError
from fitune.parallel.forwarding import signal_name
from fitune.recipe import Recipe
from fitune.train.oom import DEVICE, HOST, PEER, PINNED, MemoryFailure, classify_text

if TYPE_CHECKING:
    from fitune.train.run_folder import RunFolder

MOST_WITHOUT_PROGRESS = 4  # restarts without a newer checkpoint, where each one changes something
MOST_UNCHANGED = 2  # where there is nothing to change
_FIXABLE = ("micro_batch", "recompute", "loss_chunk")
FRUGAL = "checkpoints are written without a copy in host RAM"
UNCHANGED = "nothing"
_SHELL_SIGNAL = 128  # a shell's exit code for a child that was ended by signal N is 128 + N


def fixed_by(recipe: Recipe) -> frozenset[str]:
    """What no notch may change, because the person has said it."""
    return frozenset(name for name in _FIXABLE if getattr(recipe, name) not in (None, "auto"))


@dataclass(frozen=True)
class Death:
    """How a worker ended without an end of the run.

    Attributes:
        cause: one line for the person.
        failure: the memory that ran out, when that is why.
        is_certain: the system's own counters or messages say so.
        planned: the worker has changed the plan itself.
    """

    cause: str
    failure: MemoryFailure | None = None
    is_certain: bool = False
    planned: bool = False

    @property
    def fix(self) -> str:
        if self.failure is not None and self.failure.where == HOST:
            return "close other programs, raise the container's memory limit, or use a smaller model or --batch"
        return "see the messages above; --no-supervise runs everything in one process"


def diagnose(
    code: int, text: str, kills_before: int | None, kills_after: int | None, *, wants_restart: bool = False
) -> Death | None:
    """Why a worker with this exit code is gone; None when it ended by itself (done, refused, saved, failed).

    Args:
        code: as `subprocess` gives it: negative for a signal.
        text: the end of its standard error.
        kills_before, kills_after: the kernel's count of processes killed for memory (`oom_kills`).
    """
    said = classify_text(text)
    if wants_restart:
        cause = said.line if said is not None else "the device does not answer any more"
        return Death(cause, said, is_certain=True, planned=True)
    number = -code if code < 0 else code - _SHELL_SIGNAL if code > _SHELL_SIGNAL else 0
    if number in (0, signal.SIGINT, signal.SIGTERM):
        if number == 0 and code != 0 and said is not None and said.source == "bitsandbytes":
            return Death(said.line, said, is_certain=True)
        return None
    name = signal_name(number)
    if number == signal.SIGKILL:
        counted = kills_before is not None and kills_after is not None and kills_after > kills_before
        by_hand = "it was killed (SIGKILL), by the system or by hand"
        cause = "the system killed it for memory (oom_kill)" if counted else by_hand
        return Death(cause, MemoryFailure(HOST, "kernel", cause), is_certain=counted)
    if said is not None:
        return Death(f"{said.line} ({name})", said, is_certain=True)
    return Death(f"it was ended by {name}")


def tell_end(folder: Path, code: int, text: str, step: int) -> None:
    """The end of a run whose own process has not told it: of several ranks the first one, which writes, is ended when
    another one has failed for a reason of its own.

    Args:
        code: the exit code.
        text: the end of what was printed as errors; the last message is the reason.
        step: the last one that was finished.
    """
    from fitune.train.run_folder import RunFolder

    said = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")]
    with contextlib.suppress(UserError):  # a full disk may be why it was not told: the message is on the screen
        _end(RunFolder(folder), step, said[-1] if said else f"a process of the run has ended with exit code {code}")


def _end(run: RunFolder, step: int, error: str) -> None:
    from fitune.train.report import write_report

    _write(run, "end", status="failed", step=step, seconds=0.0, error=error)
    write_report(run, recipes.build(recipes.load(run.current_recipe_path)).lang or "en")


def _write(run: RunFolder, event: str, **fields: Any) -> None:
    from fitune.train.events import EventLog

    with EventLog(run.events_path) as log:
        log.write(event, **fields)


_FOLLOWS = ("predicted", "reasons")  # of a plan: what its other fields lead to


class Restarts:
    """Decides about restarts of one run: what changes, and when it is enough."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._checkpoint = self._last_checkpoint()
        self._without_progress = 0
        self._unchanged = 0

    def next(self, death: Death, code: int, step: int) -> str:
        """Prepare the run's folder for the next worker: the plan changed, the event written.

        Args:
            step: the last one that the worker finished.

        Returns:
            One line for the person.
        Raises:
            UserError: it has died often enough without getting on, or nothing is left to change (exit code 1).
        """
        last = self._last_checkpoint()
        if last > self._checkpoint:
            self._checkpoint, self._without_progress, self._unchanged = last, 0, 0
        self._without_progress += 1
        number, change = self._change(death)
        self._unchanged += change == UNCHANGED
        if self._without_progress > MOST_WITHOUT_PROGRESS or self._unchanged > MOST_UNCHANGED:
            self._give_up(death, step)
        self._tell(death, code, step, last, change, number)
        begin = f"step {last}" if last else "the beginning"
        changed = "" if change == UNCHANGED else f"; {change}"
        return f"note: the run died after step {step}: {death.cause}{changed}; it goes on from {begin}"

    def _change(self, death: Death) -> tuple[int | None, str]:
        """(number of the new plan or None, what changes in words)."""
        from fitune.planner.notch import next_notch
        from fitune.train.run_folder import RunFolder

        if death.planned:
            return self._untold() or (None, self._planned())
        if death.failure is None:
            return None, UNCHANGED
        if death.failure.where == PEER:
            return None, UNCHANGED  # a connection that is gone: no smaller plan mends it
        if not death.is_certain and self._without_progress == 1:
            return None, UNCHANGED  # perhaps somebody's hand: the same again, exactly
        run = RunFolder(self.folder)
        plan = plans.from_json(run.current_plan_path.read_text(encoding="utf-8"))
        recipe = recipes.build(recipes.load(run.current_recipe_path))
        where = death.failure.where if death.failure.where in (HOST, PINNED) else DEVICE
        found = next_notch(plan, fixed_by(recipe), where=where)
        if found is not None:
            return run.store_plan(found[0]), found[1]
        frugal_already = any(event.get("change") == FRUGAL for event in run.events())
        if where == HOST and not frugal_already:
            return None, FRUGAL
        return None, UNCHANGED

    def _planned(self) -> str:
        from fitune.train.run_folder import RunFolder

        for event in reversed(RunFolder(self.folder).events()):
            if event.get("event") == "replan":
                return str(event.get("change"))
            if event.get("event") == "restart":
                break
        return UNCHANGED

    def _untold(self) -> tuple[int, str] | None:
        """As `_change`: a plan that a rank has left which could neither tell the others nor write an event."""
        from fitune.train.run_folder import RunFolder

        run = RunFolder(self.folder)
        numbers = [event.get("number") for event in run.events() if event.get("event") == "replan"]
        told = max((number for number in numbers if isinstance(number, int)), default=0)
        number = run.plan_number(run.current_plan_path)
        if number <= told:
            return None
        before = run.path / f"plan.{told}.json" if told else run.plan_path
        old, new = (plans.from_json(path.read_text(encoding="utf-8")) for path in (before, run.current_plan_path))
        names = [name for name, value in vars(new).items() if value != getattr(old, name) and name not in _FOLLOWS]
        changed = [f"{name.replace('_', '-')} {getattr(old, name)} -> {getattr(new, name)}"
                   if name != "shares" else "the ranks' shares" for name in names]  # fmt: skip
        return (number, ", ".join(changed)) if changed else None

    def _tell(self, death: Death, code: int, step: int, last: int, change: str, number: int | None) -> None:
        where = death.failure.where if death.failure is not None else None
        fields: dict[str, Any] = dict(step=step, cause=death.cause, exit_code=code, where=where, change=change)
        if change != UNCHANGED and (number is not None or not death.planned):
            self._write("replan", step=step + 1, number=number, change=change, cause=death.cause, where=where,
                        phase="restart")  # fmt: skip
        self._write("restart", from_step=last, **fields)

    def _write(self, event: str, **fields: Any) -> None:
        from fitune.train.run_folder import RunFolder

        _write(RunFolder(self.folder), event, **fields)

    def _give_up(self, death: Death, step: int) -> None:
        from fitune.train.run_folder import RunFolder

        run = RunFolder(self.folder)
        what = f"the run died {self._without_progress} times after step {step} without getting on"
        _end(run, step, f"{what}: {death.cause}")
        last = self._last_checkpoint()
        saved = f"; the last checkpoint is at step {last}: fitune train --resume {run.argument}" if last else ""
        raise UserError(what, death.cause, death.fix + saved, EXIT_FAILED)

    def _last_checkpoint(self) -> int:
        folder = self.folder / "checkpoints"
        names = [re.fullmatch(r"step-(\d{8})", path.name) for path in folder.iterdir()] if folder.is_dir() else []
        return max((int(match[1]) for match in names if match), default=0)
