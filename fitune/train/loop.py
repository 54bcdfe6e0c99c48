"""One run from its recipe to its result: plan, train, and whatever happens an end that is told. See `run`."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune import plan as plans
from fitune import recipe as recipes
from fitune.data.readers import DEMO
from fitune.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESTART, ToldElsewhere, UserError, first_line
from fitune.parallel.world import SAME_RECORDS, Single
from fitune.parallel.zero_config import config_json
from fitune.plan import Plan
from fitune.recipe import Recipe
from fitune.train import checkpoint, ranks, work
from fitune.train import session as sessions
from fitune.train.died import FRUGAL
from fitune.train.events import EventLog
from fitune.train.link_sums import link_fields
from fitune.train.loggers import open_loggers
from fitune.train.moved import plan_here
from fitune.train.oom import LOST, PEER, PLACES, MemoryFailure
from fitune.train.pulse import TIMES, Pulse, nobody
from fitune.train.recover import Agree, Restart, about_memory, alone
from fitune.train.report import write_report
from fitune.train.result import TrainResult, eval_losses, finished_result
from fitune.train.run_folder import RunFolder
from fitune.train.saver import Saver
from fitune.train.signals import EXIT_CODES, Stopped, StopSignals
from fitune.units import from_gib

if TYPE_CHECKING:
    from fitune.data.batches import MicroBatch, StepStream
    from fitune.data.records import Record

OnEvent = Callable[[dict[str, Any]], None]
_HISTORY = ("data", "eval", "sample", "replan")  # kinds of events that the work looks back at


@dataclass
class Run:
    """A run in progress; its parts are made in order by `run`.

    `agree` tells all ranks of a failure before any of them changes its plan (see `fitune.train.recover.alone`).
    """

    recipe: Recipe
    plan: Plan
    folder: RunFolder
    log: EventLog
    session: sessions.Session
    on_event: OnEvent
    num_steps: int
    stop: StopSignals = field(default_factory=StopSignals)
    started: float = field(default_factory=time.perf_counter)
    step: int = 0
    saved_step: int | None = None
    loss: float | None = None
    loggers: Sequence[Any] = ()
    agree: Agree = alone
    group: Single = field(default_factory=Single)  # the processes that train this run together
    step_s: float | None = None  # of the last step
    skipped: int = 0  # steps in a row that were left out
    pulse: Pulse = field(default_factory=lambda: Pulse(nobody))  # called wherever something has been done
    history: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    has_loaded: bool = False  # the model, in this process

    @property
    def own_plan(self) -> Plan:
        """The plan in force as this rank obeys it."""
        return self.plan.of_rank(self.group.rank)

    @functools.cached_property
    def saver(self) -> Saver:
        ram_bytes = from_gib(self.recipe.ram) if self.recipe.ram else None
        folder, keep = self.folder.checkpoints_path, self.recipe.keep_checkpoints
        return Saver(folder, keep, ram_bytes=ram_bytes, group=self.group)

    @functools.cached_property
    def stream(self) -> StepStream:
        """Which records make which step: a matter of the recipe alone, whatever the plan becomes."""
        from fitune.data.batches import StepStream

        grouped = not self.plan.packing
        return StepStream(self.session.data.train, self.recipe.batch, self.recipe.seed, group_by_length=grouped)

    def step_records(self, step: int | None = None) -> list[Record]:
        """The records of an optimizer step, from 0 (default: the one in work)."""
        _, positions = self.stream[self.step if step is None else step]
        return [self.session.data.train[i] for i in positions]

    def share(self, records: Sequence[Record]) -> Sequence[Record]:
        """Those of these records that this rank works on."""
        if self.group.size == 1 or self.plan.parallel in SAME_RECORDS:
            return records
        from fitune.parallel.replicated import share_of

        shares = [share.records for share in self.plan.shares]
        return share_of(records, self.group.rank, self.group.size, shares)

    def batches(self, records: Sequence[Record]) -> list[MicroBatch]:
        """Micro-batches of these records as the plan in force has them."""
        from fitune.data.batches import step_batches

        tokenizer = self.session.tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
        return step_batches(records, micro_batch=self.own_plan.micro_batch, packing=self.plan.packing,
                            seq_len=self.plan.seq_len, pad_id=pad)  # fmt: skip

    def emit(self, event: str, **fields: Any) -> None:
        """Store an event, show it, hand it to the loggers."""
        stored = self.log.write(event, **fields)
        if event in _HISTORY:
            self.history.setdefault(event, []).append(stored)
        self.on_event(stored)
        for logger in self.loggers:
            logger.log(stored)

    def load_history(self) -> None:
        """Read what the run's sessions so far have recorded."""
        self.history = {}
        for event in self.folder.events() if self.group.is_leader else []:
            if event.get("event") in _HISTORY:
                self.history.setdefault(event["event"], []).append(event)
        self.history = self.group.share(self.history)

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """The run's events of a kind (one of those it looks back at), the oldest first."""
        assert kind in _HISTORY, kind
        return self.history.get(kind, [])

    def has_event(self, kind: str, *, step: int) -> bool:
        return any(event.get("step") == step for event in self.events_of(kind))


