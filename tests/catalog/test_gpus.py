"""Names of GPUs as people and drivers write them, and the figures behind them."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from fitune.catalog import gpus
from fitune.errors import UserError
from fitune.units import GIB

FACTS = Path(__file__).resolve().parents[2] / ".." / "shared" / "catalog"


@pytest.mark.parametrize(
    ("name", "gpu_id"),
    [
        ("rtx3080", "rtx-3080-10gb"),
        ("RTX 3080 10GB", "rtx-3080-10gb"),
        ("RTX 3080 12G", "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 3080", "rtx-3080-10gb"),
        ("3080", "rtx-3080-10gb"),
        ("4090", "rtx-4090"),
        ("RTX 4090 D", "rtx-4090d"),
        ("4070 super", "rtx-4070-super"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "rtx-3060-laptop"),
        ("rtx_3060", "rtx-3060-12gb"),
        ("t4", "t4"),
        ("Tesla T4", "t4"),
        ("h200", "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-blackwell"),
        ("AMD Instinct MI300X", "mi300x"),
        ("7900xtx", "rx-7900-xtx"),
        ("910b", "ascend-910b3"),
    ],
)
def test_finds_names_as_people_and_drivers_write_them(name, gpu_id):
    assert gpus.find(name)[0].id == gpu_id


def test_every_id_and_name_finds_its_own_row():
    for gpu in gpus.all_gpus():
        assert gpus.find(gpu.id)[0] == gpu
        assert gpus.find(gpu.name)[0] == gpu


def test_two_memory_sizes_the_smaller_is_taken_and_said():
    gpu, note = gpus.find("rtx3080")
    assert gpu.marketing_gb == 10
    assert note == "'rtx3080' exists with 10 GB and 12 GB: the smaller, GeForce RTX 3080 10GB, is assumed."
    assert gpus.find("RTX 3080 12GB")[1] is None


def test_two_forms_with_one_size_the_slower_is_taken_and_said():
    gpu, note = gpus.find("A100 80GB")
    assert gpu.id == "a100-pcie-80gb"
    assert note == "'A100 80GB' is also A100 SXM4 80GB: the slower, A100 PCIe 80GB, is assumed."


def test_a_size_of_another_card_of_the_family_is_said():
    gpu, note = gpus.find("H100 94GB")
    assert gpu.id == "h100-nvl"
    assert note == "'H100 94GB' is taken as H100 NVL 94GB, the card of that family with 94 GB."


@pytest.mark.parametrize(
    ("name", "what", "part"),
    [
        ("rtx3085", "unknown GPU 'rtx3085'", "nearest names: GeForce RTX 3080 10GB"),
        (
            "banana",
            "unknown GPU 'banana'",
            "no card of that name, nor one like it\n  fix: `fitune gpus` lists all of them",
        ),
        ("gtx 1080 ti", "unknown GPU 'gtx 1080 ti'", "`fitune gpus` lists all of them"),
        ("rtx4090 48GB", "unknown GPU 'rtx4090 48GB'", "GeForce RTX 4090 with 24 GB, not with 48 GB"),
        ("NVIDIA", "the GPU's name is empty", "name a card, for example rtx3090"),
    ],
)
def test_unknown_names_say_what_is_near(name, what, part):
    with pytest.raises(UserError) as caught:
        gpus.find(name)
    assert caught.value.what == what
    assert part in str(caught.value)
    assert caught.value.exit_code == 2


def test_parse_reads_counts_and_lists():
    assert [(gpu.id, count) for gpu, count in gpus.parse("rtx3090:2, h100")] == [("rtx-3090", 2), ("h100-sxm", 1)]
    cards, notes = gpus.parse_with_notes("rtx3080:4")
    assert (cards[0][1], len(notes)) == (4, 1)


@pytest.mark.parametrize("text", ["rtx3090:0", "rtx3090:two", "rtx3090:-1", "rtx3090:"])
def test_parse_refuses_counts_that_are_not_counts(text):
    with pytest.raises(UserError) as caught:
        gpus.parse(text)
    assert caught.value.what == f"cannot read the GPU count in {text!r}"
    assert "is not a whole number of at least 1" in caught.value.why
    assert caught.value.fix == "write NAME:COUNT, for example rtx3090:2"


def test_usable_memory_is_measured_or_lies_below_the_box():
    measured = {"t4": 14.563, "rtx-3060-12gb": 11.747, "rtx-4090": 23.527, "h200-sxm": 139.8}
    for gpu in gpus.all_gpus():
        assert 0.9 * gpu.marketing_gb * GIB <= gpu.usable_bytes < gpu.marketing_gb * GIB, gpu.id
        if gpu.id in measured:
            assert gpu.memory_basis == "cuda total"
            assert gpu.usable_bytes == int(measured[gpu.id] * GIB)


def test_margins_are_safe_where_the_truth_is_known():
    """The margins for rows without a CUDA total, tried on the rows that have one, never promise more than was seen."""
    seen = {"driver": 0, "marketing": 0}
    for gpu in gpus.all_gpus():
        if gpu.cuda_total_gib is None:
            continue
        if gpu.driver_total_mib is not None:
            assert gpu.driver_total_mib / 1024 * (1 - gpus.MARGIN_FROM_DRIVER[gpu.memory_kind]) <= gpu.cuda_total_gib
            seen["driver"] += 1
        assert gpu.marketing_gb * (1 - gpus.MARGIN_FROM_MARKETING[gpu.memory_kind]) <= gpu.cuda_total_gib, gpu.id
        seen["marketing"] += 1
    assert seen["driver"] >= 10 and seen["marketing"] >= 14


def test_link_rates_match_the_measurements_they_stand_on():
    assert gpus.find("rtx3090")[0].link_bytes_per_s == pytest.approx(25e9, rel=0.03)
    assert gpus.find("rtx4060")[0].link_bytes_per_s == pytest.approx(12.5e9, rel=0.03)
    assert gpus.find("h200")[0].link_bytes_per_s == pytest.approx(55e9, rel=0.1)
    assert gpus.find("t4")[0].link_bytes_per_s == pytest.approx(12.5e9, rel=0.03)


def test_a_card_that_is_present_is_matched_by_its_memory():
    found = gpus.find_device("NVIDIA GeForce RTX 3080", int(11.77 * GIB))
    assert found is not None and found.id == "rtx-3080-12gb"
    assert gpus.find_device("NVIDIA GeForce RTX 4090", int(47.4 * GIB)) is None
    assert gpus.find_device("Some Other Card", 8 * GIB) is None


def test_every_row_names_its_source_and_follows_the_capability_rule():
    for gpu in gpus.all_gpus():
        assert gpu.source, gpu.id
        if gpu.vendor == "NVIDIA":
            assert gpu.bf16 == gpu.flash_attention == (float(gpu.compute_capability) >= 8.0), gpu.id
            assert (gpu.bf16_tflops is not None) == gpu.bf16, gpu.id
    assert gpus.find("t4")[0].as_dict()["usable_bytes"] == int(14.563 * GIB)
    assert len({gpu.id for gpu in gpus.all_gpus()}) == len(gpus.all_gpus()) == 96


@pytest.mark.skipif(not FACTS.is_dir(), reason="the folder of collected facts is not beside this checkout")
def test_figures_agree_with_the_collected_facts():
    ours = {gpu.id: gpu for gpu in gpus.all_gpus()}
    with (FACTS / "gpus.csv").open(encoding="utf-8") as handle:
        facts = list(csv.DictReader(handle))
    assert {fact["id"] for fact in facts} == set(ours)
    for fact in facts:
        gpu, half = ours[fact["id"]], 0.5 if fact["id"] == "mi250x" else 1.0
        assert gpu.memory_gb_per_s == float(fact["memory_gbps"]) * half
        assert gpu.fp16_tflops == (float(fact["fp16_tensor_tflops_dense"] or 0) * half or None)
        if fact["memory_basis"] == "cuda total":
            assert gpu.usable_bytes == int(float(fact["memory_gib"]) * GIB)
        else:
            assert gpu.usable_bytes < float(fact["memory_gib"]) * half * GIB


def test_catalog_and_hardware_load_no_heavy_library_and_read_no_file_early():
    code = (
        "import sys, fitune.catalog, fitune.catalog.clouds, fitune.catalog.models, fitune.hardware\n"
        "from fitune.catalog import gpus, models\n"
        "assert gpus.all_gpus.cache_info().misses == models.all_models.cache_info().misses == 0\n"
        "gpus.find('rtx3080'); models.find('smollm2'); fitune.hardware.torch_build()\n"
        "heavy = {'torch', 'transformers', 'pandas', 'numpy', 'psutil', 'pynvml'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_name_that_reads_like_a_count():
    """`7900xtx` is a card, not 7900 cards `tx`."""
    assert [(gpu.id, count) for gpu, count in gpus.parse("7900xtx")] == [(gpus.find("7900 XTX")[0].id, 1)]
    assert gpus.parse("2x7900xtx") == [(gpus.find("7900xtx")[0], 2)]


def test_counts_may_stand_in_front():
    for text in ("4x4090", "4 x RTX 4090", "rtx4090:4"):
        ((gpu, count),) = gpus.parse(text)
        assert (gpu.id, count) == ("rtx-4090", 4), text
    assert [(gpu.id, count) for gpu, count in gpus.parse("2xrtx3090,rtx4070")] == [("rtx-3090", 2), ("rtx-4070", 1)]
    assert gpus.parse("8xA100-40G")[0][1] == 8
