"""Which torch is installed, found without importing it, and whether it was built for the cards that are there."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from fitune.errors import UserError
from fitune.hardware.machine import Machine

WHEELS = "https://download.pytorch.org/whl"
REQUIREMENT = '"torch>=2.11"'
# Which wheel for which driver, by the driver's first number. A toolkit runs on its own driver and newer ones: CUDA 13.x
# from 580, CUDA 12.x from 525 (docs.nvidia.com, "CUDA minor version compatibility"); CUDA 12.8 came with 570.
CUDA_BY_DRIVER = ((580, "cu130"), (570, "cu128"), (525, "cu126"))
# Which cards a wheel has kernels for: the first compute capability, and the last major one, whose later minor ones run
# the same kernels (pytorch/pytorch pull requests 175253 and 182849: the support matrices of torch 2.11, which is the
# last with cu128, and 2.12). 99 stands for "and newer".
CARDS_OF_CUDA = {"12.6": ((5, 0), 9), "12.8": ((7, 5), 12), "13": ((7, 5), 99)}
# In every release from torch 2.11 on (pytorch/test-infra, tools/scripts/generate_binary_build_matrix.py, 2026-08).
ROCM_WHEEL = "rocm7.2"
ON_CPU = "to train on the CPU all the same, set CUDA_VISIBLE_DEVICES to an empty value"


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch. ``cuda`` and ``hip`` are toolkit versions (``12.8``), None when built without."""

    installed: bool
    version: str | None = None
    cuda: str | None = None
    hip: str | None = None


def torch_build(folder: Path | None = None) -> TorchBuild:
    """The torch that ``import torch`` would give, read from its ``version.py`` in about a millisecond.

    Args:
        folder: the package's folder; None looks it up as the import system does, without importing.

    Raises:
        UserError: the folder is there but its version.py is not: a broken installation.
    """
    if folder is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return TorchBuild(False)
        folder = Path(spec.origin).parent
    if not folder.is_dir():
        return TorchBuild(False)
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            "the installed torch is broken",
            f"{folder / 'version.py'} cannot be read: {error.strerror}",
            f"install it again: python -m pip install --force-reinstall {REQUIREMENT}",
        ) from error
    values = _constants(text)
    return TorchBuild(True, values.get("__version__"), values.get("cuda"), values.get("hip"))


def _constants(text: str) -> dict[str, str | None]:
    """Top-level names of a Python file that are bound to a string or None; nothing is executed."""
    values: dict[str, str | None] = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Constant):
            continue
        value = node.value.value
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if value is None or isinstance(value, str):
            values.update({target.id: value for target in targets if isinstance(target, ast.Name)})
    return values


def wheel_for(driver_version: str | None, capabilities: list[tuple[int, int]]) -> str | None:
    """The wheel index (``cu126``, ``cu128``, ``cu130``) for a driver and its cards; None: the driver is too old.

    The newest of ``CUDA_BY_DRIVER`` that the driver runs; but ``cu126`` for cards before Turing (compute capability
    below 7.5), which newer wheels leave out, and ``cu128`` at least for Blackwell (10.0 and up), which cu126 leaves
    out. An unknown driver is taken for a current one.
    """
    driver = _major(driver_version) if driver_version else CUDA_BY_DRIVER[0][0]
    wheels = [wheel for oldest, wheel in CUDA_BY_DRIVER if driver >= oldest]
    if not wheels:
        return None
    if capabilities and max(capabilities) < (7, 5):
        return "cu126"
    if capabilities and max(capabilities) >= (10, 0) and wheels[0] == "cu126":
        return "cu128"
    return wheels[0]


def install_command(wheel: str, platform: str, replace: bool = True) -> str:
    """The command that puts this build of torch in place of the installed one (or installs it)."""
    install = f"python -m pip install {REQUIREMENT} --index-url {WHEELS}/{wheel}"
    joined = "; " if platform == "win32" else " && "
    return f"python -m pip uninstall -y torch{joined}{install}" if replace else install


