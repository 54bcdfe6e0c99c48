"""What `fitune calibrate` measured on this machine: one file per card (and one for the processor), read by planning.

The folder is ``$FITUNE_CALIBRATION``, else the person's configuration folder of the platform, because a cache that is
emptied should not change plans. Nothing here measures; see `fitune.train.calibrate`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform as platform_module
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fitune.errors import UserError
from fitune.files import atomic_write, explained
from fitune.hardware.machine import Device

FORMAT = 1
AGAIN = "run `fitune calibrate` again"


@dataclass(frozen=True)
class Calibration:
    """Measured figures of one device. A figure that was not measured is absent or None, and `notes` says why.

    Attributes:
        device: cuda | cpu.
        name, uuid: of the card, as the driver says them.
        host: the machine's network name.
        date: ISO, local time.
        versions: fitune, torch, cuda, driver, bitsandbytes.
        memory: bytes: `context_at_start_bytes` and `context_bytes` (outside torch's allocator, before any kernel and
            after training steps), `workspace_bytes` (kept by libraries inside it), `pinned_bytes` (so much host memory
            could be pinned at once; `pinned_bytes_is_limit` is true when more was refused).
        rates: per second: `gemm_flops_per_s` by precision, `memory_bytes_per_s`, `host_to_device_bytes_per_s`,
            `device_to_host_bytes_per_s` (pinned; with `pageable_` in front also pageable), `host_kernel_s`,
            `dequantise_values_per_s`, `ram_bytes_per_s`, `disk_read_bytes_per_s`.
        seconds: how long measuring took.
    """

    device: str
    name: str
    uuid: str | None
    host: str
    date: str
    versions: dict[str, str | None]
    memory: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    format: int = FORMAT

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def outdated(self, driver_version: str | None, torch_version: str | None) -> str | None:
        """Why it is not of this driver and torch, in words; None when it is. An unknown version is not compared."""
        now = {"driver": driver_version, "torch": torch_version}
        changed = [
            f"{what} {self.versions[what]} (now {version})"
            for what, version in now.items()
            if version and self.versions.get(what) and self.versions[what] != version
        ]
        return f"measured with {' and '.join(changed)}" if changed else None


def folder(environ: Mapping[str, str] | None = None, platform: str | None = None) -> Path:
    """Where calibrations are kept."""
    environ = os.environ if environ is None else environ
    platform = platform or sys.platform
    chosen = environ.get("FITUNE_CALIBRATION")
    if chosen:
        return Path(chosen).expanduser()
    home = Path.home()
    if platform == "win32":
        return Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "fitune" / "calibration"
    if platform == "darwin":
        return home / "Library" / "Application Support" / "fitune" / "calibration"
    return Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "fitune" / "calibration"


def path_of(device: Device | None, environ: Mapping[str, str] | None = None) -> Path:
    """The file of a card, named by its UUID (a home folder may be shared by machines), or of this host's processor."""
    host = platform_module.node() or "machine"
    if device is None:
        key = f"cpu-{host}"
    else:
        key = device.uuid or f"{device.name}-{device.index}-{host}"
    return folder(environ) / (re.sub(r"[^A-Za-z0-9._-]+", "-", key) + ".json")


def store(calibration: Calibration, device: Device | None) -> Path:
    """Writes a calibration in one piece; the one before it is replaced.

    Raises:
        UserError: the folder cannot be made or written.
    """
    check_folder()
    path = path_of(device)
    atomic_write(path, json.dumps(calibration.as_dict(), indent=2) + "\n")
    return path


def check_folder() -> None:
    """Makes the folder of calibrations, before minutes are spent on measuring.

    Raises:
        UserError: it cannot be made or written.
    """
    place = folder()
    fix = "make it writable, or name another folder in the environment variable FITUNE_CALIBRATION"
    try:
        with explained("make the folder", place):
            place.mkdir(parents=True, exist_ok=True)
    except UserError as error:
        raise UserError(error.what, error.why, fix) from None
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"cannot write in {place}", "its permissions do not allow it", fix)


def load(device: Device | None) -> Calibration | None:
    """The stored calibration of a card of this machine, or of its processor (None); None when there is none.

    Raises:
        UserError: the file is damaged, or of another version of fitune.
    """
    path = path_of(device)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from None
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise _unreadable(path, f"it is not JSON ({error})") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise _unreadable(path, "it is of another version of fitune")
    wrong = _wrong_figure(values)
    if wrong:
        raise _unreadable(path, wrong)
    try:
        return Calibration(**(values | {"notes": tuple(values.get("notes", ()))}))
    except TypeError as error:
        raise _unreadable(path, f"a field is missing or unknown ({error})") from None


def _wrong_figure(values: Mapping[str, Any]) -> str | None:
    """What in a file's fields is not as `store` writes it, in words: an edited file must not end in wrong plans."""
    for name in ("versions", "memory", "rates"):
        if not isinstance(values.get(name, {}), dict):
            return f"{name} is not an object"
    if not all(isinstance(values.get(name, ""), str) for name in ("name", "date", "host", "device")):
        return "its name or date is not text"
    rates = values.get("rates", {})
    flops = rates.get("gemm_flops_per_s") or {}
    if not isinstance(flops, dict):
        return "gemm_flops_per_s is not an object"
    figures = {**values.get("memory", {}), **rates, **flops}
    figures.pop("gemm_flops_per_s", None)
    for name, value in figures.items():
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            return f"{name} is {value!r}, which is no measured figure"
    return None


def for_planning(device: Device | None, torch_version: str | None) -> tuple[Calibration | None, str | None]:
    """(calibration, sentence for the person): what planning for this machine's own device should use.

    One of another driver or torch is still used, since a card's own older figures are nearer than another card's, and
    the sentence says so. A file that cannot be read is passed over with a sentence.

    Args:
        torch_version: the installed one; see `fitune.hardware.torch_build`.
    """
    try:
        found = load(device)
    except UserError as error:
        return None, f"{error.what}: {error.why}; {error.fix}"
    if found is None:
        return None, None
    why = found.outdated(device.driver_version if device else None, torch_version)
    if why is None:
        return found, None
    return found, f"the calibration of {found.name} ({found.date[:10]}) is stale, {why}: {AGAIN}"


def _unreadable(path: Path, why: str) -> UserError:
    return UserError(f"cannot use the calibration {path}", why, AGAIN)
