"""fitune's cache folder, and whether a disk has room."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from fitune.errors import UserError
from fitune.units import format_bytes


def cache_dir() -> Path:
    """Where converted and fetched models are kept: ``$FITUNE_CACHE``, else the platform's cache folder + ``fitune``."""
    chosen = os.environ.get("FITUNE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    home = Path.home()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "fitune" / "Cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "fitune"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "fitune"


def need_space(folder: Path, num_bytes: int, what: str) -> None:
    """Refuse early when the disk of ``folder`` (which need not exist yet) has less than ``num_bytes`` free.

    Raises:
        UserError: not enough space.
    """
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < num_bytes:
        raise UserError(
            f"not enough disk space for {what}",
            f"it needs {format_bytes(num_bytes)}, the disk of {folder} has {format_bytes(free)} free",
            "free some space on this disk, or choose a folder on another one",
        )
