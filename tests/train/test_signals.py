"""What the first and the second signal do, and which are left alone."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from fitune.train.signals import EXIT_CODES, Stopped, StopSignals


@pytest.mark.parametrize(
    ("number", "status", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)]
)
def test_the_first_one_is_noted_and_the_second_acts(number: int, status: str, code: int, capfd):
    acted = []
    before = signal.signal(number, lambda *_: acted.append(number))
    try:
        with StopSignals() as stop:
            stop.check()
            os.kill(os.getpid(), number)
            assert stop.requested == status and EXIT_CODES[status] == code and not acted
            assert "stopping: this step is finished and saved first" in capfd.readouterr().err
            with pytest.raises(Stopped) as caught:
                stop.check()
            assert caught.value.status == status
            os.kill(os.getpid(), number)
            assert acted == [number] and stop.requested == status
        os.kill(os.getpid(), number)
        assert acted == [number, number], "afterwards everything is as it was before"
    finally:
        signal.signal(number, before)


def test_an_ignored_signal_stays_ignored():
    """As under nohup, or in a shell's background job."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.requested is None
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_nothing_is_installed():
    handlers = []

    def work() -> None:
        with StopSignals():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
