"""What an H200 recorded of streamed training: what was asked of it and came true, and the predictions beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

GIB = 2**30
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ALL = {
    record["name"]: record
    for name in ("stream-h200-2026-12-01.json", "stream-h200-2026-12-01b.json")
    for record in json.loads((RESULTS / name).read_text(encoding="utf-8"))
}
RECORDS = {name: record for name, record in ALL.items() if "predicted" in record}
# Attention's copies of some heads' output were not told (LOG), and two cases were predicted from scripts of the engine
# before, whose backward pass held more.
OFF = {
    "8b-nf4-1x65536-cap8": -0.026, "8b-nf4-1x204800-cap24-4-layers": -0.022, "8b-nf4-1x2048-ring-25gb-s": 0.041,
    "8b-bf16-4x2048-ring-12gb-s": 0.076,
}  # fmt: skip


def step_bytes(side: dict) -> int:
    return side["phases"].get("step", side["phases"]["first_step"])["peak_allocated_bytes"]


def peak(name: str) -> float:
    """While it trains. (Seeded embeddings are made on the card first: nothing but these cases does that.)"""
    return step_bytes(RECORDS[name]["measured"]) / GIB


def of_resident(name: str) -> float:
    return RECORDS[name]["beside"]["tokens_per_s_ratio"]


def test_nf4_weights():
    """One row below 0.9 GiB and below 2 GiB, 8,192 tokens a step below 2 GiB."""
    assert peak("8b-nf4-1x2048-lean-host") <= 0.9 and of_resident("8b-nf4-1x2048-lean-host") >= 0.75
    assert peak("8b-nf4-1x2048-lean") <= 2 and of_resident("8b-nf4-1x2048-lean") >= 0.9
    assert peak("8b-nf4-4x2048-lean-host") <= 2 and of_resident("8b-nf4-4x2048-lean-host") >= 0.95


@pytest.mark.parametrize(("name", "ratio"), [("8b-bf16-4x2048-chosen-cap10", 1.0), ("8b-bf16-4x2048-lean-cap4", 0.95)])
def test_16_bit_weights_below_a_cap_are_as_fast_as_nf4_on_the_card(name, ratio):
    record = RECORDS[name]
    assert record["measured"]["device_bytes"] <= record["cap_bytes"] and of_resident(name) >= ratio


def test_smallest_peak_of_16_bit_weights():
    assert peak("8b-bf16-1x2048-least") <= 1.5


def test_70b_is_bound_by_what_its_layers_compute():
    two, ten = (RECORDS[f"70b-nf4-{n}-layers-resident"]["measured"]["step_s"] for n in (2, 10))
    layer_s = (ten - two) / 8
    computed_s = two + 78 * layer_s
    assert peak("70b-nf4-1x4096-least") <= 3
    assert computed_s / RECORDS["70b-nf4-1x4096-least"]["measured"]["step_s"] >= 0.9


def test_mixtures_of_experts():
    assert peak("qwen3-30b-a3b-nf4-1x2048-attention") <= 4
    experts = RECORDS["qwen3-30b-a3b-nf4-1x2048-experts"]  # gate and up are one tensor here, with one A
    assert experts["num_trained"] > 6e8
    assert RECORDS["gpt-oss-120b-nf4-1x2048-cap24"]["measured"]["device_bytes"] <= 24 * GIB


def test_full_fine_tuning():
    record = RECORDS["8b-full-16x2048-streamed-8bit"]
    assert record["measured"]["peak_allocated_bytes"] <= 6 * GIB
    assert record["measured"]["host_bytes"] <= 100 * GIB and of_resident(record["name"]) >= 0.6
    assert of_resident("3b-full-16x2048-host-fp32") >= 0.6


@pytest.mark.parametrize("name", ["8b-nf4-1x65536-cap8", "8b-nf4-1x204800-cap24-4-layers"])
def test_long_rows_below_a_cap(name):
    assert RECORDS[name]["measured"]["device_bytes"] <= RECORDS[name]["cap_bytes"]


@pytest.mark.parametrize("name", ["equality", "equality-qwen3", "equality-gemma3"])
def test_streamed_is_resident_to_the_bit(name):
    differences = ALL[name]["differences"]
    same = {way for way, found in differences.items() if found["bit_identical"]}
    assert len(differences) == 14
    assert differences.keys() - same == {"nf4, head in tiles", "bf16, head in tiles"}  # adds up in another order
    assert all(found["largest_relative"] < 0.016 for found in differences.values())  # two runs' noise is 0.8 %


def test_streamed_experts_are_within_two_runs_own_noise():
    differences = ALL["equality-moe"]["differences"]
    for base in ("nf4", "bf16"):
        own = differences[f"{base}, twice the same"]["largest_relative"]
        assert all(f["largest_relative"] < 1.2 * own for way, f in differences.items() if way.startswith(base))


def test_from_the_disk_with_8_gib_of_ram():
    trains, killed = ALL["8b-bf16-1x2048-disk-ram8"], ALL["8b-bf16-1x2048-disk-ram8-killed"]
    assert trains["ram_left"] == killed["ram_left"] == "control group of 8.0 GiB"
    assert trains["measured"]["host_bytes"] < 8 * GIB
    assert all(killed["bit_identical"].values()) and killed["killed"]["resumed_from"] == 1


@pytest.mark.parametrize("name", RECORDS)
def test_peaks_were_predicted_beforehand(name):
    """Of a training step; making seeded weights is left out, which nothing but these cases does."""
    record = RECORDS[name]
    assert record["predicted_commit"], "predicted after the run"
    off = step_bytes(record["predicted"]) / step_bytes(record["measured"]) - 1
    if name in OFF:
        assert off == pytest.approx(OFF[name], abs=0.002)
    else:
        assert -0.002 <= off <= 0.01
