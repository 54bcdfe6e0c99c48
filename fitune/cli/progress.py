"""What a person sees while a run goes on: a progress bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shlex
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fitune.cli import render
from fitune.cli.output import is_closed_output, system_language
from fitune.cli.words import Words
from fitune.cli.words_progress import PROGRESS
from fitune.planner.sentences import duration, translated
from fitune.units import format_bytes, format_count, format_duration, format_rate, format_share

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PLAIN_EVERY_S = 5.0
ETA_STEPS = 20  # the last steps whose mean time gives the time left
WIDE, BAR_WIDTH, NARROW_BAR_WIDTH = 110, 24, 8  # columns of a terminal and of the bar on it


class Display:
    """Prints a run's events. Use as a context manager and pass `on_event` to `fitune.train.run`.

    A reader that goes away (`fitune train | head`, a closed terminal) silences the display; the run goes on.
    It speaks the language that the run's folder is announced with.
    """

    def __init__(self, console: Console, plain_every_s: float = PLAIN_EVERY_S, lang: str = "en"):
        self.console = console
        self.words = Words(lang, PROGRESS)
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

    def _on_folder(self, event: dict[str, Any]) -> None:
        self.words = Words(event.get("lang") or system_language(), PROGRESS)

    def _on_plan(self, event: dict[str, Any]) -> None:
        render.show_plan(self.console, event, self.words.lang)
        if event.get("run_folder"):
            self._say(self.words("run_folder", path=event["run_folder"]))

    def _on_start(self, event: dict[str, Any]) -> None:
        words = self.words
        self.total_steps = event.get("steps")
        trainable, total = event.get("trainable"), event.get("total")
        if trainable and total:
            share = f"{trainable / total:.2%}"
            self._say(words("trained", n=format_count(trainable), all=format_count(total), share=share))
        begin, place = event.get("resumed_from"), event.get("device_name")
        what = words("continuing", n=begin) if begin is not None else words("num_steps", n=self.total_steps)
        self._say(words("on", what=what, place=place) if place else what)

    def _on_data(self, event: dict[str, Any]) -> None:
        self._say("\n".join(data_lines(event, self.words)))

    def _on_phase(self, event: dict[str, Any]) -> None:
        if event.get("phase") != "load":  # the others' peaks stand in the report, beside what was predicted
            return
        peak, host = render.peak_bytes(event), event.get("host_bytes")
        parts = [format_bytes(peak) if peak else "", self.words("host", size=format_bytes(host)) if host else ""]
        shown = ", ".join(part for part in parts if part)
        self._say(self.words("loaded_with", memory=shown) if shown else self.words("loaded"))

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
        parts = [*step_parts(event, self.words), *self._left(event.get("step")), *link_parts(event, self.words)]
        return "  ".join([f"{self.words('step')} {event.get('step')}{total}", *parts])

    def _left(self, step: Any) -> list[str]:
        if not self.total_steps or not self._step_times or not isinstance(step, int):
            return []
        mean_s = sum(self._step_times) / len(self._step_times)
        left_s = max(self.total_steps - step, 0) * mean_s
        return [self.words("left", time=self._duration(left_s))] if left_s else []

    def _duration(self, seconds: float) -> str:
        return duration(format_duration(seconds), self.words.lang)

    def _on_eval(self, event: dict[str, Any]) -> None:
        words = self.words
        parts = [f"{language} {_number(loss, words)}" for language, loss in (event.get("by_language") or {}).items()]
        by_language = words("of_languages", parts=", ".join(parts)) if parts else ""
        loss = _number(event.get("eval_loss"), words)
        self._say(words("evaluation", n=event.get("step"), value=loss) + by_language)

    def _on_sample(self, event: dict[str, Any]) -> None:
        when = self.words(str(event.get("when")))
        self._say(f"\n[{when}] {event.get('prompt')}\n  {str(event.get('answer')).strip()}\n")

    def _on_checkpoint(self, event: dict[str, Any]) -> None:
        if not self.console.is_terminal:
            return
        self._say(self.words("checkpoint", n=event.get("step")))

    def _on_notice(self, event: dict[str, Any]) -> None:
        self._say(self.words("note", text=translated(str(event.get("text")), self.words.lang)))

    def _on_end(self, event: dict[str, Any]) -> None:
        self._stop_bar()
        seconds, status = event.get("seconds"), self.words(str(event.get("status")))
        self._say(self.words("ended", status=status, time=self._duration(seconds)) if seconds is not None else status)

    def _advance(self, event: dict[str, Any]) -> None:
        """Moves the bar; it is made at the first step, so that nothing spins while the model loads."""
        if self._progress is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn(self.words("step")), MofNCompleteColumn(), BarColumn(bar_width=self._bar_width()),
                TextColumn("{task.description}"), console=self.console, transient=False,
            )  # fmt: skip
            self._progress.start()
            self._task = self._progress.add_task("", total=self.total_steps)
        assert self._task is not None
        self._progress.update(self._task, completed=event.get("step"), description=self._beside_bar(event))

    def _bar_width(self) -> int:
        return BAR_WIDTH if self.console.width >= WIDE else NARROW_BAR_WIDTH

    def _beside_bar(self, event: dict[str, Any]) -> str:
        """What is said of a step beside the bar, in a second line what was streamed where one is too short; what a
        narrow terminal has no room for is left out (rich would cut off the number of the step)."""
        from rich.cells import cell_len

        counts = f"{self.words('step')} {self.total_steps}/{self.total_steps} "
        room = self.console.width - cell_len(counts) - self._bar_width() - 2
        first, link = [*step_parts(event, self.words), *self._left(event.get("step"))], link_parts(event, self.words)
        if cell_len("  ".join(first + link)) <= room:
            return "  ".join(first + link)
        while len(first) > 1 and cell_len("  ".join(first)) > room:
            first.pop(-2 if len(first) > 2 else -1)  # memory, then the speed, then the time left
        return "\n".join(["  ".join(first), *(text for text in link if cell_len(text) <= room)])

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


def step_parts(event: dict[str, Any], words: Words) -> list[str]:
    """Loss, tokens/s and memory of a step, those that are known."""
    parts = [words("loss", value=_number(event.get("loss"), words))]
    if event.get("tokens_per_s") is not None:
        parts.append(words("tokens_per_s", n=f"{event['tokens_per_s']:,.0f}"))
    if event.get("peak_allocated_bytes"):
        parts.append(format_bytes(event["peak_allocated_bytes"]))
    return parts


def link_parts(event: dict[str, Any], words: Words) -> list[str]:
    """What a step streamed: bytes of weights, the speed that their copies reached, the share of its time spent waiting;
    nothing where all weights are on the device."""
    size, rate = event.get("link_bytes"), event.get("link_bytes_per_s")
    if size is None or event.get("link_wait_share") is None:
        return []
    share = format_share(event["link_wait_share"])
    if not size or rate is None:  # all that the step needs was there from the one before
        return [words("not_moved", share=share)]
    return [words("link", size=format_bytes(size), rate=format_rate(rate), share=share)]


def data_lines(event: dict[str, Any], words: Words) -> list[str]:
    """How the data was read: its layout, the chat template, the lengths, what was left out or cut."""
    lines = [words("data", layout=event.get("layout"))]
    if event.get("template"):
        lines.append(str(event["template"]))
    lengths = event.get("lengths") or {}
    keys = ("records", "tokens", "median", "p95", "longest", "longest_record")
    parts = [words(key, n=f"{lengths[key]:,}") for key in keys if isinstance(lengths.get(key), int)]
    if parts:
        lines.append(words("lengths", parts=", ".join(parts)))
    for reason, count in (event.get("dropped") or {}).items():
        lines.append(words("left_out", n=f"{count:,}", reason=reason))
    if event.get("truncated"):
        lines.append(words("cut", n=f"{event['truncated']:,}"))
    return lines


def last_lines(result: dict[str, Any], words: Words) -> list[str]:
    """What was streamed, where the result is and what to do next."""
    run = shlex.quote(result["run"])
    lines = [line] if (line := streamed_line(result, words.lang)) else []
    if result["status"] != "done":
        return [*lines, words("continue", command=f"fitune train --resume {run}")]
    commands = f"fitune chat {run}    fitune export {run}"
    return [*lines, words("report", path=shlex.quote(f"{result['run']}/report.html")), words("next", commands=commands)]


def streamed_line(run: dict[str, Any], lang: str) -> str | None:
    """A whole run's weights over the link (`link_*` of a `TrainResult` or a `RunInfo`); None where none moved."""
    size, rate, share = (run.get(f"link_{key}") for key in ("bytes", "bytes_per_s", "wait_share"))
    if not size or rate is None or share is None:
        return None
    shown = dict(size=format_bytes(size), rate=format_rate(rate), share=format_share(share))
    return Words(lang, PROGRESS)("streamed", **shown)


def _number(value: Any, words: Words) -> str:
    return words("not_a_number") if value is None else f"{value:.4f}"
