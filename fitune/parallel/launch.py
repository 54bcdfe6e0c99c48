"""Starts a run's processes on this machine and watches over them: one for each GPU.

No torch here: this process only waits. It passes signals on, the first process writes to the terminal, and when one
fails all end and its words are shown.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from fitune.errors import (
    EXIT_BAD_INPUT,
    EXIT_DOES_NOT_FIT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_RESTART,
    EXIT_TERMINATED,
    UserError,
)
from fitune.parallel.forwarding import FORWARDED, handled, signal_name
from fitune.parallel.world import SAME_RECORDS, World, check_devices, device_list
from fitune.recipe import Recipe

# After the first failure the others get this long: to say the same, or to save. Then they are killed.
FAILED_GRACE_S = 3.0
WHY_GRACE_S = 20.0  # while it is only known that some want new processes, not why: who knows it may be slow to end
POLL_S = 0.1
_TAIL_BYTES = 16 << 10
_SHELL_SIGNAL = 128
_STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED)  # saved, and ended because they were told to
_DECIDES = (EXIT_DOES_NOT_FIT, EXIT_BAD_INPUT, EXIT_FAILED)  # with new processes it would be the same


def num_processes(recipe: Recipe, num_gpus: int) -> int:
    """How many processes train this: one for each GPU that is asked for or there, no more than a step has records where
    these are shared out.

    Raises:
        UserError: more GPUs asked for than there are.
    """
    if recipe.parallel == "none":
        return 1
    on_cpu = (recipe.devices or "").strip().lower() == "cpu" or num_gpus == 0
    named = device_list(recipe.devices)
    if not on_cpu and named is not None and len(named) > 1:
        check_devices(recipe.devices, num_gpus)
    if recipe.nproc is None:
        there = 0 if on_cpu else len(named) if named is not None else num_gpus
        return max(1, there if recipe.parallel in SAME_RECORDS else min(there, recipe.batch))
    available = len(named) if named is not None else num_gpus
    if not on_cpu and recipe.nproc > available:
        raise UserError(f"cannot use {recipe.nproc} GPUs", f"{available} are there", f"use --nproc {available}")
    return recipe.nproc


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Launcher:
    """Runs the same command once per rank until all have ended.

    Args:
        command: of each process.
        size: how many.
        link: the variable that ties a process to the one that started it, and its value for a lifeline (a pipe that is
            closed when this process is gone) and a place to tell events to (see `fitune.train.supervise.Link`).
        status: where the first process tells its events, an open file; None: nowhere.
        environ: what all of them get.
    """

    def __init__(
        self, command: Sequence[str], size: int, link: tuple[str, str], *, status: int | None = None,
        environ: Mapping[str, str] = os.environ,
    ):  # fmt: skip
        self.command, self.size, self.link, self.status = list(command), size, link, status
        self.environ = dict(environ)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._outputs: list[IO[bytes] | None] = []
        self._lifeline_end = -1
        self.said = ""  # by a process that failed, where it was shown

    def run(self) -> int:
        """The exit code: of the first rank that failed (128 + the signal's number where one ended it), else
        rank 0's."""
        with handled(dict.fromkeys(FORWARDED, self._forward)):
            try:
                self._start()
                return self._watch()
            finally:
                self._end()

    def _start(self) -> None:
        port = free_port()
        lifeline, self._lifeline_end = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for rank in range(self.size):
            world = World(rank, self.size, rank, self.size, port=port)
            output = None if rank == 0 else tempfile.TemporaryFile(prefix="fitune-rank-")  # noqa: SIM115 closed in _end
            self._outputs.append(output)
            status = self.status if rank == 0 and self.status is not None else nowhere
            name, form = self.link
            environment = self.environ | world.environment() | {name: form.format(lifeline=lifeline, status=status)}
            # Each process computes on its GPU; their CPU threads share the cores.
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.size)))
            self._processes.append(
                subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    pass_fds=(lifeline, status),
                    start_new_session=True,  # Ctrl-C reaches it once, through this process
                )
            )
        os.close(lifeline)
        os.close(nowhere)

    def _watch(self) -> int:
        while True:
            codes = [process.poll() for process in self._processes]
            failed = next((rank for rank, code in enumerate(codes) if code not in (None, 0, *_STOPPED)), None)
            if failed is not None:
                return self._failed(failed)
            if None not in codes:
                return codes[0] or 0
            time.sleep(POLL_S)

    def _failed(self, rank: int) -> int:
        """One has ended with an error: give the others a moment, tell what only it has said. Where some only know that
        one is gone, that one decides."""
        code = self._processes[rank].returncode
        began = time.monotonic()
        while None in (codes := [process.poll() for process in self._processes]):
            if time.monotonic() - began > (WHY_GRACE_S if self._nobody_knows(codes) else FAILED_GRACE_S):
                break
            time.sleep(POLL_S)
        for decides in _DECIDES if code > 0 else ():
            if decides in codes:
                rank, code = codes.index(decides), decides
                break
        killed = next((i for i, found in enumerate(codes) if found is not None and found < 0), None)
        if code == EXIT_RESTART and killed is not None:  # the one that the others miss
            rank, code = killed, codes[killed] or code
        leader = codes[0]
        if code < 0 or (rank != 0 and leader != code):
            self._show(rank, code)
        return _SHELL_SIGNAL - code if code < 0 else code

    @staticmethod
    def _nobody_knows(codes: Sequence[int | None]) -> bool:
        """Whether all that have ended want new processes, since another one is gone."""
        return set(codes) <= {None, EXIT_RESTART, *_STOPPED, 0}

    def _show(self, rank: int, code: int) -> None:
        output, text = self._outputs[rank], ""
        if output is not None:
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - _TAIL_BYTES))
            text = output.read().decode("utf-8", "replace").rstrip()
        who = f"process {rank} of {self.size}"
        if code < 0:
            self.said = f"error: {who} was ended by {signal_name(-code)}\n{text}".rstrip()
        elif text:
            self.said = f"{who} failed:\n{text}"
        if self.said:
            sys.stderr.write(f"{self.said}\n")
            sys.stderr.flush()

    def _end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        for output in self._outputs:
            if output is not None:
                output.close()
        if self._lifeline_end >= 0:
            os.close(self._lifeline_end)

    def _forward(self, number: int, frame: Any) -> None:
        """Pass a signal on to all ranks; they save and end by themselves."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)
