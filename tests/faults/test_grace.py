"""SIGTERM with ten seconds until the kill, in the middle of a step that takes longer than that."""

from __future__ import annotations

import signal
import time

from fitune.train import checkpoint
from tests.train.tiny_run import Command, events, of_kind, steps_done

STEPS = 20
SETTINGS = ("--micro-batch", "4", "--eval-every", "8", "--save-every", "100")


def slow_from_step_3() -> None:
    """Each part of a step then takes two seconds: the whole one more than twenty."""
    from fitune.engine.engine import Engine

    real = Engine.step

    def step(self, batches, *, step, lr, observe):
        def slow(part, index):
            observe(part, index)
            if step >= 3:
                time.sleep(2)

        return real(self, batches, step=step, lr=lr, observe=slow)

    Engine.step = step  # type: ignore[method-assign]


def test_sigterm_in_a_long_step(harness):
    """The step is given up, the state before it saved in time; the resumed run has the same end."""
    job = harness(STEPS, *SETTINGS)
    out = job.new()
    running = Command(*job.arguments(out), cwd=job.folder, prepare=slow_from_step_3)
    assert running.wait_for(lambda: steps_done(out) >= 3)
    time.sleep(1)
    began = time.monotonic()
    running.send(signal.SIGTERM)
    code, printed = running.wait()
    assert code == 143, printed
    assert time.monotonic() - began < 10, "the kill would have come"
    assert checkpoint.steps(out / "checkpoints") == [3] and events(out)[-1]["status"] == "terminated"
    code, printed = job.resume(out).wait()
    assert code == 0, printed
    assert [e["step"] for e in of_kind(out, "step")] == list(range(1, STEPS + 1))
    job.assert_same_bits(out)
