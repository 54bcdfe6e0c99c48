"""Machines that one does not have, from the catalog."""

from __future__ import annotations

import pytest

from fitune import hardware
from fitune.catalog import gpus
from fitune.units import GIB


def test_one_card_gets_twice_its_memory_as_ram_and_says_so():
    machine = hardware.virtual(gpus.find("RTX 3080 10GB")[0])
    assert machine.ram_total_bytes == 20 * GIB and machine.pinned_limit_bytes == 10 * GIB
    device = machine.devices[0]
    assert device.usable_bytes == device.free_bytes == gpus.find("RTX 3080 10GB")[0].usable_bytes
    assert device.bf16 and device.link_bytes_per_s == pytest.approx(24.9e9, rel=0.01)
    assert machine.assumptions == (
        "assumed: 1 x GeForce RTX 3080 10GB (9.70 GiB usable), 20.00 GiB RAM, 10.00 GiB of it pinnable, "
        "PCIe 4 x16 at 24.9 GB/s"
    )


def test_a_small_card_gets_sixteen_gib():
    assert hardware.virtual(gpus.find("rtx3050ti laptop")[0]).ram_total_bytes == 16 * GIB


def test_ram_as_given_and_several_cards():
    machine = hardware.virtual(gpus.find("h200")[0], 2, ram_bytes=256 * GIB)
    assert [device.index for device in machine.devices] == [0, 1]
    assert (machine.ram_total_bytes, machine.ram_limit_source) == (256 * GIB, "given")
    assert "2 x H200 SXM 141GB (139.80 GiB usable each), 256.00 GiB RAM (as given)" in machine.assumptions


def test_different_cards_together():
    machine = hardware.virtual_mixed(gpus.parse("rtx3090:2,t4"))
    assert [device.bf16 for device in machine.devices] == [True, True, False]
    assert machine.ram_total_bytes == 2 * (24 + 24 + 16) * GIB
    assert "2 x GeForce RTX 3090 + 1 x Tesla T4 (23.68 GiB, 14.56 GiB usable each)" in machine.assumptions


def test_no_card_is_refused():
    with pytest.raises(ValueError, match="needs at least one card"):
        hardware.virtual(gpus.find("t4")[0], 0)
