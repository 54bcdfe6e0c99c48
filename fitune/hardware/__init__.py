"""What this machine is: graphics cards, memory, limits, links, and whether torch was built for them.

    >>> from fitune import hardware
    >>> machine = hardware.probe()
    >>> hardware.check_torch_matches(machine, hardware.torch_build())

Nothing here imports torch, and nothing is looked at before a function is called. This folder imports ``catalog`` (for
the link's rate and for cards that one does not have), never the reverse.
"""

from fitune.hardware.machine import Device, Machine, under_wsl, virtual, virtual_mixed
from fitune.hardware.probe import probe
from fitune.hardware.torch_build import TorchBuild, check_torch_matches, torch_build

__all__ = [
    "Device",
    "Machine",
    "TorchBuild",
    "check_torch_matches",
    "probe",
    "torch_build",
    "under_wsl",
    "virtual",
    "virtual_mixed",
]
