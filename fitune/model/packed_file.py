"""Streamed layers in a file, for hosts whose RAM is too small for them: packed once, read in order, kept between runs.

Two files in fitune's cache folder: `NAME.bin` holds the layers' bytes, each beginning on a page; `NAME.json` holds a
CRC-32 of each and is written last. What a killed run leaves is removed by the next one. Reading goes straight into the
caller's buffer; the system is told what comes next, and its page cache keeps what there is RAM for.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import weakref
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fitune.files import atomic_write, clean_leftovers, file_error, try_lock
from fitune.model.cache import cache_dir, need_space
from fitune.model.host import HostBuffer
from fitune.model.streamed import Layout, Piece

if TYPE_CHECKING:
    from fitune.model.source import ModelSource

_FORMAT = 1
_PAGE_BYTES = 4096
_CHECK_BYTES = 16 * 2**20  # read at once when checksums are verified


def identity(source: ModelSource, device: torch.device) -> str:
    """What the packed bytes depend on besides the layouts: the model's files as they are now, and the kind of device
    that quantises (or, for random weights, makes) them."""
    facts: list[Any] = [source.kind, source.dtype, source.seed if source.kind == "random" else 0, device.type]
    if source.path is None:
        facts.append(source.config.to_json_string())
    else:
        folder = source.path if source.path.is_dir() else source.path.parent
        files = sorted(folder.glob("*.safetensors")) if source.path.is_dir() else [source.path]
        facts.append([str(folder.resolve()), *((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class DiskBacking:
    """Layers in a file (see `fitune.model.streamed.Backing`).

    Args:
        identity: see `identity`; None: the file is for this run only.

    Attributes:
        reused: a whole file was there and its checksums are right: no weight of these layers need be read again.

    Raises:
        UserError: the disk has no room or cannot be written.
    """

    def __init__(self, layouts: dict[int, Layout], identity: str | None):
        self._layouts = layouts
        self._offsets: dict[int, int] = {}
        end = 0
        for layer, layout in layouts.items():
            self._offsets[layer] = end
            end += -(-layout.num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._total = end
        self._lock = threading.Lock()
        self._checksums: dict[int, int] = {}
        self._assembling: dict[int, tuple[HostBuffer, set[str]]] = {}
        digest = hashlib.sha256(repr((_FORMAT, identity, sorted(layouts.items()))).encode()).hexdigest()
        self._kept = identity is not None
        folder = cache_dir() / "streamed"
        self.path = folder / f"{digest[:32]}.bin"
        self._file: Any = None
        self.reused = self._kept and self._open_whole()
        if not self.reused:
            self._create(folder)

    # -- an earlier run's file ----------------------------------------------------------------------------------------

    def _open_whole(self) -> bool:
        try:
            values = json.loads(self.path.with_suffix(".json").read_text(encoding="utf-8"))
            file = self.path.open("rb", buffering=0)
        except (OSError, ValueError):
            return False
        self._file = file
        if self.path.stat().st_size == self._total and values == self._as_values(
            {layer: self._checksum(layer) for layer in self._layouts}
        ):
            weakref.finalize(self, file.close)
            return True
        file.close()
        return False

    def _as_values(self, checksums: dict[int, int]) -> dict[str, Any]:
        """What the `.json` holds."""
        return {"format": _FORMAT, "layers": {str(layer): checksums[layer] for layer in self._layouts}}

    def _checksum(self, layer: int) -> int:
        left, start, found = self._layouts[layer].num_bytes, 0, 0
        buffer = torch.empty(min(left, _CHECK_BYTES), dtype=torch.uint8)
        while left > 0:
            part = buffer[: min(left, _CHECK_BYTES)]
            self.read_into(layer, start, part)
            found = zlib.crc32(part.numpy(), found)
            left, start = left - part.numel(), start + part.numel()
        return found

    # -- a new one ----------------------------------------------------------------------------------------------------

    def _create(self, folder: Path) -> None:
        self._part = folder / f".{self.path.name}.fitune-tmp-{secrets.token_hex(6)}"  # a leftover once nobody locks it
        try:
            folder.mkdir(parents=True, exist_ok=True)
            clean_leftovers(folder)
            need_space(folder, self._total, "the packed layers")
            self._file = self._part.open("w+b", buffering=0)
            try_lock(self._file.fileno())
            self._file.truncate(self._total)
            if not self._kept and os.name == "posix":
                self._part.unlink()  # gone with the process, however it ends
        except OSError as error:
            raise file_error("write", self._part, error) from None
        weakref.finalize(self, self._file.close)
        if not self._kept and os.name != "posix":
            weakref.finalize(self, self._part.unlink, missing_ok=True)

    def write(self, layer: int, piece: Piece, tensor: torch.Tensor) -> None:
        if self.reused:
            return
        if layer not in self._assembling:
            self._assembling[layer] = HostBuffer(self._layouts[layer].num_bytes, pin=False), set()
        buffer, done = self._assembling[layer]
        piece.view(buffer.tensor).copy_(tensor)
        done.add(f"{piece.name}|{piece.key}")
        if len(done) == len(self._layouts[layer].pieces):
            del self._assembling[layer]
            self._write_layer(layer, buffer.tensor)

    def _write_layer(self, layer: int, flat: torch.Tensor) -> None:
        content = memoryview(flat.numpy())
        self._checksums[layer] = zlib.crc32(content)
        try:
            with self._lock:
                self._file.seek(self._offsets[layer])
                written = 0
                while written < len(content):
                    written += self._file.write(content[written:])
        except OSError as error:
            raise file_error("write", self.path, error) from None

    def finish(self) -> None:
        """Make the file a whole one that later runs use."""
        if self.reused or not self._kept:
            return
        try:
            os.fsync(self._file.fileno())
            os.replace(self._part, self.path)
        except OSError as error:
            raise file_error("write", self.path, error) from None
        atomic_write(self.path.with_suffix(".json"), json.dumps(self._as_values(self._checksums)) + "\n")

    # -- reading ------------------------------------------------------------------------------------------------------

    def flat(self, layer: int) -> HostBuffer | None:
        return None

    def read_into(self, layer: int, start: int, target: torch.Tensor) -> None:
        """Raises OSError when the file cannot be read or has become shorter."""
        content = memoryview(target.numpy())
        with self._lock:
            self._file.seek(self._offsets[layer] + start)
            done = 0
            while done < len(content):
                count = self._file.readinto(content[done:])
                if not count:
                    raise OSError(f"{self.path} has become shorter while it was in use")
                done += count

    def will_need(self, layer: int) -> None:
        if hasattr(os, "posix_fadvise"):
            size = self._layouts[layer].num_bytes
            os.posix_fadvise(self._file.fileno(), self._offsets[layer], size, os.POSIX_FADV_WILLNEED)
