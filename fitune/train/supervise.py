"""Training in a process of its own, under a light one that starts it again when it dies.

A worker may be killed by the system for the host's memory, ended by a library that prints and exits, or left with a
device that does not answer. Its supervisor imports no torch, so that it is small and none of that reaches it: it reads
what the worker tells, finds out why it died, takes the next notch of the plan and starts a worker that resumes the run.

The worker writes to the terminal itself. Only its standard error passes through here (through a pseudo-terminal where
there is one), because some libraries say there why they end the process. Signals are passed on; the worker is a session
of its own, so that Ctrl-C reaches it once. When the supervisor dies, the worker ends at once; a worker that hangs (see
`fitune.train.pulse`) is ended and started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fitune.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESTART, EXIT_TERMINATED, UserError
from fitune.parallel.forwarding import FORWARDED, handled
from fitune.train.died import Death, Restarts, diagnose, tell_end
from fitune.train.oom import oom_kills
from fitune.train.pulse import BEAT, LEAST_S, Patience
from fitune.units import format_duration

ENVIRONMENT = "FITUNE_WORKER"
UNSUPERVISED = "none"  # of a rank whose launcher has no supervisor
_TAIL_BYTES = 64 << 10
_LOOK_S, _POLL_S = 30.0, 0.05  # how often the clock, and a worker that ends, are looked at
_EAR_S = 5.0  # what a first rank that has ended told is read at once; a process that it left may hold the line
_BEFORE_WORK = ("folder", "plan", "replan", "notice")  # kinds of events that a run has before any work on it
_TOLD = ("event", "step", "status", "run_folder", "expected_s")
_SHELL_SIGNAL = 128  # from here on exit codes say which signal has ended a process
_STOPS = {"SIGINT": EXIT_INTERRUPTED, "SIGTERM": EXIT_TERMINATED, "SIGHUP": EXIT_TERMINATED}
_ENDS = {"done": EXIT_DONE, "interrupted": EXIT_INTERRUPTED, "terminated": EXIT_TERMINATED}
OnEvent = Callable[[dict[str, Any]], None]


def is_possible() -> bool:
    """Whether this system has what it takes (POSIX processes and signals; not Windows itself, WSL has)."""
    return os.name == "posix"


# ---- the worker's side -----------------------------------------------------------------------------------------------


class Link:
    """The worker's connection to its supervisor: events go up, and when the supervisor dies so does the worker."""

    def __init__(self, lifeline: int, status: int, tells_all: bool, is_supervised: bool):
        self._status, self._tells_all, self.is_supervised = status, tells_all, is_supervised
        for descriptor in (lifeline, status):
            os.set_inheritable(descriptor, False)
        threading.Thread(target=self._watch, args=(lifeline,), name="lifeline", daemon=True).start()

    @staticmethod
    def _watch(lifeline: int) -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline, 1)  # nothing is ever written: it returns when the supervisor's end is closed
        os.kill(os.getpid(), signal.SIGKILL)

    def on_event(self, event: dict[str, Any]) -> None:
        """Tell the supervisor of an event; a supervisor that is gone is no error."""
        shown = event if self._tells_all else {k: event[k] for k in _TOLD if k in event}
        with contextlib.suppress(OSError):
            view = memoryview(json.dumps(shown).encode() + b"\n")
            while view:
                view = view[os.write(self._status, view) :]


def link() -> Link | None:
    """This process' connection to its supervisor; None when it has none. Its own children are no workers."""
    found = os.environ.pop(ENVIRONMENT, None)
    if found is None:
        return None
    lifeline, status, tells = found.split(",")
    return Link(int(lifeline), int(status), tells == "all", tells != UNSUPERVISED)


def for_ranks(link: Link | None) -> tuple[tuple[str, str], int | None]:
    """For a `fitune.parallel.launch.Launcher` in this process: how its processes are tied to it, and where the first of
    them tells its events (this process' own supervisor)."""
    tells = UNSUPERVISED if link is None else "all" if link._tells_all else "some"
    return (ENVIRONMENT, "{lifeline},{status}," + tells), None if link is None else link._status


# ---- the supervisor's side -------------------------------------------------------------------------------------------


