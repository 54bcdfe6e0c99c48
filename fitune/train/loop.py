"""One run from its recipe to its adapter: plan, load, step after step, evaluate, save, report. See `run`."""

from __future__ import annotations

import datetime
import functools
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune import plan as plans
from fitune.data.readers import DEMO
from fitune.errors import EXIT_DONE, EXIT_FAILED, UserError
from fitune.plan import Plan
from fitune.recipe import Recipe
from fitune.train import checkpoint
from fitune.train import session as sessions
from fitune.train.events import EventLog
from fitune.train.loggers import open_loggers
from fitune.train.measure import Meter
from fitune.train.recover import memory_failure, with_recovery
from fitune.train.report import write_report
from fitune.train.result import TrainResult, eval_losses, finished_result, write_result
from fitune.train.run_folder import RunFolder
from fitune.train.schedule import learning_rate
from fitune.train.signals import EXIT_CODES, Stopped, StopSignals

if TYPE_CHECKING:
    from fitune.data.batches import MicroBatch, StepStream
    from fitune.data.records import Record
    from fitune.engine.engine import Engine

CHECKPOINTS_PER_RUN = 10
EVALUATIONS_PER_RUN = 4
SAMPLE_TOKENS = 96
OnEvent = Callable[[dict[str, Any]], None]


@dataclass
class Run:
    """A run in progress; its parts are made in order by `run`."""

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

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the training records' tokens and labels."""
        digest = hashlib.sha256()
        for record in self.session.data.train:
            digest.update(len(record).to_bytes(8, "little") + record.input_ids.tobytes() + record.labels.tobytes())
        return digest.hexdigest()

    def emit(self, event: str, **fields: Any) -> None:
        """Store an event, show it, hand it to the loggers."""
        stored = self.log.write(event, **fields)
        self.on_event(stored)
        for logger in self.loggers:
            logger.log(stored)


def run(
    recipe: Recipe, *, resume: Path | None = None, on_event: OnEvent | None = None, lang: str = "en"
) -> TrainResult:
    """Train as the recipe says; with `resume`, go on with that run exactly where its last checkpoint is.

    Args:
        on_event: called with every event, and first with {"event": "plan", ...} (not stored: it is plan.json).
        lang: language of report.html, en or zh.

    Raises:
        UserError: bad input (2), nothing fits (3), failure during the work (1, the last checkpoint named).
    """
    show = on_event or (lambda event: None)
    if resume is None:
        active = _start(recipe, show)
    else:
        folder = RunFolder.open_existing(resume)
        finished = finished_result(folder)
        if finished is not None:
            show({"event": "notice", "text": f"{folder.path} is finished already: nothing is left to train"})
            return finished
        active = _reopen(recipe, folder, show)
    # Until here a Ctrl-C ends the program as always: a new run has left nothing, an old one is as it was.
    with active.stop, active.log, _loggers(active, is_new=resume is None):
        return _guarded(active, resumed=resume is not None, lang=lang)


def _start(recipe: Recipe, show: OnEvent) -> Run:
    sessions.check_machine(recipe)
    session = sessions.open_session(recipe)
    result = sessions.plan_session(session)
    plan = sessions.require_fit(result)
    out = Path(recipe.out) if recipe.out else None
    folder = RunFolder.create(out, recipe.model, _with_whole_paths(recipe).to_yaml(), plan.to_json())
    show({"event": "plan", "run_folder": str(folder.path), **result.as_dict()})
    return Run(recipe, plan, folder, EventLog(folder.events_path), session, show, _count_steps(recipe, session))


def _with_whole_paths(recipe: Recipe) -> Recipe:
    """For the run folder: local files by their whole paths, so that the run can be resumed from another folder."""
    changes = {}
    for name in ("model", "data", "eval_data"):
        value = getattr(recipe, name)
        path = Path(value or "").expanduser()
        if value and value != DEMO and path.exists():
            changes[name] = str(path.resolve())
    return recipe.with_(**changes)