def run(
    recipe: Recipe, *, resume: Path | None = None, on_event: OnEvent | None = None, supervised: bool = False
) -> TrainResult:  # fmt: skip
    """Train as the recipe says; with `resume`, go on with that run exactly where its last checkpoint is.

    Args:
        on_event: called with every event, and before them with {"event": "folder", ...} and {"event": "plan", ...}
            (neither is stored: the second is plan.json).
        supervised: another process starts this one again when it ends with `EXIT_RESTART`.

    Raises:
        UserError: bad input (2), nothing fits (3), failure during the work (1, the last checkpoint named).
    """
    with ranks.joined(recipe) as (group, own):
        show = on_event if on_event is not None and group.is_leader else nobody
        return _run(own, recipe, group, resume, show, supervised)


def _run(
    recipe: Recipe, asked: Recipe, group: Single, resume: Path | None, show: OnEvent, supervised: bool
) -> TrainResult:  # fmt: skip
    """`asked` is what is stored: of several ranks each one's `recipe` names no other GPU than its own."""
    if resume is None and group.elastic:
        with ranks.together(group):
            found = _same_run(asked) if group.is_leader else None
        resume = group.share(found)
    if resume is None:
        active = _start(recipe, asked, group, show)
    else:
        with ranks.together(group, by_node=True):
            folder = RunFolder.open_existing(resume)
        show({"event": "folder", "run_folder": str(folder.path), "lang": recipe.lang})
        finished = group.share(finished_result(folder))
        if finished is not None:
            show({"event": "notice", "text": f"{folder.path} is finished already: nothing is left to train"})
            return finished
        active = _reopen(recipe, asked, group, folder, show)
    if supervised:
        active.pulse = Pulse(show)
    # Until here a Ctrl-C ends the program as always: a new run has left nothing, an old one is as it was.
    with active.stop, active.log, _loggers(active, is_new=resume is None):
        active.pulse.expect_s(TIMES * float(active.plan.predicted.get("step_s") or 0.0))  # its first sign: it has begun
        return _guarded(active, resumed=resume is not None, supervised=supervised)


def _start(recipe: Recipe, asked: Recipe, group: Single, show: OnEvent) -> Run:
    today = group.share(datetime.date.today())  # the same in all time zones, and at midnight
    with ranks.together(group, by_node=True):
        sessions.check_machine(recipe)
        ranks.check(recipe, group.size)
        session = sessions.open_session(recipe, date=today)
    ranks.check_same(session, group)
    result = ranks.planned_together(session, group)
    plan, path = result.plan, None
    ranks.check_plan(plan, group, show)
    with ranks.together(group):
        if group.is_leader:
            out = Path(recipe.out) if recipe.out else None
            created = RunFolder.create(out, recipe.model, _with_whole_paths(asked).to_yaml(), plan.to_json(),
                                       deepspeed_json=config_json(plan))  # fmt: skip
            show({"event": "folder", "run_folder": str(created.path), "lang": recipe.lang})
            show({"event": "plan", "run_folder": str(created.path), **result.as_dict()})
            path = created.path.resolve() if group.size > 1 else created.path
    return _active(recipe, plan, group, RunFolder(group.share(path)), session, show)  # type: ignore[arg-type]


def _same_run(recipe: Recipe) -> Path | None:
    """The run that this very job has begun before: its command was started again."""
    stored = Path(recipe.out or "") / "recipe.yaml"
    if not recipe.out or not stored.is_file():
        return None
    before, now = recipes.build(recipes.load(stored), str(stored)), _with_whole_paths(recipe)
    where = set(recipes.WHERE)  # the first process may be on another machine now, in another language
    return stored.parent if before.model_dump(exclude=where) == now.model_dump(exclude=where) else None


def _active(
    recipe: Recipe, plan: Plan, group: Single, folder: RunFolder, session: sessions.Session, show: OnEvent
) -> Run:  # fmt: skip
    num_steps = recipe.num_steps(len(session.data.train))
    if group.size == 1:
        return Run(recipe, plan, folder, EventLog(folder.events_path), session, show, num_steps)
    with ranks.together(group):
        log = EventLog(folder.events_path) if group.is_leader else ranks.SilentLog(folder.events_path)
    return Run(recipe, plan, folder, log, session, show, num_steps, stop=ranks.SharedStop(group),
               agree=ranks.Agreement(group), group=group)  # fmt: skip


def _with_whole_paths(recipe: Recipe) -> Recipe:
    """For the run folder: local files by their whole paths, so that the run can be resumed from another folder."""
    changes = {}
    for name in ("model", "data", "eval_data", "offload_folder"):
        value = getattr(recipe, name)
        path = Path(value or "").expanduser()
        if value and value != DEMO and path.exists():
            changes[name] = str(path.resolve())
    return recipe.with_(**changes)


