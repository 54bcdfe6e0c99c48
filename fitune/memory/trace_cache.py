"""Scripts of steps that were traced before, in fitune's cache folder. An entry is whole or absent, and never trusted:
one that cannot be read is removed and made again. The least recently used go when there is too much.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

from fitune.errors import UserError
from fitune.files import atomic_write
from fitune.model.cache import cache_dir

MOST_BYTES = 64 * 1024**2  # a script is 5 to 100 KB
SUFFIX = ".json.gz"


def folder() -> Path:
    """Where the entries are."""
    return cache_dir() / "traces"


def load(key: str) -> Any:
    """The entry's value; None when there is none that can be read."""
    path = folder() / f"{key}{SUFFIX}"
    try:
        value = json.loads(gzip.decompress(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError):  # damaged, or not ours to read
        remove(key)
        return None
    with contextlib.suppress(OSError):  # a cache that is read-only serves as well
        os.utime(path)  # used now: the others go first
    return value


def store(key: str, value: Any) -> None:
    """Keep a value that JSON can hold. Where the folder cannot be written to, nothing is kept: it only saves time."""
    place = folder()
    try:
        place.mkdir(parents=True, exist_ok=True)
        packed = gzip.compress(json.dumps(value, separators=(",", ":")).encode(), 6, mtime=0)
        atomic_write(place / f"{key}{SUFFIX}", packed)
        _shrink(place, MOST_BYTES)
    except (OSError, UserError):
        return


def remove(key: str) -> None:
    """Forget an entry."""
    try:
        (folder() / f"{key}{SUFFIX}").unlink(missing_ok=True)
    except OSError:
        return


def _shrink(place: Path, most_bytes: int) -> None:
    """Remove the entries that were used longest ago until the rest is small enough."""
    entries = []
    for path in place.glob(f"*{SUFFIX}"):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue  # another process has removed it
        entries.append((found.st_mtime, found.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= most_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size
