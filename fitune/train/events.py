"""What happened in a run: `events.jsonl`, one JSON object a line, append only.

Every line reaches the system in one write, so `kill -9` costs at most the line being written; the next opening cuts
that torn line off and loses nothing else.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from fitune.errors import EXIT_FAILED, UserError
from fitune.files import BINARY, atomic_write, explained, file_error, parse_json, try_lock, write_out

# Every kind of event (field `event`) and its fields. Each event also has `time`, seconds since 1970. Bytes are
# integers; a field that is not known is null or left out; a number that is not finite (a loss of NaN) is null.
EVENT_FIELDS: dict[str, tuple[str, ...]] = {
    "start": (
        "fitune_version", "torch_version", "transformers_version", "device_name", "trainable", "total", "steps",
        "resumed_from",
    ),
    "data": ("layout", "template", "lengths", "dropped", "truncated"),
    "techniques": ("used",),
    "phase": ("phase", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes"),
    "step": (
        "step", "loss", "tokens", "targets", "lr", "grad_norm", "step_s", "tokens_per_s", "peak_allocated_bytes",
        "loss_scale", "skipped_rows", "link_bytes", "link_bytes_per_s", "link_wait_share",
    ),
    "eval": ("step", "eval_loss", "by_language", "seconds"),
    "sample": ("when", "language", "prompt", "answer"),
    "checkpoint": ("step", "path", "seconds", "bytes", "blocked_s"),
    "rehearsal": ("step", "phases", "seconds", "peak_allocated_bytes", "skipped"),
    "replan": ("step", "number", "change", "cause", "where", "phase", "longest_row"),
    "restart": ("step", "from_step", "cause", "exit_code", "where", "change"),
    "notice": ("text",),
    "end": ("status", "step", "seconds", "error"),
}  # fmt: skip
END_STATUSES = ("done", "interrupted", "terminated", "failed")
_REWOUND = ("step", "eval", "checkpoint")
_DURABLE = ("start", "checkpoint", "restart", "end")  # these also wait for the disk, so that a power cut keeps them
_LOCK_TRIES, _LOCK_WAIT_S = 10, 0.05  # `fitune runs` holds a shared lock for a moment while it looks


class EventLog:
    """The one writer of a run's events. It holds a lock on the file until `close` or the process' death.

    Raises:
        UserError: the file cannot be written, another process writes to this run, or a line is not an event.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = -1
        self._open()

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Appends one event and returns it as it was stored (plain values, with `event` and `time`).

        Tensors and numpy scalars become numbers, paths become text, NaN and infinities become None.

        Raises:
            UserError: the disk is full or gone; the file then still ends with the last whole event. Exit code 1.
        """
        assert event in EVENT_FIELDS, event
        stored = as_stored(event, fields)
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            write_out(self._descriptor, _line(stored))
            if event in _DURABLE:
                os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            problem = file_error("write", self.path, error)
            raise UserError(problem.what, problem.why, problem.fix, EXIT_FAILED) from error
        return stored

    def rewind(self, step: int) -> int:
        """Drops steps, evaluations and checkpoints after `step`, so that a resumed run has one history.

        Atomic: a kill leaves the old file or the new one. Returns how many events were dropped.
        """
        events = read_events(self.path)
        kept = [e for e in events if e.get("event") not in _REWOUND or not _after(e, step)]
        if len(kept) < len(events):
            self.close()
            atomic_write(self.path, b"".join(_line(event) for event in kept))
            self._open()
        return len(events) - len(kept)

    def close(self) -> None:
        """Closes the file and gives up the lock. Closing twice is allowed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _open(self) -> None:
        with explained("open", self.path):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o666)
            try:
                self._lock()
                self._cut_torn_tail()
            except BaseException:
                self.close()
                raise

    def _lock(self) -> None:
        for _ in range(_LOCK_TRIES):
            if try_lock(self._descriptor):
                return
            time.sleep(_LOCK_WAIT_S)
        raise UserError(
            f"cannot write to the run at {self.path.parent}", "another fitune process is training it right now",
            "wait until it has finished, or stop it first", EXIT_FAILED,
        )  # fmt: skip

    def _cut_torn_tail(self) -> None:
        content = self.path.read_bytes()
        whole = _whole_bytes(content)
        if whole < len(content):
            os.ftruncate(self._descriptor, whole)
        if whole and content[whole - 1 : whole] != b"\n":
            write_out(self._descriptor, b"\n")


def as_stored(event: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The event in JSON's types, with its kind and the time."""
    return {"event": event, "time": round(time.time(), 3)} | {k: _plain(v) for k, v in fields.items()}


def read_events(path: Path) -> list[dict[str, Any]]:
    """All whole events of the file, oldest first; none when there is no file. A torn end is left out.

    Raises:
        UserError: the file cannot be read, or a line before the end is not a JSON object (its number is named).
    """
    with explained("read", path):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return []
    events = []
    for number, line in enumerate(content[: _whole_bytes(content)].splitlines(), 1):
        event = _parse(line)
        if event is None:
            raise UserError(f"cannot read {path}", f"line {number} is not a JSON object", f"remove line {number}")
        events.append(event)
    return events


def is_being_written(path: Path) -> bool:
    """Whether a living process holds the event log at `path` open for writing."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def number(value: Any) -> float | None:
    """A finite number out of an event, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if value - value == 0 else None


def _after(event: dict[str, Any], step: int) -> bool:
    return isinstance(event.get("step"), int) and event["step"] > step


def _line(event: dict[str, Any]) -> bytes:
    # backslashreplace: half a surrogate pair in a model's answer becomes its JSON escape.
    return json.dumps(event, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = parse_json(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return event if isinstance(event, dict) else None


def _whole_bytes(content: bytes) -> int:
    """Length without a torn last line. No part of a JSON object's line is itself a JSON object, so a last line that
    parses is whole even when its line feed is missing."""
    start = content.rfind(b"\n", 0, len(content) - 1) + 1
    return len(content) if _parse(content[start:]) is not None else start


def _plain(value: Any) -> Any:
    """`value` in JSON's types."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return _plain(value.item())  # a tensor's or numpy's scalar
