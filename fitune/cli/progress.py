"""What a person sees while a run goes on: a progress bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fitune.cli import render
from fitune.cli.output import is_closed_output
from fitune.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PLAIN_EVERY_S = 5.0
ETA_STEPS = 20  # the last steps whose mean time gives the time left


class Display:
    """Prints a run's events. Use as a context manager and pass `on_event` to `fitune.train.run`.

    A reader that goes away (`fitune train | head`, a closed terminal) silences the display; the run goes on.
    """

    def __init__(self, console: Console, plain_every_s: float = PLAIN_EVERY_S):
        self.console = console
        self.plain_every_s = plain_every_s
        self.total_steps: int | None = None
        self._step_times: list[float] = []
        self._last_line = float("-inf")
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._silent = False

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop_bar()

    def on_event(self, event: dict[str, Any]) -> None:
        """Shows one event; kinds it does not know are left to the run folder."""
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is None or self._silent:
            return
        try:
            handler(event)
        except OSError as error:
            if not is_closed_output(error):
                raise
            self._silent = True

    def _on_plan(self, event: dict[str, Any]) -> None:
        render.show_plan(self.console, event)
        if event.get("run_folder"):
            self._say(f"run folder: {event['run_folder']}")

    def _on_start(self, event: dict[str, Any]) -> None:
        self.total_steps = event.get("steps")
        trainable, total = event.get("trainable"), event.get("total")
        if trainable and total:
            counts = f"{format_count(trainable)} of {format_count(total)}"
            self._say(f"training {counts} parameters ({trainable / total:.2%})")
        begin = event.get("resumed_from")
        place = event.get("device_name")
        self._say(
            (f"continuing after step {begin}" if begin is not None else f"{self.total_steps} steps")
            + (f" on {place}" if place else "")
        )

    def _on_data(self, event: dict[str, Any]) -> None:
        self._say("\n".join(data_lines(event)))

    def _on_phase(self, event: dict[str, Any]) -> None:
        if event.get("phase") != "load":  # the others' peaks stand in the report, beside what was predicted
            return
        peak, host = render.peak_bytes(event), event.get("host_bytes")
        parts = [format_bytes(peak) if peak else "", f"host RAM {format_bytes(host)}" if host else ""]
        shown = ", ".join(part for part in parts if part)
        self._say(f"model loaded: {shown}" if shown else "model loaded")

    def _on_step(self, event: dict[str, Any]) -> None:
        if event.get("step_s") is not None:
            self._step_times = [*self._step_times[1 - ETA_STEPS :], float(event["step_s"])]
        if self.console.is_terminal:
            self._advance(event)
            return
        now = time.monotonic()
        is_last = event.get("step") == self.total_steps
        if is_last or now - self._last_line >= self.plain_every_s:
            self._last_line = now
            self._say(self.step_line(event))

    def step_line(self, event: dict[str, Any]) -> str:
        """`step 12/40  loss 1.234  812 tokens/s  312 MiB  1 min 20 s left`."""
        total = f"/{self.total_steps}" if self.total_steps else ""
        return "  ".join([f"step {event.get('step')}{total}", *step_parts(event), *self._left(event.get("step"))])

    def _left(self, step: Any) -> list[str]:
        if not self.total_steps or not self._step_times or not isinstance(step, int):
            return []
        mean_s = sum(self._step_times) / len(self._step_times)
        left_s = max(self.total_steps - step, 0) * mean_s
        return [f"{format_duration(left_s)} left"] if left_s else []

    def _on_eval(self, event: dict[str, Any]) -> None:
        parts = [f"{language} {_number(loss)}" for language, loss in (event.get("by_language") or {}).items()]
        by_language = f" ({', '.join(parts)})" if parts else ""
        loss = event.get("eval_loss")
        self._say(f"evaluation at step {event.get('step')}: loss {_number(loss)}{by_language}")

    def _on_sample(self, event: dict[str, Any]) -> None:
        self._say(f"\n[{event.get('when')}] {event.get('prompt')}\n  {str(event.get('answer')).strip()}\n")

    def _on_checkpoint(self, event: dict[str, Any]) -> None:
        if not self.console.is_terminal:
            return
        self._say(f"checkpoint at step {event.get('step')}")

    def _on_notice(self, event: dict[str, Any]) -> None:
        self._say(f"note: {event.get('text')}")

    def _on_end(self, event: dict[str, Any]) -> None:
        self._stop_bar()
        seconds = event.get("seconds")
        self._say(f"{event.get('status')}" + (f" after {format_duration(seconds)}" if seconds is not None else ""))

    def _advance(self, event: dict[str, Any]) -> None:
        """Moves the bar; it is made at the first step, so that nothing spins while the model loads."""
        if self._progress is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"),
                console=self.console, transient=False,
            )  # fmt: skip
            self._progress.start()
            self._task = self._progress.add_task("", total=self.total_steps)
        assert self._task is not None
        description = "  ".join([*step_parts(event), *self._left(event.get("step"))])
        self._progress.update(self._task, completed=event.get("step"), description=description)

    def _stop_bar(self) -> None:
        if self._progress is None:
            return
        progress, self._progress = self._progress, None
        try:
            progress.stop()
        except OSError as error:
            if not is_closed_output(error):
                raise
            self._silent = True

    def _say(self, text: str) -> None:
        if text:
            self.console.print(text, markup=False, soft_wrap=True)
            self.console.file.flush()


def step_parts(event: dict[str, Any]) -> list[str]:
    """Loss, tokens/s and memory of a step, those that are known."""
    parts = [f"loss {_number(event.get('loss'))}"]
    if event.get("tokens_per_s") is not None:
        parts.append(f"{event['tokens_per_s']:,.0f} tokens/s")
    if event.get("peak_allocated_bytes"):
        parts.append(format_bytes(event["peak_allocated_bytes"]))
    return parts


def data_lines(event: dict[str, Any]) -> list[str]:
    """How the data was read: its layout, the chat template, the lengths, what was left out or cut."""
    lines = [f"data: {event.get('layout')}"]
    if event.get("template"):
        lines.append(str(event["template"]))
    lengths = event.get("lengths") or {}
    parts = [f"{lengths[key]:,} {key}" for key in ("records", "tokens") if isinstance(lengths.get(key), int)]
    names = {"median": "median", "p95": "95 % within", "longest": "longest"}
    parts += [f"{name} {lengths[key]:,}" for key, name in names.items() if isinstance(lengths.get(key), int)]
    if isinstance(lengths.get("longest_record"), int):
        parts.append(f"in row {lengths['longest_record']:,}")
    if parts:
        lines.append("lengths: " + ", ".join(parts))
    for reason, count in (event.get("dropped") or {}).items():
        lines.append(f"left out: {count:,} ({reason})")
    if event.get("truncated"):
        lines.append(f"cut at the sequence length: {event['truncated']:,}")
    return lines


def _number(value: Any) -> str:
    return "not a number" if value is None else f"{value:.4f}"