@dataclass
class _Heard:
    """What one worker told."""

    folder: Path | None = None
    step: int = 0
    status: str | None = None  # of its `end`
    hung_s: float | None = None  # it was ended after so much silence
    has_begun: bool = False  # to work on the run: from then on an end is to be told
    tail: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        return self.tail.decode("utf-8", "replace")

    def hear(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        self.has_begun = self.has_begun or kind not in _BEFORE_WORK
        if kind == "folder":
            self.folder = Path(event["run_folder"])
        elif kind == "end":
            self.status = event.get("status")
        elif kind == "step":
            self.step = int(event["step"])

    def tell_end(self, code: int, folder: Path | None, text: str) -> None:
        """Of a run that has begun, where the worker has not."""
        if self.status is None and self.has_begun and code != EXIT_DONE and folder is not None:
            tell_end(folder, code, text, self.step)


class Ear:
    """For a launcher of ranks that has no supervisor: hears the first of them, which tells the run's end, and tells it
    where that one could not (it was ended while it waited for another that is gone)."""

    def __init__(self) -> None:
        self._heard = _Heard()
        self._from, self.status = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="ear", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with open(self._from, encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):  # else it was ended in the middle
                    self._heard.hear(json.loads(line))

    def close(self, code: int, text: str) -> None:
        """After the ranks have ended.

        Args:
            code: the exit code.
            text: what was printed as errors.
        """
        os.close(self.status)
        self._thread.join(_EAR_S)
        if code not in _STOPS.values():  # what a signal has ended can be resumed as it is
            self._heard.tell_end(code, self._heard.folder, text)


class Supervisor:
    """Runs a worker until the run has ended, one way or another.

    Args:
        first: the command of the first worker.
        again: the command of a worker that resumes the run in this folder.
        on_event: also called with every event of the workers.
        tell: called with one line whenever a worker is started again.
        to_stderr: what the workers print goes there too.
        least_silence_s: a worker is not ended for a shorter silence (`fitune.train.pulse.Patience`).
    """

    def __init__(
        self, first: Sequence[str], again: Callable[[Path], Sequence[str]], *, on_event: OnEvent | None = None,
        tell: Callable[[str], None] = lambda text: None, to_stderr: bool = False, least_silence_s: float = LEAST_S,
    ):  # fmt: skip
        self.first, self.again, self.on_event, self.tell = first, again, on_event, tell
        self.to_stderr, self._least_silence_s = to_stderr, least_silence_s
        self.folder: Path | None = None
        self.stop_code: int | None = None
        self._asked: int | None = None  # a signal that came while the worker was being started
        self._patience = Patience(least_silence_s)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """The exit code of the run.

        Raises:
            UserError: it died again and again without getting on (exit code 1).
        """
        restarts: Restarts | None = None
        command = self.first
        with handled(dict.fromkeys(FORWARDED, self._forward) | {"SIGTSTP": self._pause}):
            while self.stop_code is None:
                kills = oom_kills()
                code, heard = self._work(command)
                self.folder = heard.folder or self.folder
                death = diagnose(code, heard.text, kills, oom_kills(), wants_restart=code == EXIT_RESTART)
                if heard.hung_s is not None:
                    death = Death(f"it hung: no sign of life for {format_duration(heard.hung_s)}")
                if self.stop_code is not None:
                    if 0 < code < _SHELL_SIGNAL:  # a failure; what a signal has ended can be resumed as it is
                        heard.tell_end(code, self.folder, heard.text)
                    return self.stop_code if code < 0 else code
                if heard.status is not None and code < 0:  # killed after it had told its end
                    return _ENDS.get(heard.status, EXIT_FAILED)
                if death is None or heard.status is not None:
                    heard.tell_end(code, self.folder, heard.text)
                    return code
                if self.folder is None:
                    return self._too_early(code, death)
                restarts = restarts or Restarts(self.folder)
                self.tell(restarts.next(death, code, heard.step))
                command = self.again(self.folder)
        return self.stop_code  # asked for while there was no worker to pass it on to

    def _too_early(self, code: int, death: Death) -> int:
        if code >= 0:
            return code  # it has said what is wrong
        raise UserError("the run died before it began", death.cause, death.fix, EXIT_FAILED)

    def _work(self, command: Sequence[str]) -> tuple[int, _Heard]:
        """One worker from its start to its end: (exit code, negative for a signal; what it told)."""
        lifeline, lifeline_end = os.pipe()
        status, status_end = os.pipe()
        errors, errors_end = _error_channel()
        told = "all" if self.on_event is not None else "some"
        environment = os.environ | {ENVIRONMENT: f"{lifeline},{status_end},{told}"}
        try:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=errors_end if self.to_stderr else None,
                stderr=errors_end, pass_fds=(lifeline, status_end), env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            problem = UserError("cannot start the training process", str(error), "try --no-supervise", EXIT_FAILED)
            raise problem from None
        finally:
            for descriptor in (lifeline, status_end, errors_end):
                os.close(descriptor)
        heard = _Heard()
        self._patience = Patience(self._least_silence_s)
        asked, self._asked = self._asked, None
        if asked is not None:
            self._send(asked)
        try:
            self._listen(status, errors, heard)
            return self._process.wait(), heard
        finally:
            self._process = None
            for descriptor in (lifeline_end, status, errors):
                os.close(descriptor)

    def _listen(self, status: int, errors: int, heard: _Heard) -> None:
        """Until the worker has ended; what its own children still write is not waited for."""
        assert self._process is not None
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(status, selectors.EVENT_READ)
            selector.register(errors, selectors.EVENT_READ)
            while status in selector.get_map() or self._process.poll() is None:
                self._end_if_hung(heard)
                left_s = self._patience.left_s
                patient_s = None if left_s is None else min(max(left_s, _POLL_S), _LOOK_S)
                wait_s = patient_s if status in selector.get_map() else _POLL_S
                for key, _ in selector.select(wait_s):
                    data = _read(key.fd)
                    if not data:
                        selector.unregister(key.fd)
                    elif key.fd == status:
                        *lines, pending = (pending + data).split(b"\n")
                        for line in lines:
                            self._hear(line, heard)
                    else:
                        _pass_on(data, heard)
            while errors in selector.get_map() and selector.select(0):
                data = _read(errors)
                if not data:
                    break
                _pass_on(data, heard)

    def _hear(self, line: bytes, heard: _Heard) -> None:
        event = json.loads(line)
        self._patience.hear(event)
        heard.hear(event)
        if self.on_event is not None and event.get("event") != BEAT:
            self.on_event(event)

    def _end_if_hung(self, heard: _Heard) -> None:
        """Kill a worker that has been silent for too long: one that hangs saves nothing any more."""
        left_s = self._patience.left_s
        if left_s is None or left_s > 0 or heard.hung_s is not None:
            return
        if self._is_stopped():
            self._patience.forgive()
            return
        heard.hung_s = self._patience.silent_s
        self._send(signal.SIGKILL)

    def _is_stopped(self) -> bool:
        """Whether somebody has stopped the worker (`kill -STOP`, a debugger)."""
        import psutil

        assert self._process is not None
        with contextlib.suppress(psutil.Error):
            return bool(
                psutil.Process(self._process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            )
        return False

    def _forward(self, number: int, frame: Any) -> None:
        """Pass a signal on to the worker."""
        self.stop_code = _STOPS[signal.Signals(number).name]
        if self._process is None:
            self._asked = number
        self._send(number)

    def _pause(self, number: int, frame: Any) -> None:
        """Ctrl-Z: the worker stops, then this process; both go on together."""
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._patience.forgive()
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _error_channel() -> tuple[int, int]:
    """(our end, the worker's end) for standard error: a pseudo-terminal where ours is a terminal, so that colours and
    progress bars stay; else a pipe."""
    if not sys.stderr.isatty():
        return os.pipe()
    import pty
    import termios

    ours, theirs = pty.openpty()
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # our own terminal turns a line feed into what it needs
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    with contextlib.suppress(OSError):
        termios.tcsetwinsize(theirs, termios.tcgetwinsize(sys.stderr.fileno()))
    return ours, theirs


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # a pseudo-terminal whose other end is closed
        return b""


def _pass_on(data: bytes, heard: _Heard) -> None:
    heard.tail += data
    del heard.tail[:-_TAIL_BYTES]
    with contextlib.suppress(OSError, ValueError):  # nobody reads our errors any more
        sys.stderr.flush()
        view = memoryview(data)
        while view:
            view = view[os.write(sys.stderr.fileno(), view) :]
