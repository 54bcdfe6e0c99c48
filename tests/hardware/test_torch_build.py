"""The installed torch is recognised without importing it, and refused where it cannot use the cards."""

from __future__ import annotations

import dataclasses

import pytest

from fitune import hardware
from fitune.catalog import gpus
from fitune.errors import UserError
from fitune.hardware import TorchBuild
from tests.hardware.fakes import RTX_3080, TESLA_T4, FakeNvml, linux

CPU = TorchBuild(True, "2.13.0+cpu")
CU130 = TorchBuild(True, "2.13.0+cu130", cuda="13.0")
CU126 = TorchBuild(True, "2.11.0+cu126", cuda="12.6")
ROCM = TorchBuild(True, "2.12.0+rocm7.2", hip="7.2.53211")
V100 = {**TESLA_T4, "name": "Tesla V100-SXM2-16GB", "capability": (7, 0)}
RTX_5090 = {**RTX_3080, "name": "NVIDIA GeForce RTX 5090", "capability": (12, 0)}
ON_CPU = "  (to train on the CPU all the same, set CUDA_VISIBLE_DEVICES to an empty value)"


def machine_with(tmp_path, card, driver="570.86.10", platform="linux"):
    root = linux(tmp_path)
    return hardware.probe(root, root=root, nvml=FakeNvml([card], driver), platform=platform, environ={})


def command(wheel: str, joined: str = " && ") -> str:
    return (f'python -m pip uninstall -y torch{joined}python -m pip install "torch>=2.11" '
            f"--index-url https://download.pytorch.org/whl/{wheel}")  # fmt: skip


def refusal(machine, build) -> UserError:
    with pytest.raises(UserError) as caught:
        hardware.check_torch_matches(machine, build)
    assert caught.value.exit_code == 2
    return caught.value


def test_the_installed_torch_agrees_with_itself():
    import torch

    build = hardware.torch_build()
    assert build == TorchBuild(True, torch.__version__, torch.version.cuda, torch.version.hip)


@pytest.mark.parametrize(
    ("text", "cuda", "hip"),
    [
        ("from typing import Optional\n__version__ = '2.12.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None",
         "13.0", None),
        ("__version__ = '2.12.0'\ncuda = None\nhip = '7.2.1'", None, "7.2.1"),
    ],
)  # fmt: skip
def test_reads_version_files_of_other_builds(tmp_path, text, cuda, hip):
    (tmp_path / "version.py").write_text(text, encoding="utf-8")
    assert hardware.torch_build(tmp_path) == TorchBuild(True, "2.12.0", cuda, hip)


def test_no_torch_and_a_broken_one(tmp_path):
    assert hardware.torch_build(tmp_path / "absent") == TorchBuild(False)
    with pytest.raises(UserError) as caught:
        hardware.torch_build(tmp_path)
    assert caught.value.what == "the installed torch is broken"
    assert 'python -m pip install --force-reinstall "torch>=2.11"' in caught.value.fix


@pytest.mark.parametrize(
    ("driver", "card", "wheel"),
    [
        ("580.65.06", RTX_3080, "cu130"),
        ("595.10", RTX_5090, "cu130"),
        ("570.86.10", RTX_3080, "cu128"),
        ("572.16", RTX_5090, "cu128"),
        ("535.129.03", RTX_3080, "cu126"),
        ("580.65.06", V100, "cu126"),
        ("525.60.13", TESLA_T4, "cu126"),
    ],
)
def test_a_cpu_torch_beside_an_nvidia_card_names_the_command_that_mends_it(tmp_path, driver, card, wheel):
    error = refusal(machine_with(tmp_path, card, driver), CPU)
    assert error.what == "torch 2.13.0+cpu cannot use the NVIDIA card in this machine"
    assert error.why == f"it is a CPU build; {card['name']} (driver {driver}) needs a CUDA build"
    assert error.fix == command(wheel) + ON_CPU


def test_the_command_suits_powershell_on_windows(tmp_path):
    error = refusal(machine_with(tmp_path, RTX_3080, "581.29", "win32"), CPU)
    assert error.fix == command("cu130", "; ") + ON_CPU


