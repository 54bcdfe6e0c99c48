"""What the probe makes of machines that one does not have, and of this one."""

from __future__ import annotations

import json
import os
import sys

import pytest

from fitune import hardware
from fitune.hardware import host
from fitune.units import GIB, MIB
from tests.hardware.fakes import RTX_3080, TESLA_T4, FakeNvml, linux, write

NO_DRIVER = FakeNvml([], fail_init="Driver Not Loaded")


def probe(root, nvml=NO_DRIVER, environ=None):
    return hardware.probe(root, root=root, nvml=nvml, platform="linux", environ=environ or {})


def test_a_card_with_its_memory_link_and_neighbours(tmp_path):
    card = {**RTX_3080, "used_mib": 1700, "processes": [(os.getpid(), 500), (1, 1200)]}
    machine = probe(linux(tmp_path), FakeNvml([card]))
    device = machine.devices[0]
    assert (device.name, device.vendor, device.compute_capability) == ("NVIDIA GeForce RTX 3080", "NVIDIA", "8.6")
    assert device.total_bytes == 10240 * MIB and device.usable_bytes == (10240 - 230) * MIB
    assert device.free_bytes == (10240 - 230 - 1700) * MIB
    assert device.used_by_others_bytes == 1200 * MIB
    assert device.bf16 and device.flash_attention
    assert (device.pcie_gen, device.pcie_gen_max, device.pcie_width, device.pcie_width_max) == (1, 4, 8, 16)
    assert device.link_bytes_per_s == pytest.approx(12.4e9, rel=0.01)  # generation under load x lanes negotiated
    assert (machine.nvidia_present, machine.nvidia_driver_version, machine.cuda_version) == (True, "570.86.10", "12.8")
    assert machine.assumptions == "" and machine.notes == ()
    assert json.loads(json.dumps(machine.as_dict()))["devices"][0]["usable_bytes"] == device.usable_bytes


def test_nvml_is_closed_again(tmp_path):
    nvml = FakeNvml([RTX_3080])
    probe(linux(tmp_path), nvml)
    assert nvml.started == 0


def test_a_card_before_ampere_has_neither_bf16_nor_flash(tmp_path):
    device = probe(linux(tmp_path), FakeNvml([TESLA_T4])).devices[0]
    assert not device.bf16 and not device.flash_attention
    assert device.usable_bytes / GIB == pytest.approx(14.563, abs=0.01)  # what CUDA reports on a T4


def test_an_old_nvml_without_the_reserved_figure_gets_a_margin(tmp_path):
    device = probe(linux(tmp_path), FakeNvml([{**RTX_3080, "old": True}])).devices[0]
    assert device.usable_bytes == 10240 * MIB - int(10240 * MIB * 0.03)


def test_a_link_that_nvml_does_not_know_is_unknown(tmp_path):
    card = {key: value for key, value in RTX_3080.items() if not key.startswith(("gen", "width"))}
    device = probe(linux(tmp_path), FakeNvml([card])).devices[0]
    assert device.link_bytes_per_s is None and device.pcie_gen is None


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA GeForce RTX 3080", "Tesla T4"]),
        ("1", ["Tesla T4"]),
        ("1,0", ["Tesla T4", "NVIDIA GeForce RTX 3080"]),
        ("GPU-bbbb", ["Tesla T4"]),
        ("0,7,1", ["NVIDIA GeForce RTX 3080"]),
        ("", []),
        ("-1", []),
    ],
)
def test_only_visible_cards_count(tmp_path, visible, names):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    machine = probe(linux(tmp_path), FakeNvml([RTX_3080, TESLA_T4]), environ)
    assert [device.name for device in machine.devices] == names
    assert [device.index for device in machine.devices] == list(range(len(names)))
    assert machine.nvidia_present == bool(names)


def test_without_nvml_the_driver_is_still_seen(tmp_path):
    root = linux(tmp_path)
    write(root, {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA GeForce RTX 3090\nIRQ: 1",
    })  # fmt: skip
    machine = hardware.probe(root, root=root, platform="linux", environ={})
    assert machine.nvidia_present and machine.nvidia_driver_version == "535.129.03" and machine.devices == ()
    assert machine.notes == ("NVIDIA GeForce RTX 3090: nvidia-ml-py is not installed: the cards' memory is not known",)
    hidden = hardware.probe(root, root=root, platform="linux", environ={"CUDA_VISIBLE_DEVICES": ""})
    assert not hidden.nvidia_present


def test_a_card_without_a_driver_is_a_note_and_not_a_card(tmp_path):
    root = write(linux(tmp_path), {"sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de",
                                   "sys/bus/pci/devices/0000:01:00.0/class": "0x030000"})  # fmt: skip
    machine = probe(root)
    assert not machine.nvidia_present
    assert machine.notes == ("an NVIDIA card is in this machine, but no NVIDIA driver is loaded: it cannot be used",)


def test_plain_linux_pins_half_of_the_ram_and_memlock_does_not_bind(tmp_path):
    machine = probe(linux(tmp_path, total_gib=32, available_gib=24))
    assert (machine.ram_total_bytes, machine.ram_available_bytes) == (32 * GIB, 24 * GIB)
    assert (machine.ram_limit_source, machine.is_wsl) == ("machine", False)
    assert machine.pinned_limit_bytes == 16 * GIB
    assert machine.memlock_bytes == 8 * MIB


def test_wsl_pins_little_and_says_why(tmp_path):
    root = linux(tmp_path, proc__sys__kernel__osrelease="5.15.167.4-microsoft-standard-WSL2")
    machine = probe(root, FakeNvml([RTX_3080]))
    assert machine.is_wsl and machine.pinned_limit_bytes == 512 * MIB
    assert machine.pinned_limit_reason == "WSL: the driver refuses more than 0.5 to 2 GB in all"
    custom_kernel = linux(tmp_path / "custom", proc__sys__kernel__osrelease="6.1.0-mine", dev__dxg="")
    assert probe(custom_kernel).is_wsl