def _reopen(recipe: Recipe, asked: Recipe, group: Single, folder: RunFolder, show: OnEvent) -> Run:
    with ranks.together(group, by_node=True):
        plan = plans.from_json(folder.current_plan_path.read_text(encoding="utf-8"))
        saved = checkpoint.load_latest(folder.checkpoints_path, with_tensors=False)
        date = saved.values.get("date") if saved is not None else None
        ranks.check(recipe, group.size)
        session = sessions.open_session(recipe, date=datetime.date.fromisoformat(date) if date else None)
    ranks.check_same(session, group)
    active = _active(recipe, plan, group, folder, session, show)
    active.load_history()
    active.saver.frugal = any(event.get("change") == FRUGAL for event in active.events_of("replan"))
    try:
        plan_here(active)
        ranks.check_plan(active.plan, group, show)
        if group.is_leader:
            folder.store_recipe(asked)
    except BaseException:
        active.log.close()
        raise
    return active


@contextmanager
def _loggers(active: Run, is_new: bool) -> Iterator[None]:
    try:
        with ranks.together(active.group):
            active.loggers = open_loggers(active.recipe.log_to if active.group.is_leader else [], active.folder)
    except UserError:
        if is_new and active.group.is_leader:  # nothing has happened yet: leave nothing behind
            _discard(active)
        raise
    try:
        yield
    finally:
        for logger in active.loggers:
            logger.close()


def _discard(active: Run) -> None:
    active.log.close()
    active.folder.discard()


def _guarded(active: Run, *, resumed: bool, supervised: bool) -> TrainResult:
    """Run, and whatever happens leave an `end` event and a report."""
    try:
        status, error = work.train(active, resumed), None
    except Stopped as stopped:
        status, error = stopped.status, None
    except KeyboardInterrupt:
        status, error = "interrupted", None
    except Restart as wanted:
        raise _ended(active, wanted.failure, supervised) from wanted
    except UserError as problem:
        active.group.leave_word(problem)
        raise _failed(active, problem) from problem
    except Exception as problem:
        line = first_line(problem)
        found = about_memory(active, problem)
        if found is not None and found.where == PEER:  # a peer that ended while this rank told it something, or saved
            raise _ended(active, found, supervised) from problem
        if found is not None:
            words = UserError(f"out of memory at step {active.step + 1}", line,
                              "use a smaller --micro-batch or --vram", EXIT_FAILED)  # fmt: skip
            active.group.leave_word(words)
            raise _failed(active, words) from problem
        _end(active, "failed", line)
        _write_report(active)
        raise
    _end(active, status, error)
    _write_report(active)
    events = active.folder.events()
    before, after = eval_losses(events)
    code = EXIT_CODES.get(status, EXIT_DONE)
    return TrainResult(active.folder.path, status, code, active.step, active.loss, before, after,
                       **link_fields(events))  # fmt: skip


def _ended(active: Run, failure: MemoryFailure, supervised: bool) -> UserError:
    """After a failure with which only another process can go on; who starts that one tells of it."""
    said = active.group.last_word() if failure.where == PEER else None
    if said is not None:  # in the words of the one that has ended
        return _failed(active, said)
    if failure.where == LOST:
        what = "the device does not answer any more"
    elif failure.where == PEER:
        what = ranks.PEER_GONE
    else:
        what = f"out of {PLACES[failure.where]}, and this process cannot go on with the device"
    problem = UserError(what, failure.line, "", EXIT_RESTART if supervised else EXIT_FAILED)
    if supervised:
        return problem
    if failure.where != PEER:
        active.group.leave_word(problem)
    return _failed(active, problem)


def _failed(active: Run, problem: UserError) -> UserError:
    """Tell the end, and the same problem with the last checkpoint named."""
    # A checkpoint in the background: its failure (a peer that is gone is one) is not the one to tell now.
    with suppress(UserError, OSError, RuntimeError, MemoryError):
        work.report_saved(active, active.saver.wait())
    _end(active, "failed", problem.what)
    _write_report(active)
    kind = ToldElsewhere if isinstance(problem, ToldElsewhere) else UserError
    return kind(problem.what, problem.why, _with_checkpoint(active, problem.fix), problem.exit_code)


def _with_checkpoint(active: Run, fix: str) -> str:
    found = checkpoint.steps(active.folder.checkpoints_path)
    if not found:
        return fix
    words = f"the last checkpoint is at step {found[-1]}: fitune train --resume {active.folder.argument}"
    return f"{fix}; {words}" if fix else words


def _end(active: Run, status: str, error: str | None) -> None:
    extra = {"error": error} if error else {}
    try:
        active.emit("end", status=status, step=active.step, seconds=time.perf_counter() - active.started, **extra)
    except UserError as problem:  # the full disk that ended the run, perhaps: that error is the one to tell
        active.on_event({"event": "notice", "text": str(problem)})


def _write_report(active: Run) -> None:
    if not active.group.is_leader:
        return
    try:
        write_report(active.folder, active.recipe.lang or "en")
    except UserError as problem:  # the disk may be what ended the run; its events are safe
        active.on_event({"event": "notice", "text": str(problem)})