def _reopen(recipe: Recipe, folder: RunFolder, show: OnEvent) -> Run:
    plan = plans.from_json(folder.current_plan_path.read_text(encoding="utf-8"))
    saved = checkpoint.load_latest(folder.checkpoints_path, with_tensors=False)
    date = saved.values.get("date") if saved is not None else None
    session = sessions.open_session(recipe, date=datetime.date.fromisoformat(date) if date else None)
    return Run(recipe, plan, folder, EventLog(folder.events_path), session, show, _count_steps(recipe, session))


def _count_steps(recipe: Recipe, session: sessions.Session) -> int:
    per_epoch = math.ceil(len(session.data.train) / recipe.batch)
    return recipe.steps or max(1, math.ceil((recipe.epochs or 1) * per_epoch))


@contextmanager
def _loggers(active: Run, is_new: bool) -> Iterator[None]:
    try:
        active.loggers = open_loggers(active.recipe.log_to, active.folder)
    except UserError:
        if is_new:  # nothing has happened yet: leave nothing behind
            _discard(active)
        raise
    try:
        yield
    finally:
        for logger in active.loggers:
            logger.close()


def _discard(active: Run) -> None:
    active.log.close()
    for path in (active.folder.recipe_path, active.folder.plan_path, active.folder.events_path):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # the folder was there before, with other things in it
        active.folder.path.rmdir()


def _guarded(active: Run, *, resumed: bool, lang: str) -> TrainResult:
    """Run, and whatever happens leave an `end` event and a report."""
    try:
        status, error = _train(active, resumed), None
    except Stopped as stopped:
        status, error = stopped.status, None
    except KeyboardInterrupt:
        status, error = "interrupted", None
    except UserError as problem:
        _end(active, "failed", problem.what)
        _write_report(active, lang)
        fix = _with_checkpoint(active, problem.fix)
        raise UserError(problem.what, problem.why, fix, problem.exit_code) from problem
    except Exception as problem:
        line = next(iter(str(problem).splitlines()), type(problem).__name__)
        _end(active, "failed", line)
        _write_report(active, lang)
        if memory_failure(problem):
            raise UserError(
                f"out of memory at step {active.step + 1}",
                line,
                _with_checkpoint(active, "use a smaller --micro-batch or --vram"),
                EXIT_FAILED,
            ) from problem
        raise
    _end(active, status, error)
    _write_report(active, lang)
    before, after = eval_losses(active.folder.events())
    code = EXIT_CODES.get(status, EXIT_DONE)
    return TrainResult(active.folder.path, status, code, active.step, active.loss, before, after)


def _with_checkpoint(active: Run, fix: str) -> str:
    found = checkpoint.steps(active.folder.checkpoints_path)
    if not found:
        return fix
    return f"{fix}; the last checkpoint is at step {found[-1]}: fitune train --resume {active.folder.argument}"


def _end(active: Run, status: str, error: str | None) -> None:
    extra = {"error": error} if error else {}
    try:
        active.emit("end", status=status, step=active.step, seconds=time.perf_counter() - active.started, **extra)
    except UserError as problem:  # the full disk that ended the run, perhaps: that error is the one to tell
        active.on_event({"event": "notice", "text": str(problem)})


def _write_report(active: Run, lang: str) -> None:
    try:
        write_report(active.folder, lang)
    except UserError as problem:  # the disk may be what ended the run; its events are safe
        active.on_event({"event": "notice", "text": str(problem)})


def _train(active: Run, resumed: bool) -> str:
    meter = Meter(active.plan.device)
    if not any(e.get("event") == "data" for e in active.folder.events()):
        _emit_data(active)
    built = sessions.load_model(active.session, active.plan, on_weight=lambda name: active.stop.check())
    loaded = meter.peaks()
    engine = sessions.make_engine(built, active.plan)
    if resumed:
        _restore(active, engine)
    _emit_start(active, engine, resumed)  # before the other events of a resumed run: loggers look for it
    active.emit("phase", phase="load", **loaded)
    stream = _stream(active)
    pending = _save_every(active), _eval_every(active)
    if active.step == 0:
        _before_first_step(active, engine, meter)
    first = True
    while active.step < active.num_steps:
        if active.stop.requested is not None:
            if active.saved_step != active.step:
                _save(active, engine, meter)
            return active.stop.requested
        _step(active, engine, stream, meter, first)
        first = False
        done = active.step == active.num_steps
        if active.step % pending[1] == 0 or done:
            _evaluate(active, engine, meter)
        if active.step % pending[0] == 0 or done:
            _save(active, engine, meter)
    _samples(active, engine, "after")
    write_result(active.folder, active.session, active.plan, engine)
    return "done"