def check_torch_matches(machine: Machine, build: TorchBuild) -> None:
    """Refuse a torch that cannot use the cards that are there. A machine without a card is served by any torch.

    A virtual machine (``machine.assumptions`` is not empty) is not checked: its cards are not there.

    Raises:
        UserError: torch is missing; an NVIDIA or AMD card is there and torch is built for neither or for the other; the
            driver is older than the build's CUDA needs; the build has no kernels for the card. The fix is the command.
    """
    if machine.assumptions:
        return
    if not build.installed:
        wheel = _best_wheel(machine)
        command = install_command(wheel, machine.platform, replace=False)
        raise UserError("torch is not installed", "fitune trains with it", command)
    if machine.nvidia_present and build.cuda:
        _check_cuda(machine, build)
    elif machine.amd_present and build.hip:
        return
    elif machine.nvidia_present:
        _refuse_for_nvidia(machine, build)
    elif machine.amd_present and machine.platform == "linux":
        what = f"torch {build.version} cannot use the AMD card in this machine"
        why = f"it is a {'CUDA' if build.cuda else 'CPU'} build; {_first_name(machine)} needs a ROCm build"
        raise UserError(what, why, f"{install_command(ROCM_WHEEL, machine.platform)}  ({ON_CPU})")


def _refuse_for_nvidia(machine: Machine, build: TorchBuild) -> None:
    """The error for an NVIDIA card beside a torch that is not built for CUDA."""
    wheel = wheel_for(machine.nvidia_driver_version, _capabilities(machine))
    if wheel is None:
        raise _driver_too_old(machine, "every CUDA build of torch from 2.11 on needs driver 525 or newer")
    kind = "ROCm" if build.hip else "CPU"
    driver = f" (driver {machine.nvidia_driver_version})" if machine.nvidia_driver_version else ""
    raise UserError(
        f"torch {build.version} cannot use the NVIDIA card in this machine",
        f"it is a {kind} build; {_first_name(machine)}{driver} needs a CUDA build",
        f"{install_command(wheel, machine.platform)}  ({ON_CPU})",
    )


def _check_cuda(machine: Machine, build: TorchBuild) -> None:
    """Driver against toolkit, then card against the build's kernels."""
    assert build.cuda is not None
    toolkit = _major(build.cuda)
    capabilities = _capabilities(machine)
    oldest = {13: 580, 12: 525}.get(toolkit)
    driver = machine.nvidia_driver_version
    if oldest and driver and _major(driver) < oldest:
        needs = f"torch {build.version} is built for CUDA {build.cuda}, which needs driver {oldest} or newer"
        wheel = wheel_for(driver, capabilities)
        if wheel is None:
            raise _driver_too_old(machine, needs)
        raise UserError(
            f"the NVIDIA driver {driver} is too old for the installed torch",
            needs,
            f"{install_command(wheel, machine.platform)}  (or update the driver)",
        )
    kernels = CARDS_OF_CUDA.get(build.cuda) or CARDS_OF_CUDA.get(str(toolkit))
    if kernels and capabilities and not any(kernels[0] <= card and card[0] <= kernels[1] for card in capabilities):
        wheel = wheel_for(driver, capabilities) or "cu126"
        raise UserError(
            f"torch {build.version} has no kernels for {_first_name(machine)}",
            f"its CUDA {build.cuda} build serves compute capability {_dotted(kernels[0])} "
            f"{'and newer' if kernels[1] == 99 else f'to {kernels[1]}.x'}, the card has "
            f"{_dotted(max(capabilities))}",
            install_command(wheel, machine.platform),
        )


def _driver_too_old(machine: Machine, needs: str) -> UserError:
    """The error when only a newer driver helps."""
    place = "on the Windows side, from nvidia.com/drivers" if machine.is_wsl or machine.platform == "win32" else (
        "with the system's package manager (Ubuntu: sudo ubuntu-drivers install), then restart"
    )  # fmt: skip
    return UserError(
        f"the NVIDIA driver {machine.nvidia_driver_version} is too old",
        needs,
        f"install driver 580 or newer {place}",
    )


def _best_wheel(machine: Machine) -> str:
    """The index to install torch from on this machine when there is none yet."""
    if machine.nvidia_present:
        return wheel_for(machine.nvidia_driver_version, _capabilities(machine)) or "cpu"
    return ROCM_WHEEL if machine.amd_present and machine.platform == "linux" else "cpu"


def _capabilities(machine: Machine) -> list[tuple[int, int]]:
    """Compute capabilities of the NVIDIA cards that told theirs."""
    pairs = []
    for device in machine.devices:
        major, dot, minor = device.compute_capability.partition(".")
        if device.vendor == "NVIDIA" and dot and major != "0":
            pairs.append((int(major), int(minor)))
    return pairs


def _first_name(machine: Machine) -> str:
    return machine.devices[0].name if machine.devices else "the card"


def _major(version: str) -> int:
    """The first number of a version; 0 when there is none."""
    head = version.split(".")[0]
    return int(head) if head.isdecimal() else 0


def _dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