def test_windows_and_macos_limits():
    ram = host.Memory(32 * GIB, 30 * GIB, "machine")
    assert host.pinned_limit(ram, False, "win32") == (16 * GIB, "Windows: half of the RAM at most")
    assert host.pinned_limit(ram, False, "darwin")[0] == 0


def test_cgroup_v2_limits_memory_and_processors(tmp_path):
    root = write(linux(tmp_path, total_gib=64, available_gib=60), {
        "proc/self/cgroup": "0::/docker/abc",
        "sys/fs/cgroup/docker/abc/memory.max": "max",
        "sys/fs/cgroup/docker/memory.max": str(8 * GIB),
        "sys/fs/cgroup/docker/memory.current": str(5 * GIB),
        "sys/fs/cgroup/docker/memory.stat": f"anon 7\ninactive_file {3 * GIB}",
        "sys/fs/cgroup/docker/abc/cpu.max": "50000 100000",
    })  # fmt: skip
    machine = probe(root)
    assert (machine.ram_total_bytes, machine.ram_available_bytes) == (8 * GIB, 6 * GIB)  # 3 of the 5 GiB are cache
    assert machine.ram_limit_source == "cgroup v2" and machine.num_cpus == 0.5
    assert machine.pinned_limit_bytes == 4 * GIB
    assert machine.notes == ("a control group (cgroup v2) limits this process to 8.0 GiB of RAM",)


def test_cgroup_v1_as_a_container_sees_it(tmp_path):
    """In a container the path is the host's, while the files lie at the root of the tree."""
    root = write(linux(tmp_path, total_gib=64, available_gib=60), {
        "proc/self/cgroup": "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(12 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "25000",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    machine = probe(root)
    assert (machine.ram_total_bytes, machine.ram_available_bytes) == (12 * GIB, 10 * GIB)
    assert machine.ram_limit_source == "cgroup v1" and machine.num_cpus == 0.25


def test_cgroup_v1_without_a_limit(tmp_path):
    root = write(linux(tmp_path), {
        "proc/self/cgroup": "4:memory:/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    machine = probe(root)
    assert machine.ram_total_bytes == 32 * GIB and machine.ram_limit_source == "machine" and machine.num_cpus >= 1


def amd_files(vram_gib: float, target: int) -> dict[str, str]:
    return {
        "sys/class/drm/card1/device/vendor": "0x1002",
        "sys/class/drm/card1/device/mem_info_vram_total": str(int(vram_gib * GIB)),
        "sys/class/drm/card1/device/mem_info_vram_used": str(GIB),
        "sys/class/drm/card1/device/product_name": "Radeon RX 7900 XTX",
        "sys/class/drm/card1/device/current_link_speed": "2.5 GT/s PCIe",
        "sys/class/drm/card1/device/current_link_width": "16",
        "sys/class/drm/card1/device/max_link_speed": "16.0 GT/s PCIe",
        "sys/class/drm/card1/device/max_link_width": "16",
        "sys/class/drm/card1/device/drm/renderD128/dev": "226:128",
        "sys/class/kfd/kfd/topology/nodes/0/properties": "simd_count 0\ngfx_target_version 0",
        "sys/class/kfd/kfd/topology/nodes/1/properties": f"gfx_target_version {target}\ndrm_render_minor 128",
    }


def test_an_amd_card(tmp_path):
    machine = probe(write(linux(tmp_path), amd_files(23.98, 110000)))
    device = machine.devices[0]
    assert machine.amd_present and not machine.nvidia_present
    assert (device.vendor, device.compute_capability, device.bf16) == ("AMD", "gfx1100", True)
    assert device.free_bytes == int(23.98 * GIB) - GIB
    assert device.link_bytes_per_s == pytest.approx(24.9e9, rel=0.01)


def test_amd_targets_read_as_rocm_writes_them(tmp_path):
    assert probe(write(linux(tmp_path), amd_files(192, 90402))).devices[0].compute_capability == "gfx942"
    assert probe(write(linux(tmp_path), amd_files(64, 90010))).devices[0].compute_capability == "gfx90a"


def test_graphics_inside_a_processor_is_no_card(tmp_path):
    machine = probe(write(linux(tmp_path), amd_files(0.5, 110003)))
    assert machine.devices == () and not machine.amd_present


def test_disk_of_a_folder_that_is_still_to_be_made(tmp_path):
    machine = hardware.probe(tmp_path / "runs" / "new", root=linux(tmp_path / "root"), nvml=NO_DRIVER, environ={})
    assert machine.disk_path == str(tmp_path) and machine.disk_free_bytes > 0


@pytest.mark.skipif(sys.platform != "linux", reason="compares with /proc")
def test_this_machine_agrees_with_psutil():
    import psutil

    machine = hardware.probe()
    assert 0 < machine.ram_available_bytes <= machine.ram_total_bytes <= psutil.virtual_memory().total
    assert 0 < machine.num_cpus <= os.cpu_count()
    assert machine.platform == "linux" and machine.python_version.startswith("3.")


@pytest.mark.gpu
def test_this_gpu_agrees_with_torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.version.hip:
        pytest.skip("no CUDA GPU")
    device = hardware.probe().devices[0]
    total = torch.cuda.get_device_properties(0).total_memory
    assert device.name == torch.cuda.get_device_name(0)
    assert device.compute_capability == "{}.{}".format(*torch.cuda.get_device_capability(0))
    assert device.usable_bytes == pytest.approx(total, rel=0.005)