def _emit_data(active: Run) -> None:
    data = active.session.data
    active.emit(
        "data",
        layout=data.layout.line(),
        template=data.template.line() if data.template else None,
        lengths=_lengths(data.report),
        truncated=data.report.truncated,
        dropped={reason: len(rows) for reason, rows in data.report.dropped.items()},
    )
    for note in data.notes:
        active.emit("notice", text=note)


def _before_first_step(active: Run, engine: Engine, meter: Meter) -> None:
    """Loss and samples of the model as it came, unless a session that was cut off has recorded them."""
    if not any(e.get("event") == "eval" for e in active.folder.events()):
        _evaluate(active, engine, meter)
    _samples(active, engine, "before")


def _lengths(report: Any) -> dict[str, Any]:
    return {
        "median": report.median_tokens,
        "p95": report.p95_tokens,
        "longest": report.longest_tokens,
        "longest_record": report.longest_row + 1,
        "records": report.num_records,
        "tokens": report.total_tokens,
        "loss_tokens": report.loss_tokens,
        "duplicates": report.duplicates,
    }


def _emit_start(active: Run, engine: Engine, resumed: bool) -> None:
    import torch
    import transformers

    from fitune import __version__

    built = engine.built
    trainable = sum(p.numel() for p in engine.masters.parameters())
    adapter = trainable if active.plan.method == "lora" else 0
    active.emit(
        "start",
        fitune_version=__version__,
        torch_version=torch.__version__,
        transformers_version=transformers.__version__,
        device_name=active.plan.device_name,
        trainable=trainable,
        total=built.num_parameters() + adapter,
        steps=active.num_steps,
        resumed_from=active.step if resumed else None,
    )
    for note in built.notes:
        active.emit("notice", text=note)


def _restore(active: Run, engine: Engine) -> None:
    saved = checkpoint.load_latest(active.folder.checkpoints_path)
    if saved is not None:
        if saved.values.get("data") not in (None, active.fingerprint):
            raise UserError(
                "cannot resume this run: its data is not what it was",
                "the tokens of the training records differ from those the run was started with",
                "put the data file (and the model's tokenizer) back as it was, or start a new run",
            )
        engine.load_state(saved.tensors, saved.values)
        active.step = active.saved_step = saved.step
    dropped = active.log.rewind(active.step)
    if dropped:
        active.on_event({"event": "notice", "text": f"{dropped} events after step {active.step} are replayed"})


def _stream(active: Run) -> StepStream:
    from fitune.data.batches import StepStream

    return StepStream(
        active.session.data.train, active.recipe.batch, active.recipe.seed, group_by_length=not active.plan.packing
    )


def _batches(active: Run, records: Sequence[Record]) -> list[MicroBatch]:
    from fitune.data.batches import step_batches

    tokenizer = active.session.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    return step_batches(
        records,
        micro_batch=active.plan.micro_batch,
        packing=active.plan.packing,
        seq_len=active.plan.seq_len,
        pad_id=pad,
    )


