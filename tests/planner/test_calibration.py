"""Plans for this machine's own card use its calibration; plans for a card of the catalog do not."""

from __future__ import annotations

import pytest

from fitune import hardware
from fitune import recipe as recipes
from fitune.catalog import gpus
from fitune.hardware import calibration
from fitune.hardware.calibration import Calibration
from fitune.memory.constants import overheads
from fitune.planner.target import choose_target
from fitune.units import GIB, MIB
from tests.planner.case import card, machine

OWN = card(10 * GIB, name="NVIDIA GeForce RTX 3080", uuid="GPU-1", driver_version="580.1")
RATES = {"host_to_device_bytes_per_s": 20e9}


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Calibrations of the card and of the processor."""
    monkeypatch.setenv("FITUNE_CALIBRATION", str(tmp_path))
    versions = {"torch": hardware.torch_build().version, "driver": "580.1"}
    memory = {"context_bytes": 412 * MIB, "workspace_bytes": 18 * MIB}
    found = Calibration("cuda", OWN.name, OWN.uuid, "here", "2026-11-30", versions, memory, RATES)
    calibration.store(found, OWN)
    calibration.store(Calibration("cpu", "CPU", None, "here", "2026-11-30", versions, {}, {"ram_bytes_per_s": 1}), None)
    return found


def recipe(**values):
    return recipes.build({"model": "m", **values})


def test_the_own_card(stored):
    target = choose_target(recipe(), machine(OWN))
    assert (target.overheads.context_bytes, target.overheads.workspace_bytes) == (412 * MIB, 18 * MIB)
    assert target.calibration is not None and target.calibration.rates == RATES
    assert not target.notes


def test_another_card_of_this_machine(stored):
    target = choose_target(recipe(), machine(card(uuid="GPU-2")))
    assert target.calibration is None and target.overheads == overheads("cuda", (8, 6))


def test_a_card_one_does_not_have(stored):
    """Also where it is the model that is in this machine."""
    virtual = hardware.virtual(gpus.find("rtx3080 10gb")[0])
    target = choose_target(recipe(gpu="rtx3080 10gb"), virtual)
    assert target.calibration is None and target.overheads == overheads("cuda", (8, 6))


def test_the_processor(stored):
    target = choose_target(recipe(devices="cpu"), machine(OWN))
    assert target.calibration is not None and target.calibration.rates == {"ram_bytes_per_s": 1}
    assert target.overheads.context_bytes == 0


def test_a_stale_one_is_used_and_said(stored):
    newer = card(10 * GIB, name=OWN.name, uuid="GPU-1", driver_version="600.5")
    target = choose_target(recipe(), machine(newer))
    assert target.overheads.context_bytes == 412 * MIB
    (note,) = target.notes
    assert "is stale, measured with driver 580.1 (now 600.5): run `fitune calibrate` again" in note
