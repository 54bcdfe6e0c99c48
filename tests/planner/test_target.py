"""Which device a plan is for, and how much of its memory."""

from __future__ import annotations

import pytest

from fitune.catalog import gpus
from fitune.errors import UserError
from fitune.planner import target as target_module
from fitune.planner.sentences import translated
from fitune.planner.target import RAM_SHARE, choose_target, notes_on
from tests.planner.case import GIB, TURING, card, machine, recipe

TWO = machine(card(index=0, name="First"), card(8 * GIB, index=1, name="Second"))


def test_without_a_card_the_processor():
    target = choose_target(recipe(), machine(ram_bytes=16 * GIB))
    assert (target.device, target.name, target.compute_capability) == ("cpu", "CPU", None)
    assert target.budget_bytes == int(16 * GIB * RAM_SHARE)
    assert target.budget_reason == "90% of the available RAM"
    assert not target.flash


@pytest.mark.parametrize(("ram", "budget", "reason"), [(4, 4 * GIB, "--ram"), (100, int(16 * GIB * 0.9), "90% of")])
def test_ram_is_a_cap(ram, budget, reason):
    target = choose_target(recipe(ram=ram), machine(ram_bytes=16 * GIB))
    assert target.budget_bytes == budget and target.budget_reason.startswith(reason)


def test_the_processor_when_asked_for():
    assert choose_target(recipe(devices="cpu"), TWO).device == "cpu"
    assert choose_target(recipe(devices=" CPU "), TWO).device == "cpu"


def test_a_card_is_taken_before_the_processor():
    target = choose_target(recipe(), machine(card(10 * GIB, name="RTX 3080")))
    assert (target.device, target.name, target.budget_bytes) == ("cuda", "RTX 3080", 10 * GIB)
    assert target.compute_capability == (8, 6) and target.bf16 and target.flash
    assert target.budget_reason == "what is free on RTX 3080"


def test_of_several_cards_the_one_with_the_most_free_memory():
    target = choose_target(recipe(parallel="none"), TWO)
    assert (target.name, target.index) == ("First", 0)
    assert target.notes == ("2 GPUs are there; one of them is used (GPU 0, which has the most free memory)",)
    assert choose_target(recipe(), TWO).notes == (), "all of them are used: `planner.layouts` says how"
    busy = machine(card(index=0, free_bytes=GIB), card(8 * GIB, index=1, name="Second"))
    target = choose_target(recipe(parallel="none"), busy)
    assert (target.name, target.index, target.budget_bytes) == ("Second", 1, 8 * GIB)
    assert "(GPU 1, which has the most free memory)" in target.notes[0]
    alike = machine(card(index=0), card(index=1))
    assert choose_target(recipe(), alike).index == 0


@pytest.mark.parametrize("wanted", ["1", "cuda:1", " CUDA:1 "])
def test_a_card_by_its_index(wanted):
    target = choose_target(recipe(devices=wanted), TWO)
    assert (target.name, target.budget_bytes, target.notes) == ("Second", 8 * GIB, ())


def test_the_first_of_several_that_were_named():
    """What a plan for one GPU is for (a model's answers, say); all of them are `planner.layouts`'."""
    assert choose_target(recipe(devices="1,0"), TWO).name == "Second"


@pytest.mark.parametrize("wanted", ["2", "gpu"])
def test_a_card_that_is_not_there(wanted):
    with pytest.raises(UserError) as caught:
        choose_target(recipe(devices=wanted), TWO)
    assert caught.value.what == f"no GPU {wanted}"
    assert caught.value.why == "the GPUs here are 0 (First), 1 (Second)"
    assert caught.value.fix == "use one index, such as --devices 0"


def test_a_card_where_there_is_none():
    with pytest.raises(UserError) as caught:
        choose_target(recipe(devices="0"), machine())
    assert (caught.value.what, caught.value.exit_code) == ("no GPU 0", 2)
    assert "use --devices cpu, or plan for a card with --gpu NAME" in str(caught.value)


