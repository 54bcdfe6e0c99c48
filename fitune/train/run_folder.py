"""The folder of one run, readable without the tool, and the list of runs below a folder.

recipe.yaml    what was asked for         checkpoints/        where a resumed run starts
plan.json      what was decided first     adapter/ or model/  the result
*.N.json/yaml  and what took their place
events.jsonl   what happened              report.html         all of it to look at
deepspeed.json what DeepSpeed was told (ZeRO only)
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fitune import recipe as recipes
from fitune.errors import UserError
from fitune.files import atomic_write, clean_leftovers, explained, file_error, parse_json, size_on_disk
from fitune.parallel.zero_config import config_json
from fitune.plan import Plan
from fitune.recipe import QUANTISED_FORMATS, WHERE, Recipe
from fitune.train.events import END_STATUSES, is_being_written, number, read_events
from fitune.train.link_sums import link_fields
from fitune.train.story import story

RUNS = Path("runs")
_WORK = ("start", "step", "eval", "checkpoint", "end")
_OURS = ("recipe.yaml", "plan.json", "events.jsonl", "checkpoints", "adapter", "model", "report.html",
         "deepspeed.json")  # fmt: skip


@dataclass(frozen=True)
class RunInfo:
    """One run at a glance. Seconds and bytes; `None` where nothing was recorded.

    `status`: planned (nothing trained yet), running, done, interrupted (Ctrl-C), terminated (SIGTERM), failed,
    killed (it stopped without a word), unreadable (`problem` says why).
    """

    name: str
    path: str
    status: str
    model: str | None = None
    method: str | None = None  # full | lora | qlora
    steps_done: int = 0
    steps_total: int | None = None
    last_loss: float | None = None
    eval_loss_before: float | None = None  # of the evaluation at step 0
    eval_loss_after: float | None = None  # of the last evaluation after it
    started: str | None = None  # ISO 8601 with the offset of local time
    duration_s: float | None = None  # time at work; pauses between a stop and a resume do not count
    size_bytes: int = 0
    problem: str | None = None
    recovered: str | None = None  # one line about failures that it survived
    link_bytes: int | None = None  # of weights that crossed the link, over all steps; None where none streamed
    link_bytes_per_s: float | None = None
    link_wait_share: float | None = None  # part of those steps' time that was spent waiting for them

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RunFolder:
    """Paths and contents of one run's folder."""

    path: Path

    @classmethod
    def create(
        cls, out: Path | None, model: str, recipe_yaml: str, plan_json: str, root: Path = RUNS,
        deepspeed_json: str | None = None,
    ) -> RunFolder:  # fmt: skip
        """Makes the folder with the recipe and the plan in it; by default `root/<YYYYmmdd-HHMMSS>-<short model name>`.

        An existing folder may be used when nothing in it has the name of a part of a run.

        Raises:
            UserError: it already holds a run or a file that would be overwritten; a file in the way; no permission;
                read-only; disk full. Nothing of what was begun is left.
        """
        path, is_new = _new_folder(out, model, root)
        later = [found.name for form in ("plan.*.json", "recipe.*.yaml") for found in path.glob(form)
                 if cls.plan_number(found) > 0]  # fmt: skip
        for name in (*_OURS, *later):
            if (path / name).exists():
                _refuse(path, name)
        written: list[Path] = []
        try:
            texts = {"recipe.yaml": recipe_yaml, "plan.json": plan_json, "deepspeed.json": deepspeed_json}
            for name, text in texts.items():
                if text is not None:
                    atomic_write(path / name, text)
                    written.append(path / name)
        except UserError:
            for file in written:
                file.unlink(missing_ok=True)
            if is_new:
                path.rmdir()
            raise
        return cls(path)

    def discard(self) -> None:
        """Inverse of `create`, for a run that has not begun: other things in the folder stay."""
        for path in (self.recipe_path, self.plan_path, self.deepspeed_path, self.events_path):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder was there before, with other things in it
            self.path.rmdir()

    @classmethod
    def open_existing(cls, run: str | Path, root: Path = RUNS) -> RunFolder:
        """The run at this path, or of this name below `root`. Mends what a kill left in the middle of a swap.

        Raises:
            UserError: no such folder (with the nearest names), or it is not a run.
        """
        for path in (Path(run), root / run):
            if path.is_dir():
                if not _is_run(path):
                    missing = next(name for name in ("plan.json", "recipe.yaml") if not (path / name).is_file())
                    raise UserError(f"{path} is not a run", f"it holds no {missing}", "`fitune runs` lists the runs")
                with explained("clean up", path):
                    for folder in (path, path / "checkpoints"):
                        clean_leftovers(folder)
                return cls(path)
        raise UserError(f"no run {str(run)!r}", f"there is no such folder, here or in {root}", _nearest(str(run), root))

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def recipe_path(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def deepspeed_path(self) -> Path:
        """What DeepSpeed was told by the last plan that used it; only there when one did."""
        return self.path / "deepspeed.json"

    @property
    def current_plan_path(self) -> Path:
        """The plan in force: `plan.N.json` of the last replan after running out of memory, else `plan.json`."""
        return max([self.plan_path, *self.path.glob("plan.*.json")], key=self.plan_number)

    @staticmethod
    def plan_number(path: Path) -> int:
        """N of `plan.N.json` or `recipe.N.yaml`; 0 of `plan.json` or `recipe.yaml`, and -1 of other files."""
        if path.name in ("plan.json", "recipe.yaml"):
            return 0
        number = path.name.split(".")[1]
        return int(number) if number.isdigit() else -1

    def store_plan(self, plan: Plan, *, write: bool = True) -> int:
        """Write a plan that is in force from now on beside the first one (`write`: or count it only); its number."""
        number = self.plan_number(self.current_plan_path) + 1
        if write:
            atomic_write(self.path / f"plan.{number}.json", plan.to_json())
            if (text := config_json(plan)) is not None:
                atomic_write(self.deepspeed_path, text)
        return number

    @property
    def current_recipe_path(self) -> Path:
        """The recipe as the run was resumed last: `recipe.N.yaml` where that was to run elsewhere or otherwise."""
        return max([self.recipe_path, *self.path.glob("recipe.*.yaml")], key=self.plan_number)

    def store_recipe(self, recipe: Recipe) -> None:
        """Write, beside the first one, a recipe of which the stored one differs in where it runs (`recipe.WHERE`); no
        file where it does not."""
        stored = recipes.build(recipes.load(self.current_recipe_path))
        now = {name: getattr(recipe, name) for name in WHERE}
        if now != {name: getattr(stored, name) for name in WHERE}:
            number = self.plan_number(self.current_recipe_path) + 1
            atomic_write(self.path / f"recipe.{number}.yaml", stored.with_(**now).to_yaml())

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter_path(self) -> Path:
        return self.path / "adapter"

    @property
    def model_path(self) -> Path:
        return self.path / "model"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    @property
    def argument(self) -> str:
        """The path as one would type it in a shell."""
        return shlex.quote(str(self.path))

    def events(self) -> list[dict[str, Any]]:
        """All events so far, none when nothing was trained yet. Raises UserError when they cannot be read."""
        return read_events(self.events_path)

    def plan_values(self) -> dict[str, Any]:
        """The plan as plain values, whatever fitune version wrote it. Raises UserError when it is not JSON."""
        with explained("read", self.plan_path):
            text = self.plan_path.read_text(encoding="utf-8", errors="replace")
        try:
            values = parse_json(text)
        except ValueError as error:
            raise UserError(f"cannot read {self.plan_path}", f"it is not JSON ({error})", "restore the file") from None
        if not isinstance(values, dict):
            raise UserError(f"cannot read {self.plan_path}", "it is not a JSON object", "restore the file")
        return values

    def recipe_text(self) -> str:
        """The recipe as it was written last. Raises UserError when it cannot be read."""
        with explained("read", self.current_recipe_path):
            return self.current_recipe_path.read_text(encoding="utf-8", errors="replace")

    def info(self) -> RunInfo:
        """The run at a glance; never raises for a half-written folder (status `unreadable`)."""
        size_bytes = size_on_disk(self.path)
        try:
            plan, events = self.plan_values(), self.events()
        except UserError as error:
            problem = f"{error.what}: {error.why}"
            return RunInfo(self.name, str(self.path), "unreadable", size_bytes=size_bytes, problem=problem)
        steps = [e for e in events if e.get("event") == "step"]
        evals = [e for e in events if e.get("event") == "eval"]
        starts = [e for e in events if e.get("event") == "start"]
        started = number(starts[0].get("time")) if starts else None
        return RunInfo(
            name=self.name,
            path=str(self.path),
            status=run_status(events, is_being_written(self.events_path)),
            model=_text(plan.get("model")),
            method=method_name(plan),
            steps_done=int(number(steps[-1].get("step")) or 0) if steps else 0,
            steps_total=_whole(starts[-1].get("steps")) if starts else None,
            last_loss=number(steps[-1].get("loss")) if steps else None,
            eval_loss_before=next((number(e.get("eval_loss")) for e in evals if e.get("step") == 0), None),
            eval_loss_after=number(evals[-1].get("eval_loss")) if evals and evals[-1].get("step") != 0 else None,
            started=None if started is None else _local_time(started),
            duration_s=working_time(events),
            size_bytes=size_bytes,
            recovered=story(events),
            **link_fields(steps),
        )


def list_runs(root: Path = RUNS) -> list[RunInfo]:
    """Every run directly below `root`, the newest first; folders that are no runs are left out.

    A half-written or damaged run is listed as `unreadable`.

    Raises:
        UserError: `root` is not a folder or may not be read. A missing `root` is no run at all.
    """
    if not root.exists():
        return []
    with explained("list the runs in", root):
        folders = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]
        paths = [path for path in folders if _holds_run(path)]
    infos = [RunFolder(path).info() for path in paths]
    return sorted(infos, key=lambda info: (info.started or _modified(Path(info.path)), info.name), reverse=True)


