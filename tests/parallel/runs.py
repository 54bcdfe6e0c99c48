"""Whole runs by several ranks, each a process that calls `fitune.train.run` as torchrun would have it started."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.ranks import WAIT_S, _result, free_port
from tests.train.tiny_run import PRELOADED, of_kind


class Ranks:
    """Processes of one run, still running.

    Args:
        prepare: called with the rank in each process before the run, to make something fail there.
    """

    def __init__(self, size: int, settings: dict[str, Any], *, resume: str | None = None,
                 prepare: Callable[[int], None] | None = None):  # fmt: skip
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, "fitune.parallel.setup", "torch.distributed"])
        port = free_port()
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        self.channels = [reader for reader, _ in pipes]
        self.processes = [
            context.Process(target=_run, args=(rank, size, port, pipes[rank][1], settings, resume, prepare))
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()
        for _, writer in pipes:
            writer.close()

    def results(self) -> list[Any]:
        """(status, exit code, losses of the steps) of every rank; a failure is raised."""
        try:
            return [_result(rank, channel) for rank, channel in enumerate(self.channels)]
        finally:
            for process in self.processes:
                process.join(5)
                if process.is_alive():
                    process.kill()

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)


def train(size: int, settings: dict[str, Any], **arguments: Any) -> list[Any]:
    """A whole run by `size` ranks (1: in a process of its own too)."""
    return Ranks(size, settings, **arguments).results()


def _run(rank: int, size: int, port: int, channel: Any, settings: dict[str, Any], resume: str | None,
         prepare: Callable[[int], None] | None) -> None:  # fmt: skip
    import pickle

    import torch

    from fitune import recipe as recipes
    from fitune.parallel.world import World
    from fitune.train import run

    torch.set_num_threads(1)
    os.environ.update(World(rank, size, rank, size, "127.0.0.1", port).environment())
    try:
        if prepare is not None:
            prepare(rank)
        result = run(recipes.build(settings), resume=Path(resume) if resume else None)
        channel.send_bytes(pickle.dumps(((result.status, result.exit_code, result.loss), None)))
    except BaseException:
        channel.send_bytes(pickle.dumps((None, traceback.format_exc())))
        raise


def losses(run: Path) -> list[float]:
    return [e["loss"] for e in of_kind(run, "step")]


def evaluations(run: Path) -> list[tuple[int, float]]:
    return [(e["step"], e["eval_loss"]) for e in of_kind(run, "eval")]


def assert_same_run(ours: Path, theirs: Path) -> None:
    mine, other = losses(ours), losses(theirs)
    assert len(mine) == len(other)
    assert mine[0] == pytest.approx(other[0], rel=1e-5) and mine == pytest.approx(other, rel=1e-4)
    for (step, loss), (other_step, other_loss) in zip(evaluations(ours), evaluations(theirs), strict=True):
        assert step == other_step and loss == pytest.approx(other_loss, rel=1e-4)


__all__: Sequence[str] = ("Ranks", "WAIT_S", "assert_same_run", "evaluations", "losses", "train")
