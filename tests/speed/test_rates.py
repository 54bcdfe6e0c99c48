"""What the measuring functions count, with a clock that is not real, and that they run on this processor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fitune.speed import link, rates


@pytest.fixture
def one_second(monkeypatch):
    """Every piece of work is done once and takes one second; the batches asked for are returned."""
    batches = []

    def seconds_each(work, wait, enough_s, batch=1):
        work()
        wait()
        batches.append(batch)
        return 1.0

    monkeypatch.setattr(rates, "seconds_each", seconds_each)
    monkeypatch.setitem(rates.GEMM_SIDE, "cpu", 64)
    monkeypatch.setitem(rates.COPY_VALUES, "cpu", 1000)
    return batches


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_product_counts_two_operations_per_value(one_second, precision):
    assert rates.gemm_flops_per_s("cpu", precision) == 2 * 64**3


def test_a_copy_counts_what_is_read_and_written(one_second):
    assert rates.memory_bytes_per_s("cpu") == 2 * 2 * 1000
    assert rates.ram_bytes_per_s() == 2 * 2 * 1000


def test_unpacking_counts_values(one_second, monkeypatch):
    monkeypatch.setitem(rates.UNPACK_SIDE, "cpu", 128)
    assert rates.dequantise_values_per_s("cpu") == 128 * 128


def test_launches_are_counted_in_one_row(one_second):
    assert rates.host_kernel_s("cpu") == 1.0
    assert one_second == [rates.SMALL_OPERATIONS]


def test_a_slow_product_is_measured_smaller(one_second, monkeypatch):
    monkeypatch.setitem(rates.GEMM_SIDE, "cpu", 1024)
    monkeypatch.setattr(rates, "_product_s", lambda device, dtype, side: 1.0 if side > 512 else 0.1)
    assert rates.gemm_flops_per_s("cpu", "fp32") == 2 * 512**3


def test_the_median_of_batches_after_a_warm_up(monkeypatch):
    """Batches of two take 9 (warm-up), 1, 5, 1.2 seconds: the middle one, per piece of work."""
    clock = iter([0.0, 9.0, 10.0, 11.0, 20.0, 25.0, 30.0, 31.2])
    monkeypatch.setattr(link.time, "perf_counter", lambda: next(clock))
    done = []
    assert link.seconds_each(lambda: done.append(1), lambda: None, 7.0, batch=2) == pytest.approx(0.6)
    assert len(done) == 8


def test_a_file_is_read_from_the_disk(tmp_path):
    if not hasattr(os, "posix_fadvise"):
        assert rates.disk_read_bytes_per_s(tmp_path) is None
        return
    measured = rates.disk_read_bytes_per_s(tmp_path, num_bytes=32 * 1024**2)
    assert measured is not None and 1e6 < measured < 1e12
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_full_disk_is_not_filled_further(tmp_path, monkeypatch):
    full = os.statvfs_result((4096, 4096, 10, 10, 10, 1, 1, 1, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda place: full)
    assert rates.disk_read_bytes_per_s(tmp_path) is None


def test_no_place_to_write_is_an_os_error(tmp_path):
    with pytest.raises(OSError):
        rates.disk_read_bytes_per_s(Path(tmp_path) / "missing")


@pytest.mark.gpu
def test_on_a_card():
    torch.cuda.empty_cache()
    assert link.copy_bytes_per_s(0, to_device=True, pinned=True, enough_s=0.1) > 1e9
    assert link.copy_bytes_per_s(0, to_device=False, pinned=False, enough_s=0.1) > 2e8
    assert (rates.gemm_flops_per_s("cuda", "fp16", enough_s=0.1) or 0) > 1e12
    assert rates.memory_bytes_per_s("cuda", enough_s=0.1) > 5e10
    assert 1e-6 < rates.host_kernel_s("cuda", enough_s=0.05) < 1e-3