def _step(active: Run, engine: Engine, stream: StepStream, meter: Meter, first: bool) -> None:
    started = time.perf_counter()
    train = active.session.data.train
    _, positions = stream[active.step]
    lr = learning_rate(
        active.step,
        peak=active.plan.lr,
        schedule=active.plan.schedule,
        warmup=active.plan.warmup,
        num_steps=active.num_steps,
    )
    meter.reset()
    records = [train[i] for i in positions]
    result = with_recovery(active, engine, lambda: engine.step(_batches(active, records), step=active.step, lr=lr))
    seconds = time.perf_counter() - started
    active.step += 1
    active.loss = result.loss
    peaks = meter.peaks()
    scale = {} if result.loss_scale is None else {"loss_scale": result.loss_scale}
    active.emit(
        "step",
        step=active.step,
        loss=result.loss,
        tokens=result.num_tokens,
        targets=result.num_targets,
        lr=lr,
        grad_norm=result.grad_norm,
        step_s=seconds,
        tokens_per_s=result.num_tokens / seconds,
        peak_allocated_bytes=peaks["peak_allocated_bytes"],
        **scale,
    )
    if first or meter.is_higher("step", peaks):
        active.emit("phase", phase="first_step" if first else "step", **peaks)


def _evaluate(active: Run, engine: Engine, meter: Meter) -> None:
    """Mean loss over all held-out target tokens, and per language where the data names one."""
    records = active.session.data.eval
    if not records:
        return
    started = time.perf_counter()
    meter.reset()
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record.meta.get("language") or ""), []).append(record)
    sums = {}
    for language, members in groups.items():
        chunks = [members[i : i + active.plan.batch] for i in range(0, len(members), active.plan.batch)]
        sums[language] = with_recovery(active, engine, functools.partial(_losses, active, engine, chunks))
    total, count = (sum(column) for column in zip(*sums.values(), strict=True))
    by_language = {k: loss / max(n, 1) for k, (loss, n) in sums.items() if k}
    active.emit(
        "eval",
        step=active.step,
        eval_loss=total / max(count, 1),
        by_language=by_language,
        seconds=time.perf_counter() - started,
    )
    peaks = meter.peaks()
    if meter.is_higher("eval", peaks):
        active.emit("phase", phase="eval", **peaks)


def _losses(active: Run, engine: Engine, chunks: Sequence[Sequence[Record]]) -> tuple[float, int]:
    return engine.evaluate([batch for chunk in chunks for batch in _batches(active, chunk)])


def _samples(active: Run, engine: Engine, when: str) -> None:
    """One held-out prompt per language, answered greedily."""
    from fitune.train.sampling import answer

    shown = {
        str(e.get("language") or "")
        for e in active.folder.events()
        if e.get("event") == "sample" and e.get("when") == when
    }
    for record in active.session.data.eval:
        language = str(record.meta.get("language") or "")
        labelled = [i for i, label in enumerate(record.labels) if label != -100]
        if language in shown or not labelled or labelled[0] == 0 or active.stop.requested is not None:
            continue
        shown.add(language)
        ids = [int(i) for i in record.input_ids[: labelled[0]]]
        prompt = record.meta.get("prompt") or active.session.tokenizer.decode(ids, skip_special_tokens=True)
        text = answer(engine.built, active.session.tokenizer, ids, max_tokens=SAMPLE_TOKENS)
        active.emit("sample", when=when, language=language or None, prompt=prompt, answer=text)


def _save_every(active: Run) -> int:
    return active.recipe.save_every or max(1, active.num_steps // CHECKPOINTS_PER_RUN)


def _eval_every(active: Run) -> int:
    return active.recipe.eval_every or max(1, active.num_steps // EVALUATIONS_PER_RUN)


def _save(active: Run, engine: Engine, meter: Meter) -> None:
    started = time.perf_counter()
    meter.reset()
    tensors, values = engine.state()
    template = active.session.data.template
    date = template.date.isoformat() if template is not None and template.date is not None else None
    values |= {"data": active.fingerprint, "date": date}
    path, size = checkpoint.save(
        active.folder.checkpoints_path, active.step, tensors, values, active.recipe.keep_checkpoints
    )
    active.saved_step = active.step
    active.emit(
        "checkpoint",
        step=active.step,
        path=str(path.relative_to(active.folder.path)),
        seconds=time.perf_counter() - started,
        bytes=size,
    )
    peaks = meter.peaks()
    if meter.is_higher("save", peaks):
        active.emit("phase", phase="save", **peaks)
