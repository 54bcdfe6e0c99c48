"""The order of measurements on a card, without one; failures in a person's words; the small model, really trained."""

from __future__ import annotations

import math

import pytest
import torch

from fitune.errors import UserError
from fitune.hardware import calibration
from fitune.memory import measure
from fitune.speed import link, rates
from fitune.train import calibrate as module
from fitune.train.tiny import tiny_engine, tiny_step
from fitune.units import GIB, MIB
from tests.planner.case import card, machine


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FITUNE_CALIBRATION", str(tmp_path))


CARD = card(10 * GIB, name="Card", uuid="GPU-1", driver_version="580.1")


@pytest.fixture
def fake_card(monkeypatch):
    """A card on which every measurement is a number; `log` is the order in which they were taken."""
    log: list[str] = []

    def said(name, value):
        def call(*arguments, **more):
            log.append(name)
            return value

        return call

    for name, value in {"is_initialized": False, "set_device": None, "empty_cache": None,
                        "get_device_capability": (8, 6), "max_memory_reserved": 0}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *a, _value=value: _value)
    monkeypatch.setattr(torch, "zeros", said("first tensor", None))
    outside = iter([300 * MIB, 480 * MIB])
    monkeypatch.setattr(measure, "outside_bytes", lambda *a: log.append("outside") or next(outside))
    monkeypatch.setattr(measure, "free_bytes", said("free", 9 * GIB))
    monkeypatch.setattr(measure, "kept_bytes", said("kept", 17 * MIB))
    monkeypatch.setattr(measure, "probe_pinned", said("pinned", measure.Pinned(GIB, True)))
    monkeypatch.setattr(module, "_run_steps", said("steps", None))
    monkeypatch.setattr(module.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(link, "copy_bytes_per_s", said("copy", 20e9))
    for name, value in {"gemm_flops_per_s": 1e12, "memory_bytes_per_s": 5e11, "ram_bytes_per_s": 2e10,
                        "host_kernel_s": 5e-6, "dequantise_values_per_s": 1e11,
                        "disk_read_bytes_per_s": None}.items():  # fmt: skip
        monkeypatch.setattr(rates, name, said(name, value))
    return log


def test_a_card_is_measured_context_first(fake_card):
    told: list[str] = []
    found = module.calibrate(CARD, machine(CARD), told.append)
    assert fake_card[:6] == ["free", "first tensor", "outside", "steps", "kept", "outside"]
    assert found.memory == {
        "context_at_start_bytes": 300 * MIB, "context_bytes": 480 * MIB, "workspace_bytes": 17 * MIB,
        "pinned_bytes": GIB, "pinned_bytes_is_limit": True,
    }  # fmt: skip
    links = {f"{kind}{way}_bytes_per_s" for kind in ("", "pageable_") for way in ("host_to_device", "device_to_host")}
    assert links < set(found.rates)
    assert found.rates["gemm_flops_per_s"] == {"bf16": 1e12, "fp16": 1e12, "fp32": 1e12}
    assert (found.name, found.uuid, found.versions["driver"]) == ("Card", "GPU-1", "580.1")
    assert told[0] == "the driver's context" and told[-1] == "the disk"
    assert found.notes == ("disk: not measured, too little room, or the system cannot drop a file from its cache",)


def test_what_else_is_at_work_is_a_note():
    """Figures of a busy machine are too low, and plans would be made from them."""
    cores = module.os.cpu_count()
    (note,) = module.busy(None, load=3.0 * cores)
    assert note.startswith(f"the processor was busy before (load {3.0 * cores:.1f} on {cores} cores): measure again")
    assert module.busy(None, load=0.1 * cores) == []
    (note,) = module.busy(card(10 * GIB, free_bytes=6 * GIB), load=0.0)
    assert note == "4.00 GiB of the card were in use before: measure again when it is idle"
    assert module.busy(CARD, load=0.0) == []


def test_a_process_that_has_used_the_card_measures_no_context(fake_card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda index: MIB)
    found = module.calibrate(CARD, machine(CARD), lambda what: None)
    assert "context_bytes" not in found.memory and "context_at_start_bytes" not in found.memory
    assert "memory of the context: not measured, this process had used CUDA before" in found.notes


def test_no_bf16_products_are_a_note(fake_card, monkeypatch):
    monkeypatch.setattr(rates, "gemm_flops_per_s", lambda device, precision: None if precision == "bf16" else 1e12)
    found = module.calibrate(CARD, machine(CARD), lambda what: None)
    assert set(found.rates["gemm_flops_per_s"]) == {"fp16", "fp32"}
    assert "bf16 products: not measured, this card has none" in found.notes


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "its memory ran out: other processes use the card"),
        (RuntimeError("CUDA error: device-side assert\nmore"), "CUDA error: device-side assert"),
    ],
)
def test_a_failing_card_is_said(fake_card, monkeypatch, error, why):
    def fail(*a, **k):
        raise error

    monkeypatch.setattr(link, "copy_bytes_per_s", fail)
    with pytest.raises(UserError, match="cannot calibrate Card") as raised:
        module.calibrate(CARD, machine(CARD), lambda what: None)
    assert raised.value.why == why
    assert not calibration.path_of(CARD).exists()


def test_a_processors_name_is_its_own(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: AMD EPYC 9B14\nflags : fpu\n")
    assert module.processor_name(tmp_path / "cpuinfo") == "AMD EPYC 9B14"
    assert module.processor_name(tmp_path / "missing")


@pytest.mark.parametrize("base_format", ["nf4", "fp32"])
def test_the_small_model_really_trains(base_format):
    """Half of the layers recompute, two micro-batches, and the optimizer moves the adapters."""
    engine = tiny_engine(None, base_format=base_format, hidden_size=128, vocab_size=256, seq_len=16)
    plan = engine.plan
    assert (plan.num_layers, plan.recompute_layers, plan.batch, plan.micro_batch) == (2, 1, 2, 1)
    assert plan.base_format == base_format
    before = {name: tensor.clone() for name, tensor in engine.trained_tensors().items()}
    losses = [tiny_step(engine, step).loss for step in range(2)]
    assert all(math.isfinite(loss) for loss in losses)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in engine.trained_tensors().items())


@pytest.mark.gpu
def test_on_a_card():
    """Real: the context is some hundred MiB, and the library's workspaces are there."""
    from fitune import hardware

    here = hardware.probe()
    found = module.calibrate(here.devices[0], here, lambda what: None)
    assert found.memory["workspace_bytes"] > 8 * MIB
    assert found.rates["host_to_device_bytes_per_s"] > 1e9
    assert found.seconds < 120
