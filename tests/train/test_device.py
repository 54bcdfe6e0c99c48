"""The cap on what torch's allocator may take on a card: the budget less what lies outside it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fitune.memory.constants import overheads
from fitune.train.device import prepare
from fitune.units import GIB, MIB

OWN = overheads("cuda", (9, 0))


@pytest.fixture
def cap(monkeypatch):
    """The last cap in bytes, on a card of 64 GiB that this machine need not have."""
    kept = SimpleNamespace(num_bytes=None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=64 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda _: None)
    monkeypatch.setattr("fitune.hardware.probe", lambda: SimpleNamespace(devices=()))

    def keep(share, index):
        kept.num_bytes = round(share * 64 * GIB)

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", keep)
    return kept


def planned(predicted, world_size=1, budget_bytes=6 * GIB):
    return SimpleNamespace(device="cuda", budget_bytes=budget_bytes, world_size=world_size, predicted=predicted)


def test_what_pinned_memory_takes_is_not_for_tensors(cap):
    prepare(planned({"pinned_bytes": 10 * GIB}), 0)
    assert cap.num_bytes == pytest.approx(6 * GIB - OWN.outside_bytes(10 * GIB), abs=1)
    prepare(planned({"pinned_bytes": None}), 0)
    assert cap.num_bytes == pytest.approx(6 * GIB - OWN.context_bytes, abs=1)


def test_of_several_cards_each_leaves_what_was_planned_for_it(cap):
    """Pinned memory is that of the whole machine there; the context is a card's, with NCCL's buffers."""
    phases = {"step": {"device": {"context": 1000 * MIB}}, "merge": {"device": {}}, "save": {}}
    prepare(planned({"pinned_bytes": 400 * GIB, "phases": phases}, world_size=8), 0)
    assert cap.num_bytes == pytest.approx(6 * GIB - 1000 * MIB, abs=1)


def test_without_a_budget_there_is_no_cap(cap):
    prepare(planned({}, budget_bytes=None), 0)
    prepare(planned({}, budget_bytes=64 * GIB), 0)
    assert cap.num_bytes is None
