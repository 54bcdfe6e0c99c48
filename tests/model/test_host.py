"""Host memory of exact size: registered with the driver where it lets us, there in any case."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from fitune.model import host
from fitune.model.host import HostBuffer


class FakeDriver:
    """`cudaHostRegister` with a cap on what may be pinned in all."""

    def __init__(self, cap_bytes):
        self.cap_bytes, self.held = cap_bytes, {}

    def cudaHostRegister(self, address, num_bytes, flags):
        if address in self.held:
            return 712
        if sum(self.held.values()) + num_bytes > self.cap_bytes:
            return 2
        self.held[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        return 0 if self.held.pop(address, None) else 713


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver(cap_bytes=100_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    forgotten = []
    monkeypatch.setattr(host, "_forget_last_error", lambda: forgotten.append(True))
    fake.forgotten = forgotten
    return fake


@pytest.mark.parametrize("num_bytes", [1, 513, 70_001])
def test_exact_size(driver, num_bytes):
    """Not rounded up to a power of two, and on pages of its own."""
    buffer = HostBuffer(num_bytes, pin=True)
    assert buffer.tensor.numel() == num_bytes == buffer.num_bytes
    assert buffer.pinned and list(driver.held.values()) == [num_bytes]
    assert buffer.tensor.data_ptr() % mmap.PAGESIZE == 0
    buffer.tensor.fill_(7)
    assert int(buffer.tensor.sum()) == 7 * num_bytes


def test_what_the_driver_refuses_is_there_unpinned(driver):
    """WSL 2 and some containers: the first fits, the second does not; torch must not report the refusal later."""
    first, second = HostBuffer(60_000, pin=True), HostBuffer(60_000, pin=True)
    assert (first.pinned, second.pinned) == (True, False)
    assert driver.forgotten == [True]
    second.tensor.fill_(1)


def test_memory_is_unregistered_when_it_is_let_go(driver):
    buffer = HostBuffer(60_000, pin=True)
    view = buffer.tensor[:10]
    del buffer
    gc.collect()
    assert driver.held == {}
    view.fill_(1)  # the memory itself lives as long as a view
    assert HostBuffer(60_000, pin=True).pinned


def test_unpinned_and_empty(driver):
    assert not HostBuffer(10, pin=False).pinned
    assert not HostBuffer(0, pin=True).pinned
    assert driver.held == {}


def test_without_cuda():
    assert not HostBuffer(10, pin=True).pinned or torch.cuda.is_available()