def run_status(events: list[dict[str, Any]], is_alive: bool) -> str:
    """How the newest session among `events` ended, or that it goes on; see `RunInfo`.

    Args:
        is_alive: a process holds the event log. It may be reading its data before it writes a `start`, and it still
            holds the log when it writes the report after its `end`.
    """
    if is_alive and not (events and events[-1].get("event") == "end"):
        return "running"
    for event in reversed(events):
        if event.get("event") == "end":
            status = event.get("status")
            return str(status) if status in END_STATUSES else "failed"
        if event.get("event") == "start":
            return "killed"
    return "planned"


def working_time(events: list[dict[str, Any]]) -> float | None:
    """Seconds from each start to the last work before the next one, added up; None without a start.

    A resumed session tells of its data before it starts: those events end no session.
    """
    total_s, begin, last = 0.0, None, None
    for event in events:
        moment = number(event.get("time"))
        if moment is None:
            continue
        if event.get("event") == "start":
            if begin is not None and last is not None:
                total_s += max(last - begin, 0.0)
            begin = moment
        if event.get("event") in _WORK:
            last = moment
    return None if begin is None or last is None else total_s + max(last - begin, 0.0)


def method_name(plan: dict[str, Any]) -> str | None:
    """`full`, `lora` or `qlora` (LoRA on a quantised base)."""
    method = _text(plan.get("method"))
    return "qlora" if method == "lora" and plan.get("base_format") in QUANTISED_FORMATS else method


