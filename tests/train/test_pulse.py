"""Signs of life: what the worker tells, and how long the supervisor waits."""

from __future__ import annotations

import pytest

from fitune.train.pulse import LEAST_S, TIMES, Patience, Pulse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_sign_at_most_once_a_second(monkeypatch, clock: Clock):
    monkeypatch.setattr("time.monotonic", clock)
    told: list[dict] = []
    pulse = Pulse(told.append)
    for _ in range(40):
        pulse()
        clock.now += 0.1
    assert told == [{"event": "beat"}] * 4
    pulse.expect_write(20_000_000_000)
    assert told[-1] == {"event": "beat", "expected_s": 1000.0}


def test_a_download_is_not_watched(clock: Clock):
    patience = Patience(clock=clock)
    patience.hear({"event": "folder"})
    clock.now = 1e6
    assert patience.left_s is None and patience.silent_s == 0


def test_silence_runs_out(clock: Clock):
    patience = Patience(clock=clock)
    patience.hear({"event": "beat"})
    clock.now = LEAST_S - 1
    assert patience.left_s == 1
    clock.now = LEAST_S + 1
    assert patience.left_s == -1 and patience.silent_s == LEAST_S + 1
    patience.forgive()
    assert patience.left_s == LEAST_S


def test_who_was_slow_before_may_be_slow_again(clock: Clock):
    """Layers from a slow disk, say: silences of ten minutes that were none."""
    patience = Patience(clock=clock)
    for _ in range(3):
        patience.hear({"event": "beat"})
        clock.now += 600
    assert patience.allowed_s == TIMES * 600


def test_a_silence_that_was_announced(clock: Clock):
    patience = Patience(clock=clock)
    patience.hear({"event": "beat", "expected_s": 7200.0})
    patience.hear({"event": "step", "step": 1})
    assert patience.left_s == 7200