def test_a_card_seen_without_nvml_is_enough(tmp_path):
    machine = dataclasses.replace(machine_with(tmp_path, RTX_3080, "535.129.03"), devices=())
    assert "the card (driver 535.129.03) needs a CUDA build" in refusal(machine, CPU).why


def test_a_driver_too_old_for_any_build_must_be_updated(tmp_path):
    error = refusal(machine_with(tmp_path, RTX_3080, "470.256.02"), CPU)
    assert error.what == "the NVIDIA driver 470.256.02 is too old"
    assert error.why == "every CUDA build of torch from 2.11 on needs driver 525 or newer"
    assert error.fix.startswith("install driver 580 or newer with the system's package manager")


def test_a_driver_too_old_for_the_installed_build(tmp_path):
    error = refusal(machine_with(tmp_path, RTX_3080, "550.54.14"), CU130)
    assert error.what == "the NVIDIA driver 550.54.14 is too old for the installed torch"
    assert error.why == "torch 2.13.0+cu130 is built for CUDA 13.0, which needs driver 580 or newer"
    assert error.fix == command("cu126") + "  (or update the driver)"
    assert "install driver 580 or newer" in refusal(machine_with(tmp_path, RTX_3080, "510.39.01"), CU126).fix


def test_a_build_without_kernels_for_the_card(tmp_path):
    error = refusal(machine_with(tmp_path, V100, "580.65.06"), CU130)
    assert error.what == "torch 2.13.0+cu130 has no kernels for Tesla V100-SXM2-16GB"
    assert error.why == "its CUDA 13.0 build serves compute capability 7.5 and newer, the card has 7.0"
    assert error.fix == command("cu126")
    error = refusal(machine_with(tmp_path, RTX_5090, "570.86.10"), CU126)
    assert error.why == "its CUDA 12.6 build serves compute capability 5.0 to 9.x, the card has 12.0"
    assert error.fix == command("cu128")


def test_an_amd_card_needs_a_rocm_build(tmp_path):
    amd = dataclasses.replace(hardware.virtual(gpus.find("mi300x")[0]), assumptions="", platform="linux")
    error = refusal(amd, CPU)
    assert error.what == "torch 2.13.0+cpu cannot use the AMD card in this machine"
    assert error.why == "it is a CPU build; Instinct MI300X 192GB needs a ROCm build"
    assert error.fix == command("rocm7.2") + ON_CPU
    assert "it is a CUDA build" in refusal(amd, CU130).why
    hardware.check_torch_matches(amd, ROCM)


def test_a_rocm_build_beside_an_nvidia_card(tmp_path):
    assert refusal(machine_with(tmp_path, RTX_3080), ROCM).why.startswith("it is a ROCm build; NVIDIA GeForce RTX 3080")


def test_no_torch_names_the_command_for_this_machine(tmp_path):
    error = refusal(machine_with(tmp_path, RTX_3080, "580.65.06"), TorchBuild(False))
    assert error.what == "torch is not installed"
    assert error.fix == 'python -m pip install "torch>=2.11" --index-url https://download.pytorch.org/whl/cu130'
    root = linux(tmp_path / "plain")
    plain = hardware.probe(root, root=root, nvml=FakeNvml([]), environ={})
    assert refusal(plain, TorchBuild(False)).fix.endswith("/whl/cpu")


def test_what_matches_is_not_refused(tmp_path):
    hardware.check_torch_matches(machine_with(tmp_path, RTX_3080, "580.65.06"), CU130)
    hardware.check_torch_matches(machine_with(tmp_path, V100, "535.129.03"), CU126)
    root = linux(tmp_path / "plain")
    plain = hardware.probe(root, root=root, nvml=FakeNvml([]), environ={})
    for build in (CPU, CU130, ROCM):
        hardware.check_torch_matches(plain, build)
    hardware.check_torch_matches(hardware.virtual(gpus.find("h200")[0]), CPU)
