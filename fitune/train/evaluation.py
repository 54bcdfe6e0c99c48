"""Held-out loss and sample answers of a run. Neither changes the training."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fitune.train import checkpoint
from fitune.train.oom import classify
from fitune.train.recover import give_back, with_recovery

if TYPE_CHECKING:
    from fitune.data.records import Record
    from fitune.engine.engine import Engine
    from fitune.train.loop import Run
    from fitune.train.measure import Meter

EVALUATIONS_PER_RUN = 4
SAMPLE_TOKENS = 96


class _Cut(Exception):
    """A stop was asked for in the middle of an evaluation: it is made by the resumed run."""


def eval_every(active: Run) -> int:
    """Steps between evaluations."""
    return active.recipe.eval_every or max(1, active.num_steps // EVALUATIONS_PER_RUN)


def is_due(active: Run) -> bool:
    """Whether the held-out loss after this step is wanted and not recorded yet."""
    wanted = active.step % eval_every(active) == 0 or active.step == active.num_steps
    return wanted and bool(active.session.data.eval) and not active.has_event("eval", step=active.step)


def evaluate(active: Run, engine: Engine, meter: Meter) -> None:
    """Mean loss over all held-out target tokens, and per language where the data names one; the best step is marked."""
    records = active.session.data.eval
    if not records:
        return
    started = time.perf_counter()
    meter.reset()
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record.meta.get("language") or ""), []).append(record)
    sums = {}
    try:
        for language, members in groups.items():
            work = functools.partial(losses, active, engine, chunks(active, members))
            sums[language] = with_recovery(active, engine, work, phase="eval")
    except _Cut:
        return
    everyone = {language: active.group.sums(list(pair)) for language, pair in sums.items()}
    total, count = (sum(column) for column in zip(*everyone.values(), strict=True))
    by_language = {k: loss / max(n, 1) for k, (loss, n) in everyone.items() if k}
    eval_loss = total / max(count, 1)
    seconds = time.perf_counter() - started
    active.emit("eval", step=active.step, eval_loss=eval_loss, by_language=by_language, seconds=seconds)
    peaks = meter.peaks()
    if meter.is_higher("eval", peaks):
        active.emit("phase", phase="eval", **peaks)


def is_best(active: Run) -> bool:
    """Whether the newest held-out loss is the lowest after any step of this run."""
    known = [(e["eval_loss"], e["step"]) for e in active.events_of("eval") if e.get("eval_loss") is not None]
    after = [pair for pair in known if pair[1] > 0]
    return bool(after) and min(after)[1] == active.step == after[-1][1]


def mark_best(active: Run) -> None:
    """Remember the checkpoint of this step as the best one."""
    loss = next(e["eval_loss"] for e in reversed(active.events_of("eval")) if e["step"] == active.step)
    if not active.group.is_leader:
        return
    folder = active.folder.checkpoints_path
    checkpoint.mark_best(folder, active.step, loss)
    if active.step in checkpoint.steps(folder):  # else it is being written, and the one before is the best for now
        checkpoint.prune(folder, active.recipe.keep_checkpoints, active.step)


def chunks(active: Run, records: Sequence[Record]) -> list[Sequence[Record]]:
    """Held-out records as many at a time as make a step."""
    size = active.plan.batch
    return [records[i : i + size] for i in range(0, len(records), size)]


def losses(active: Run, engine: Engine, parts: Sequence[Sequence[Record]]) -> tuple[float, int]:
    """(sum of losses, number of target tokens). Raises `_Cut` when a stop was asked for."""
    total, count = 0.0, 0
    failed: Exception | None = None
    for part in parts:
        active.pulse()
        active.stop.sync()
        if active.stop.requested is not None:
            raise _Cut
        batches = active.batches(active.share(part))
        loss, num = 0.0, 0
        try:
            if failed is None:
                loss, num = engine.evaluate(batches)
            else:
                engine.pass_by(batches)
        except (RuntimeError, MemoryError, OSError) as problem:
            found = classify(problem)
            if active.group.size == 1 or found is None or found.fatal:
                raise
            failed = problem.with_traceback(None)  # the other ranks go on: told at the end
            try:
                engine.ranks.drain()
            except RuntimeError:  # no way to go on beside them
                raise failed from None
        total, count = total + loss, count + num
    if failed is not None:
        raise failed
    return total, count


def _is_stopped(active: Run) -> bool:
    active.pulse()
    return active.stop.requested is not None


def samples(active: Run, engine: Engine, when: str) -> None:
    """One held-out prompt per language, answered greedily. What does not fit in memory is left out and said."""
    from fitune.train.sampling import answer

    if active.plan.parallel in ("fsdp2", "zero3", "tp", "pp"):
        active.emit("notice", text=f"no sample answers {when} training: no GPU holds all of the weights")
        return
    if not active.group.is_leader:
        return
    shown = {str(e.get("language") or "") for e in active.events_of("sample") if e.get("when") == when}
    for record in active.session.data.eval:
        language = str(record.meta.get("language") or "")
        labelled = [i for i, label in enumerate(record.labels) if label != -100]
        if language in shown or not labelled or labelled[0] == 0 or active.stop.requested is not None:
            continue
        shown.add(language)
        ids = [int(i) for i in record.input_ids[: labelled[0]]]
        prompt = record.meta.get("prompt") or active.session.tokenizer.decode(ids, skip_special_tokens=True)
        try:
            text = answer(engine.built, active.session.tokenizer, ids, max_tokens=SAMPLE_TOKENS,
                          stop=functools.partial(_is_stopped, active))  # fmt: skip
        except (RuntimeError, MemoryError) as problem:
            if classify(problem) is None:
                raise
            text = None
        if active.stop.requested is not None:
            return  # cut short: no answer
        if text is None:
            give_back(engine.built.device)
            active.emit("notice", text=f"no sample answer {when} training: there is not enough memory for it")
            return
        active.emit("sample", when=when, language=language or None, prompt=prompt, answer=text)
