"""Calibrations as files: where they are, what is written, what is refused, when they are stale."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fitune.errors import UserError
from fitune.hardware import Device, calibration
from fitune.hardware.calibration import Calibration
from fitune.units import GIB, MIB

CARD = Device(0, "NVIDIA GeForce RTX 3080", "NVIDIA", 10 * GIB, 9 * GIB, driver_version="580.1", uuid="GPU-aaaa1111")
FOUND = Calibration(
    "cuda", CARD.name, CARD.uuid, "here", "2026-11-30T12:00:00+00:00",
    {"fitune": "0.1.0", "torch": "2.11.0+cu130", "driver": "580.1", "cuda": "13.0", "bitsandbytes": None},
    {"context_bytes": 500 * MIB}, {"host_to_device_bytes_per_s": 25e9}, ("a note",), 41.5,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FITUNE_CALIBRATION", str(tmp_path / "calibrations"))


def test_what_is_stored_is_what_is_loaded():
    path = calibration.store(FOUND, CARD)
    assert path.name == "GPU-aaaa1111.json" and calibration.load(CARD) == FOUND
    assert json.loads(path.read_text())["memory"] == {"context_bytes": 500 * MIB}


def test_cards_and_the_processor_are_told_apart():
    calibration.store(FOUND, CARD)
    assert calibration.load(None) is None
    assert calibration.load(dataclasses.replace(CARD, uuid="GPU-bbbb2222")) is None


def test_a_card_without_uuid_is_known_by_name_and_place(monkeypatch):
    monkeypatch.setattr(calibration.platform_module, "node", lambda: "my host")
    path = calibration.path_of(dataclasses.replace(CARD, uuid=None))
    assert path.name == "NVIDIA-GeForce-RTX-3080-0-my-host.json"
    assert calibration.path_of(None).name == "cpu-my-host.json"


def test_the_folder_is_the_platforms(monkeypatch):
    home = Path("/users-home")
    monkeypatch.setattr(calibration.Path, "home", lambda: home)
    assert calibration.folder({}, "linux") == home / ".config/fitune/calibration"
    assert calibration.folder({"XDG_CONFIG_HOME": "/c"}, "linux") == Path("/c/fitune/calibration")
    assert calibration.folder({}, "darwin") == home / "Library/Application Support/fitune/calibration"
    assert calibration.folder({"LOCALAPPDATA": "/l"}, "win32") == Path("/l/fitune/calibration")
    assert calibration.folder({"FITUNE_CALIBRATION": "/x", "XDG_CONFIG_HOME": "/c"}, "linux") == Path("/x")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not JSON"),
        ("[]", "it is of another version of fitune"),
        ('{"format": 99}', "it is of another version of fitune"),
        ('{"format": 1, "device": "cuda"}', "a field is missing or unknown"),
        ('{"format": 1, "rates": {"gemm_flops_per_s": "fast"}}', "gemm_flops_per_s is not an object"),
        ('{"format": 1, "rates": {"gemm_flops_per_s": {"bf16": "fast"}}}', "bf16 is 'fast', which is no measured"),
        ('{"format": 1, "rates": {"ram_bytes_per_s": -5}}', "ram_bytes_per_s is -5, which is no measured figure"),
        ('{"format": 1, "memory": [1]}', "memory is not an object"),
        ('{"format": 1, "date": 20261130}', "its name or date is not text"),
    ],
)
def test_a_damaged_file_is_refused_and_passed_over_in_planning(text, why):
    path = calibration.store(FOUND, CARD)
    path.write_text(text)
    with pytest.raises(UserError, match=why) as error:
        calibration.load(CARD)
    assert error.value.what == f"cannot use the calibration {path}"
    assert error.value.fix == "run `fitune calibrate` again"
    found, note = calibration.for_planning(CARD, "2.11.0+cu130")
    assert found is None and why in (note or "")


def test_a_folder_that_cannot_be_made_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FITUNE_CALIBRATION", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="cannot make the folder .*below") as error:
        calibration.store(FOUND, CARD)
    assert "FITUNE_CALIBRATION" in error.value.fix


def test_a_folder_that_cannot_be_written_is_said_before_measuring(tmp_path, monkeypatch):
    place = tmp_path / "calibrations"
    monkeypatch.setattr(calibration.os, "access", lambda path, mode: path != place)
    with pytest.raises(UserError, match="cannot write in .*calibrations"):
        calibration.check_folder()


def test_stale_after_a_new_driver_or_torch():
    calibration.store(FOUND, CARD)
    assert calibration.for_planning(CARD, "2.11.0+cu130") == (FOUND, None)
    newer = dataclasses.replace(CARD, driver_version="590.2")
    found, note = calibration.for_planning(newer, "2.13.0+cu130")
    assert found == FOUND, "the card's own older figures are still nearer than another card's"
    assert note == (
        "the calibration of NVIDIA GeForce RTX 3080 (2026-11-30) is stale, measured with driver 580.1 (now 590.2) and "
        "torch 2.11.0+cu130 (now 2.13.0+cu130): run `fitune calibrate` again"
    )
    assert calibration.for_planning(dataclasses.replace(CARD, driver_version=None), None) == (FOUND, None)


def test_none_there_is_no_note():
    assert calibration.for_planning(CARD, "2.11.0") == (None, None)