def test_memory_of_other_processes_is_not_counted_on():
    """What is free now, and never what the driver keeps."""
    busy = card(10 * GIB, reserved_bytes=GIB // 4, free_bytes=6 * GIB, used_by_others_bytes=3 * GIB, name="Busy")
    target = choose_target(recipe(), machine(busy))
    assert target.budget_bytes == 6 * GIB
    assert target.budget_reason == "what is free on Busy (3.00 GiB are used by other processes)"
    idle = card(10 * GIB, reserved_bytes=GIB // 4, free_bytes=10 * GIB)
    assert choose_target(recipe(), machine(idle)).budget_bytes == 10 * GIB - GIB // 4


def test_a_card_one_does_not_have_is_empty():
    virtual = machine(card(10 * GIB, free_bytes=0, name="Wish"), assumptions="assumed: 1 x Wish")
    target = choose_target(recipe(), virtual)
    assert (target.budget_bytes, target.budget_reason) == (10 * GIB, "all of a Wish")


@pytest.mark.parametrize(("vram", "budget"), [(6, 6 * GIB), ("6GiB", 6 * GIB), (11, 10 * GIB)])
def test_vram_is_a_cap(vram, budget):
    target = choose_target(recipe(vram=vram), machine(card(10 * GIB)))
    assert target.budget_bytes == budget
    assert (target.budget_reason == "--vram") == (budget == 6 * GIB)


@pytest.mark.parametrize(
    ("device", "has"),
    [(card(10 * GIB, name="X"), "10.00 GiB"), (card(10 * GIB, name="X", free_bytes=GIB), "1.00 GiB free")],
)
def test_a_cap_above_what_there_is_is_said(device, has):
    target = choose_target(recipe(vram=11), machine(device))
    assert target.notes == (f"--vram 11 changes nothing: X has only {has}",)
    assert choose_target(recipe(vram=0.5), machine(device)).notes == ()


def test_a_cap_above_the_ram_is_said():
    (note,) = choose_target(recipe(ram=100), machine(ram_bytes=16 * GIB)).notes
    assert note == "--ram 100 changes nothing: 14.40 GiB are 90% of the available RAM"
    assert choose_target(recipe(ram=4), machine(ram_bytes=16 * GIB)).notes == ()


def test_ram_beside_a_card():
    free = choose_target(recipe(), machine(card(), ram_bytes=32 * GIB))
    assert (free.ram_bytes, free.pinned_bytes) == (int(32 * GIB * RAM_SHARE), 16 * GIB)
    capped = choose_target(recipe(ram=4), machine(card(), ram_bytes=32 * GIB))
    assert (capped.ram_bytes, capped.pinned_bytes, capped.notes) == (4 * GIB, 4 * GIB, ())
    (note,) = choose_target(recipe(ram=400), machine(card(), ram_bytes=32 * GIB)).notes
    assert note == "--ram 400 changes nothing: 32.00 GiB of RAM are available"


def test_what_an_older_card_cannot_do():
    target = choose_target(recipe(), machine(card(**TURING)))
    assert (target.bf16, target.flash, target.compute_capability) == (False, False, (7, 5))


def test_a_card_without_a_compute_capability():
    target = choose_target(recipe(), machine(card(vendor="AMD", compute_capability="gfx942")))
    assert target.compute_capability is None


@pytest.mark.parametrize(
    ("listed", "has"),
    [("fpu avx512f avx512_bf16", True), ("fpu amx_tile amx_bf16", True), ("fpu avx2 avx512f", False)],
)
def test_what_linux_lists_of_the_processor(listed, has, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: A bf16 CPU\nflags\t\t: {listed}\nbugs\t: none\n")
    monkeypatch.setattr(target_module, "CPU_INFO", tmp_path / "cpuinfo")
    assert target_module.processor_has_bf16() is has


def test_elsewhere_torch_knows_the_processor(tmp_path, monkeypatch):
    """And says the same of this one."""
    here = target_module.processor_has_bf16()
    monkeypatch.setattr(target_module, "CPU_INFO", tmp_path / "none")
    assert target_module.processor_has_bf16() is here


def test_what_runs_on_amd_is_said_plainly():
    """gfx1100: torch's ROCm build has flash attention only behind a switch; an MI300X needs none."""
    notes = [" ".join(notes_on(gpus.find(name)[0])) for name in ("7900xtx", "mi300x", "rtx3080")]
    assert "ROCm build" in notes[0] and "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1" in notes[0]
    assert "ROCm build" in notes[1] and "EXPERIMENTAL" not in notes[1] and notes[2] == ""
    for note in notes_on(gpus.find("7900xtx")[0]):
        assert translated(note, "zh") != note
