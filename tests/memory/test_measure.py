"""How much can be pinned: a driver that refuses, one that does not, and that everything is given back."""

from __future__ import annotations

import pytest

from fitune.memory.measure import MOST_PINNED_BYTES, Pinned, probe_pinned
from fitune.units import GIB, MIB


class Registrar:
    """Pins up to `limit_bytes`, as a driver under WSL does; `fails_at` raises instead, as Ctrl-C would."""

    def __init__(self, limit_bytes: int, fails_at: int | None = None):
        self.limit_bytes, self.fails_at = limit_bytes, fails_at
        self.held = self.calls = 0
        self.cached = 512 * MIB  # what torch holds pinned already counts against the limit

    def make_room(self) -> None:
        self.cached = 0

    def pin(self, num_bytes: int):
        self.calls += 1
        if self.calls == self.fails_at:
            raise KeyboardInterrupt
        if self.cached + self.held + num_bytes > self.limit_bytes:
            return None
        self.held += num_bytes
        return num_bytes

    def unpin(self, handle: int) -> None:
        self.held -= handle


def test_the_limit_is_found_and_given_back():
    driver = Registrar(1200 * MIB)
    assert probe_pinned(64 * GIB, driver) == Pinned(1024 * MIB, True)
    assert driver.held == 0


def test_half_of_the_available_memory_is_the_end():
    driver = Registrar(64 * GIB)
    assert probe_pinned(4 * GIB, driver) == Pinned(2 * GIB, False)
    assert probe_pinned(1000 * GIB, driver) == Pinned(MOST_PINNED_BYTES, False)
    assert driver.held == 0


def test_an_interruption_leaves_nothing_pinned():
    driver = Registrar(64 * GIB, fails_at=4)
    with pytest.raises(KeyboardInterrupt):
        probe_pinned(64 * GIB, driver)
    assert driver.held == 0