def short_model_name(model: str) -> str:
    """The part of a model's id or path that fits in a folder's name: `Llama-3.1-8B` of `meta-llama/Llama-3.1-8B`."""
    last = re.split(r"[/\\:]", model.rstrip("/\\"))[-1]
    last = re.sub(r"\.(gguf|yaml|yml)$", "", last, flags=re.IGNORECASE)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.")[:40] or "model"


def _new_folder(out: Path | None, model: str, root: Path) -> tuple[Path, bool]:
    """The folder, created when it was not there, and whether it was created."""
    if out is not None:
        with explained("create the run folder", out):
            is_new = not out.exists()
            out.mkdir(parents=True, exist_ok=True)
        return out, is_new
    base = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{short_model_name(model)}"
    for attempt in range(1, 1000):
        path = base if attempt == 1 else base.with_name(f"{base.name}-{attempt}")
        try:
            root.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except OSError as error:
            if isinstance(error, FileExistsError) and path.exists() and root.is_dir():
                continue  # another run began in the same second
            raise file_error("create the run folder", path, error) from error
        return path, True
    raise AssertionError("a thousand runs in one second")


def _refuse(path: Path, name: str) -> None:
    if _is_run(path):
        raise UserError(
            f"{path} already holds a run", "a run is never overwritten",
            f"continue it with `fitune train --resume {shlex.quote(str(path))}`, or choose another folder with --out",
        )  # fmt: skip
    raise UserError(f"cannot create a run in {path}", f"{name} is already there", "choose a new folder with --out")


def _is_run(path: Path) -> bool:
    return (path / "plan.json").is_file() and (path / "recipe.yaml").is_file()


def _holds_run(path: Path) -> bool:
    """Also a run that lost one of its files: `fitune runs` shows it as unreadable instead of hiding it."""
    return _is_run(path) or (path / "events.jsonl").is_file() or (path / "plan.json").is_file()


def _nearest(run: str, root: Path) -> str:
    names = [path.name for path in sorted(root.iterdir()) if _is_run(path)] if root.is_dir() else []
    close = difflib.get_close_matches(Path(run).name, names, n=3, cutoff=0.4) or names[-3:]
    return f"did you mean {' or '.join(close)}?" if close else "start one with `fitune train`"


def _modified(path: Path) -> str:
    try:
        return _local_time(path.stat().st_mtime) or ""
    except OSError:
        return ""


def _local_time(seconds: float) -> str | None:
    """ISO 8601 with the offset of local time; None for a number that is no time."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(found)
