"""Faults put into a training process by the tests' own entry: nothing of the product knows of them.

A fault is a dict with `kind` and where it strikes; `install` wraps the program's own functions in the process that
calls it, before the command runs.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OOM = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 9.77 GiB"
BITSANDBYTES = "Error out of memory at line 380 in file /src/bitsandbytes/csrc/pythonInterface.c"


def prepare(log: Path, *faults: dict[str, Any]) -> Callable[[], None]:
    """What a `Command` runs first: write the records of every step to `log`, and fail as the faults say."""
    return functools.partial(install, str(log), json.dumps(faults))


def install(log: str, faults: str) -> None:
    from fitune.engine.engine import Engine

    pending = [dict(fault) for fault in json.loads(faults)]
    counts = {"observed": 0, "evaluated": 0, "updated": 0}
    real_step, real_evaluate, real_update = Engine.step, Engine.evaluate, Engine._update

    def step(self, host_batches, *, step, lr, observe):
        def watching(part, index):
            observe(part, index)
            counts["observed"] += 1
            _strike(pending, "part", part=part, index=index, step=step)
            _strike(pending, "observation", number=counts["observed"])

        result = real_step(self, host_batches, step=step, lr=lr, observe=watching)
        ids = sorted({int(i) for b in host_batches for i in b.record_ids.reshape(-1) if i >= 0})
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step + 1, "records": ids}) + "\n")
        _strike(pending, "after step", step=step)
        return result

    def evaluate(self, host_batches):
        counts["evaluated"] += 1
        _strike(pending, "evaluation", number=counts["evaluated"])
        return real_evaluate(self, host_batches)

    def update(self, *arguments):
        counts["updated"] += 1
        real_update(self, *arguments)
        self.updating = True
        _strike(pending, "update", number=counts["updated"])

    Engine.step, Engine.evaluate, Engine._update = step, evaluate, update  # type: ignore[method-assign]
    _break_loading(pending)
    _break_saves(pending)


def _break_loading(pending: list[dict[str, Any]]) -> None:
    from fitune.train import session

    real_make = session.make_engine

    def make(*arguments):
        _strike(pending, "load")
        return real_make(*arguments)

    session.make_engine = make


def _break_saves(pending: list[dict[str, Any]]) -> None:
    from fitune.train import checkpoint, saver

    real_clone, real_write = saver.Saver._copy, checkpoint.write_tensors

    def copy(self, tensors):
        try:
            _strike(pending, "copy")
        except MemoryError:
            self.frugal = True
            return None
        return real_clone(self, tensors)

    def write(path, tensors):
        _strike(pending, "write", name=path.name)
        real_write(path, tensors)

    saver.Saver._copy, checkpoint.write_tensors = copy, write  # type: ignore[method-assign]


def _strike(pending: list[dict[str, Any]], at: str, **found: Any) -> None:
    """Fail if a fault that has not struck yet fits this place."""
    import torch

    from fitune.errors import EXIT_DOES_NOT_FIT, UserError

    found |= {"rank": int(os.environ.get("RANK", "0"))}
    for fault in pending:
        if fault["at"] != at or any(fault.get(name) not in (None, value) for name, value in found.items()):
            continue
        marker = fault.get("once")  # across processes: the one that starts again must not fail as well
        if marker is not None and os.path.exists(marker):
            continue
        fault["after"] = fault.get("after", 0) - 1  # so many times it does not strike
        if fault["after"] >= 0:
            continue
        pending.remove(fault)
        if marker is not None:
            Path(marker).touch()
        kind = fault["kind"]
        if kind == "device":
            raise torch.OutOfMemoryError(OOM)
        if kind == "host":
            raise MemoryError
        if kind == "nccl":
            raise RuntimeError("NCCL error in: NCCLUtils.hpp:317, unhandled cuda error\nCuda failure 2 'out of memory'")
        if kind == "nothing left":
            raise UserError("nothing is left to change", "asked for by a test", "", EXIT_DOES_NOT_FIT)
        if kind == "hang":
            time.sleep(3600)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "print and exit":
            print(BITSANDBYTES, file=sys.stderr, flush=True)
            os._exit(1)
        raise AssertionError(kind)


def records(log: Path) -> dict[int, list[int]]:
    """The records of every step as it was last computed."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["records"] for line in lines}


def main() -> int:
    """`python -m tests.faults.inject ARGUMENTS`: the command line with the faults of FAULTS (a JSON object)."""
    given = json.loads(os.environ["FAULTS"])
    install(given["log"], json.dumps(given["faults"]))
    from fitune.cli.main import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
