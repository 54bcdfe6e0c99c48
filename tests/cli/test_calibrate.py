"""`fitune calibrate`: what is measured without a GPU, what is stored, shown and said; and an interruption."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fitune import hardware
from fitune.cli import main as cli
from fitune.cli.commands import calibrate as command
from fitune.hardware import calibration
from fitune.hardware.calibration import Calibration
from fitune.speed import rates
from fitune.speed.cards import card_rates
from fitune.units import GIB, MIB
from tests.planner.case import card, machine

CARD = card(10 * GIB, name="NVIDIA GeForce RTX 3080", uuid="GPU-1", driver_version="580.1")
FOUND = Calibration(
    "cuda", CARD.name, CARD.uuid, "here", "2026-11-30T12:00:00+00:00", {"torch": "2.11.0+cu130", "driver": "580.1"},
    {"context_bytes": 500 * MIB, "workspace_bytes": 17 * MIB, "pinned_bytes": 16 * GIB, "pinned_bytes_is_limit": False},
    {"gemm_flops_per_s": {"bf16": 55e12}, "host_to_device_bytes_per_s": 25e9, "host_kernel_s": 5e-6},
    ("bf16 training steps: not run",), 41.5,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(tmp_path, monkeypatch):
    """An own folder, and small pieces of work."""
    monkeypatch.setenv("FITUNE_CALIBRATION", str(tmp_path / "stored"))
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path))
    real = rates.seconds_each
    monkeypatch.setattr(rates, "seconds_each", lambda work, wait, enough_s, batch=1: real(work, wait, 0.0, batch))
    monkeypatch.setitem(rates.GEMM_SIDE, "cpu", 128)
    monkeypatch.setitem(rates.COPY_VALUES, "cpu", 1024**2)
    monkeypatch.setitem(rates.UNPACK_SIDE, "cpu", 256)
    monkeypatch.setattr(rates.disk_read_bytes_per_s, "__defaults__", (32 * 1024**2,))


@pytest.fixture
def no_gpu(monkeypatch):
    here = dataclasses.replace(machine(), devices=())
    monkeypatch.setattr(hardware, "probe", lambda *a, **k: here)


@pytest.fixture
def one_card(monkeypatch):
    monkeypatch.setattr(hardware, "probe", lambda *a, **k: machine(CARD))
    monkeypatch.setattr(hardware, "torch_build", lambda *a: hardware.TorchBuild(True, "2.11.0+cu130", "13.0"))


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["calibrate", *arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_without_a_gpu_the_processor_is_measured_and_stored(capsys, no_gpu):
    code, out, err = run(capsys)
    assert code == 0
    assert err.startswith("note: there is no GPU here: the processor, its memory and the disk are measured\n")
    assert "measuring the processor: matrix products" in err
    for shown in ("bf16 matrix products", "fp32 matrix products", "4-bit weights unpacked", "host memory, read plus"):
        assert shown in out
    stored = calibration.load(None)
    assert stored is not None and stored.device == "cpu" and stored.versions["driver"] is None
    assert all(value > 0 for key, value in stored.rates.items() if key != "gemm_flops_per_s")
    assert set(stored.rates["gemm_flops_per_s"]) == {"bf16", "fp16", "fp32"}
    assert stored.memory == {}
    assert f"stored in {calibration.path_of(None)}" in " ".join(out.split())


def test_speed_reads_what_is_stored(capsys, no_gpu):
    run(capsys)
    stored = calibration.load(None)
    assert stored is not None
    card = card_rates("cpu", "CPU", stored.rates)
    assert card.flops["fp32"] == stored.rates["gemm_flops_per_s"]["fp32"]


def test_json_is_one_value_and_show_gives_it_again(capsys, no_gpu):
    code, out, err = run(capsys, "--json")
    assert code == 0 and "note" in err
    value = json.loads(out)
    (entry,) = value["devices"]
    assert value["gpu"] is False and entry["stale"] is None and entry["path"] == str(calibration.path_of(None))
    assert json.loads(run(capsys, "--show", "--json")[1]) == value


def test_nothing_stored(capsys, no_gpu):
    assert run(capsys, "--show") == (
        2,
        "",
        "error: no calibration of this machine's CPU\n  fix: run `fitune calibrate`\n",
    )


def test_an_interruption_changes_nothing(capsys, no_gpu, monkeypatch):
    before = dataclasses.replace(FOUND, device="cpu", name="before")
    path = calibration.store(before, None)

    def interrupted(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr(rates, "ram_bytes_per_s", interrupted)
    code, out, err = run(capsys)
    assert (code, out) == (130, "") and err.endswith("interrupted\n")
    assert calibration.load(None) == before
    assert list(path.parent.iterdir()) == [path]


def test_a_stored_card_is_shown(capsys, one_card):
    calibration.store(FOUND, CARD)
    code, out, err = run(capsys, "--show")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "NVIDIA GeForce RTX 3080, 2026-11-30 (torch 2.11.0+cu130, driver 580.1)"
    assert "driver's context and kernels, after training steps 500 MiB" in lines
    assert "host memory that can be pinned at least 16.00 GiB" in lines
    assert "bf16 matrix products 55 TFLOP/s" in lines
    assert "copy to the card, pinned 25 GB/s" in lines
    assert "one small operation launched 5 us" in lines
    assert "note: bf16 training steps: not run" in lines
    assert "stale" not in out


def test_where_it_cannot_be_stored_nothing_is_measured(capsys, no_gpu, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FITUNE_CALIBRATION", str(tmp_path / "file" / "below"))
    code, out, err = run(capsys)
    assert (code, out) == (2, "") and "cannot make the folder" in err
    assert "measuring" not in err.replace("measured", "")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (55e12, "FLOP/s", "55 TFLOP/s"),
        (20.7e9, "FLOP/s", "20.7 GFLOP/s"),
        (999.9e6, "B/s", "1 GB/s"),
        (6.38e6, " values/s", "6.38 M values/s"),
        (2.53e-6, "s", "2.53 us"),
        (1984e12, "FLOP/s", "1.98 PFLOP/s"),
    ],
)
def test_rates_read_with_a_prefix(value: float, unit: str, text: str):
    assert command.with_prefix(value, unit) == text


def test_a_stale_one_is_said(capsys, one_card, monkeypatch):
    calibration.store(FOUND, CARD)
    monkeypatch.setattr(hardware, "torch_build", lambda *a: hardware.TorchBuild(True, "2.13.0+cu130", "13.0"))
    out = run(capsys, "--show")[1]
    assert "note: stale, measured with torch 2.11.0+cu130 (now 2.13.0+cu130): run `fitune calibrate` again" in out


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("3", "error: no GPU 3\n  why: the GPUs here: 0 (NVIDIA GeForce RTX 3080)\n"),
        ("0,x", "error: no GPU x\n  why: the GPUs here: 0 (NVIDIA GeForce RTX 3080)\n"),
        (",", "error: no GPU ','\n  why: the GPUs here: 0 (NVIDIA GeForce RTX 3080)\n"),
    ],
)
def test_devices_that_are_not_there(capsys, one_card, devices, message):
    code, _, err = run(capsys, "--devices", devices)
    assert code == 2
    assert err == message + "  fix: use indices such as --devices 0, or cpu\n"


def test_which_devices_are_measured(monkeypatch):
    second = card(uuid="GPU-2", index=1)
    both = machine(CARD, second)
    assert command._choose(both, None) == [CARD, second]
    assert command._choose(both, "1,0,1") == [second, CARD]
    assert command._choose(both, "cpu") == [None]
    assert command._choose(dataclasses.replace(both, devices=()), None) == [None]
