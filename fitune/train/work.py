"""The training itself: load, step, evaluate, save, and the way back when something gives out. See `train`."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fitune.errors import EXIT_FAILED, NotFinite, UserError
from fitune.parallel.world import SAME_STATE
from fitune.train import checkpoint, evaluation, nonfinite, watch
from fitune.train import session as sessions
from fitune.train.measure import Meter
from fitune.train.oom import PEER
from fitune.train.recover import (
    AGREED,
    Marks,
    Restart,
    about_memory,
    before_update,
    free,
    generators,
    give_back,
    replan,
    seed,
    set_generators,
    with_recovery,
)
from fitune.train.rehearsal import rehearse
from fitune.train.result import write_result
from fitune.train.saver import Saved
from fitune.train.schedule import learning_rate
from fitune.train.signals import StepGivenUp

if TYPE_CHECKING:
    import torch

    from fitune.data.records import Record
    from fitune.engine.engine import Engine
    from fitune.engine.link import LinkStats
    from fitune.train.loop import Run

CHECKPOINTS_PER_RUN = 10
LONG_RECORD = 4  # times the length within which 95 % of the records are


def train(active: Run, resumed: bool) -> str:
    """The run from its first step, or from its last checkpoint, to its result; how it ended.

    Raises:
        Restart: only a new process can go on (`fatal`).
        UserError: it failed.
    """
    while True:
        try:
            return _attempt(active, resumed)
        except Restart as wanted:
            if wanted.fatal:
                raise
        # outside the handler: the exception's frames held the model
        give_back(sessions.plan_device(active.session.recipe, active.plan))
        resumed = True


def _attempt(active: Run, resumed: bool) -> str:
    meter = Meter(active.plan.device)
    if not active.events_of("data"):
        _emit_data(active)
        if active.group.size == 1:
            active.emit("techniques", used=sessions.techniques_of(active.session, active.plan))
    engine, loaded = _load(active, meter)
    seed(active.plan.seed)  # ours come from counters; a model's own dropout, say, takes torch's
    if resumed:
        _restore(active, engine)
    _emit_start(active, engine, resumed)  # before the other events of a resumed run: loggers look for it
    active.emit("phase", phase="load", **loaded)
    if active.step == 0:
        _before_first_step(active, engine, meter)
    elif evaluation.is_due(active):  # the session before this one was cut off in between
        _evaluate(active, engine, meter)
    try:
        return _steps(active, engine, meter)
    except Restart as wanted:
        if wanted.is_whole and active.step > 0 and active.saved_step != active.step:
            save(active, engine, meter, at_once=True)
        raise


def _load(active: Run, meter: Meter) -> tuple[Engine, dict[str, Any]]:
    """The filled engine, and the peaks of loading it."""
    try:
        built = sessions.load_model(active.session, active.own_plan, on_weight=lambda name: _weight_read(active),
                                    group=active.group)  # fmt: skip
        loaded = meter.peaks()
        engine = sessions.make_engine(built, active.own_plan, active.group)
        active.has_loaded = True
        return engine, loaded
    except (RuntimeError, MemoryError, OSError) as problem:
        failure = about_memory(active, problem)
        if failure is None:
            raise
    if failure.where == PEER:
        raise Restart(failure, is_whole=False, fatal=True)
    if active.group.size > 1:  # the others wait for this rank somewhere in loading, and cannot be told
        failure = dataclasses.replace(failure, fatal=True, untold=True, rank=active.group.rank)
    replan(active, failure, "load")
    raise Restart(failure, is_whole=False, fatal=failure.fatal)


def _weight_read(active: Run) -> None:
    active.pulse()
    active.stop.check()


def _steps(active: Run, engine: Engine, meter: Meter) -> str:
    looking = watch.Watch()
    first = True
    while active.step < active.num_steps:
        active.stop.sync()
        if active.stop.requested is not None:
            return _stop(active, engine, meter)
        if not _step(active, engine, meter, first, looking):
            continue
        saves = first and rehearse(active, engine, meter, active.step_s or 0.0)
        first = False
        report_saved(active, active.saver.poll())
        done = active.step == active.num_steps
        if done:
            _keep_result(active, engine, meter)
        elif active.step % _save_every(active) == 0 or saves:
            save(active, engine, meter)
        if evaluation.is_due(active):
            _evaluate(active, engine, meter)
    active.stop.sync()
    if active.stop.requested is not None and evaluation.is_due(active):
        return _stop(active, engine, meter)
    evaluation.samples(active, engine, "after")
    report_saved(active, active.saver.wait())
    if not active.group.share(active.folder.adapter_path.is_dir() or active.folder.model_path.is_dir()):
        _write_result(active, engine)  # resumed after its last step
    return "done"


def _keep_result(active: Run, engine: Engine, meter: Meter) -> None:
    """Checkpoint and result after the last step, before anything else can take them: where there is room for one of
    them only, that one is written."""
    problem = None
    try:
        save(active, engine, meter)
    except UserError as error:
        problem = error
    try:
        _write_result(active, engine)
    finally:
        report_saved(active, active.saver.wait())
    if problem is not None:
        raise problem


def _write_result(active: Run, engine: Engine) -> None:
    """The first rank writes; where the state is sharded the others take part in gathering it."""
    if active.plan.adapter is None:
        active.pulse.expect_write(4 * engine.built.num_parameters())
    if active.group.is_leader:
        write_result(active.folder, active.session, active.plan, engine)
    elif active.plan.parallel not in SAME_STATE:
        engine.trained_tensors()


def _stop(active: Run, engine: Engine, meter: Meter) -> str:
    if active.saved_step != active.step:
        save(active, engine, meter, at_once=True)
    report_saved(active, active.saver.wait())
    assert active.stop.requested is not None
    return active.stop.requested


# ---- before the first step -------------------------------------------------------------------------------------------


def _emit_data(active: Run) -> None:
    data = active.session.data
    report = data.report
    active.emit(
        "data",
        layout=data.layout.line(),
        template=data.template.line() if data.template else None,
        lengths=_lengths(report),
        truncated=report.truncated,
        dropped={reason: len(rows) for reason, rows in report.dropped.items()},
    )
    for note in data.notes:
        active.emit("notice", text=note)
    if report.longest_tokens > LONG_RECORD * report.p95_tokens:
        text = (f"row {report.longest_row + 1} has {report.longest_tokens:,} tokens, 95 % of the records at most "
                f"{report.p95_tokens:,}: it alone decides how much memory the longest step needs")  # fmt: skip
        active.emit("notice", text=text)


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


def _before_first_step(active: Run, engine: Engine, meter: Meter) -> None:
    """Loss and samples of the model as it came, unless a session that was cut off has recorded them."""
    if not active.events_of("eval"):
        evaluation.evaluate(active, engine, meter)
    evaluation.samples(active, engine, "before")


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
    """The state of the last whole checkpoint; without one the run begins at step 0 again."""
    active.saver.wait()
    active.group.barrier()
    saved = checkpoint.load_latest(active.folder.checkpoints_path, group=active.group)
    active.step, active.saved_step = 0, None
    if saved is not None:
        if saved.values.get("data") not in (None, active.session.fingerprint):
            raise UserError(
                "cannot resume this run: its data is not what it was",
                "the tokens of the training records differ from those the run was started with",
                "put the data file (and the model's tokenizer) back as it was, or start a new run",
            )
        engine.load_state(saved.tensors, saved.values)
        rng = {n.removeprefix("rng|"): saved.tensors[n] for n in saved.tensors if n.startswith("rng|")}
        set_generators(engine.built.device, rng)
        active.step = active.saved_step = saved.step
    dropped = active.log.rewind(active.step)
    active.load_history()
    for note in saved.notes if saved is not None else ():
        active.emit("notice", text=note)
    if dropped:
        active.on_event({"event": "notice", "text": f"{dropped} events after step {active.step} are replayed"})


# ---- a step ----------------------------------------------------------------------------------------------------------


def _step(active: Run, engine: Engine, meter: Meter, first: bool, looking: watch.Watch) -> bool:
    """One optimizer step; False when it was given up because the process is being ended."""
    started, clock = time.perf_counter(), time.monotonic()
    records = active.step_records()
    lr = learning_rate(active.step, peak=active.plan.lr, schedule=active.plan.schedule, warmup=active.plan.warmup,
                       num_steps=active.num_steps)  # fmt: skip

    def observe(part: str, index: int) -> None:
        active.pulse()
        before_update(active, part)
        if part not in AGREED:
            active.stop.check_step(clock, active.step_s)

    def work() -> Any:
        return engine.step(active.batches(active.share(records)), step=active.step, lr=lr, observe=observe)

    meter.reset()
    marks = Marks(engine)
    try:
        result = with_recovery(active, engine, work)
    except StepGivenUp:
        engine.abandon()
        marks.restore(engine)
        return False
    except NotFinite as problem:
        free(engine)
        marks.restore(engine)
        _not_finite(active, engine, records, problem, lr, time.perf_counter() - started)
        return True
    active.skipped = 0
    active.step_s = seconds = active.group.share(time.perf_counter() - started)
    active.step += 1
    active.loss = result.loss
    peaks = meter.peaks()
    known = {} if result.loss_scale is None else {"loss_scale": result.loss_scale}
    if result.link is not None:
        known |= _link(result.link, seconds)
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
        **known,
    )
    if first or meter.is_higher("step", peaks):
        active.emit("phase", phase="first_step" if first else "step", **peaks)
    _look(active, engine, records, peaks, looking)
    return True


def _link(link: LinkStats, step_s: float) -> dict[str, Any]:
    """What a step streamed: bytes of weights to the device, how fast they came, the share of its time spent waiting."""
    return {"link_bytes": link.bytes_moved, "link_bytes_per_s": link.link_bytes_per_s,
            "link_wait_share": link.wait_share(step_s)}  # fmt: skip


def _look(active: Run, engine: Engine, records: Sequence[Record], peaks: dict[str, Any], looking: watch.Watch) -> None:
    longest = max(records, key=len)
    device: torch.device = engine.built.device
    sample = watch.measure(device, active.step, len(longest), longest.source_row + 1, peaks)
    for text in looking.look(sample, functools.partial(watch.processes, device)):
        active.emit("notice", text=text)


def _not_finite(
    active: Run, engine: Engine, records: Sequence[Record], problem: NotFinite, lr: float, seconds: float
) -> None:
    """Stop with the records named, or leave this step out (`on_nan: skip`): nothing of it is applied.

    Raises:
        UserError: `on_nan` is stop, or too many steps in a row were left out.
    """
    where, rows = nonfinite.describe(active, engine, records)
    active.skipped += 1
    if active.recipe.on_nan == "stop" or active.skipped > nonfinite.MOST_SKIPPED:
        leave_out = "" if active.recipe.on_nan == "skip" else "; or leave such steps out: --on-nan skip"
        fix = problem.fix + leave_out
        raise UserError(problem.what, f"{problem.why}; {where}", fix, EXIT_FAILED) from problem
    active.step += 1
    tokens = sum(len(r) for r in records)
    active.emit("step", step=active.step, loss=None, tokens=tokens, targets=0, lr=lr, grad_norm=None, step_s=seconds,
                skipped_rows=rows)  # fmt: skip
    active.emit("notice", text=f"step {active.step} is left out: {problem.what}; {where}")


# ---- evaluation and checkpoints --------------------------------------------------------------------------------------


def _evaluate(active: Run, engine: Engine, meter: Meter) -> None:
    """The held-out loss; the step with the lowest one has a checkpoint that is kept."""
    evaluation.evaluate(active, engine, meter)
    if not evaluation.is_due(active) and evaluation.is_best(active):
        if active.saved_step != active.step:
            save(active, engine, meter)
        evaluation.mark_best(active)


def _save_every(active: Run) -> int:
    return active.recipe.save_every or max(1, active.num_steps // CHECKPOINTS_PER_RUN)


def save(active: Run, engine: Engine, meter: Meter, *, at_once: bool = False) -> None:
    """A checkpoint of the state after the last step: written behind the training's back, or at once.

    Raises:
        UserError: it (or the one before) cannot be written.
    """
    meter.reset()
    finished = active.saver.save(active.step, functools.partial(_state, active, engine), at_once=at_once)
    active.saved_step = active.step
    report_saved(active, finished)
    peaks = meter.peaks()
    if meter.is_higher("save", peaks):
        active.emit("phase", phase="save", **peaks)


def _state(active: Run, engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    if not active.group.is_leader and active.plan.parallel in SAME_STATE:
        return {}, {}  # not a copy of all of it in host RAM that nobody needs
    tensors, values = engine.state()
    if active.group.is_leader:
        tensors |= {f"rng|{name}": state for name, state in generators(engine.built.device).items()}
    active.pulse.expect_write(checkpoint.num_bytes(tensors))
    template = active.session.data.template
    date = template.date.isoformat() if template is not None and template.date is not None else None
    return tensors, values | {"data": active.session.fingerprint, "date": date}


def report_saved(active: Run, finished: Sequence[Saved]) -> None:
    """An event for every checkpoint that is on the disk now."""
    for saved in finished:
        path = str(saved.path.relative_to(active.folder.path))
        active.emit("checkpoint", step=saved.step, path=path, seconds=saved.seconds, bytes=saved.num_bytes,
                    blocked_s=saved.blocked_s)  # fmt: skip
