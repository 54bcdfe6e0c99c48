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

from fitune.errors import EXIT_DOES_NOT_FIT, EXIT_INTERRUPTED, EXIT_TERMINATED, UserError
from fitune.parallel.forwarding import FORWARDED, handled
from fitune.parallel.world import SAME_RECORDS, World, device_list
from fitune.recipe import Recipe

# After the first failure the others get this long: to say the same, or to save. Then they are killed.
FAILED_GRACE_S = 3.0
POLL_S = 0.1
_TAIL_BYTES = 16 << 10
_SHELL_SIGNAL = 128
_STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED)  # saved, and ended because they were told to


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
    if not on_cpu and named is not None and len(named) > 1 and max(named) >= num_gpus:
        raise UserError(f"cannot use --devices {recipe.devices}", f"{num_gpus} GPUs are there, counted from 0",
                        "name others with --devices")  # fmt: skip
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
        """One has ended with an error: give the others a moment, tell what only it has said."""
        code = self._processes[rank].returncode
        end = time.monotonic() + FAILED_GRACE_S
        while time.monotonic() < end and any(process.poll() is None for process in self._processes):
            time.sleep(POLL_S)
        codes = [process.poll() for process in self._processes]
        if EXIT_DOES_NOT_FIT in codes:  # the others may ask for new processes, with which it would be the same
            rank, code = codes.index(EXIT_DOES_NOT_FIT), EXIT_DOES_NOT_FIT
        leader = codes[0]
        if rank != 0 and leader != code:
            self._show(rank)
        return _SHELL_SIGNAL - code if code < 0 else code

    def _show(self, rank: int) -> None:
        output = self._outputs[rank]
        assert output is not None
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - _TAIL_BYTES))
        text = output.read().decode("utf-8", "replace").rstrip()
        if text:
            sys.stderr.write(f"process {rank} of {self.size} failed:\n{text}\n")
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
