"""Safetensors files of a checkpoint: written tensor by tensor, read in whole or in part.

A file may hold slices of tensors instead of whole ones: 1-D, in the tensor's flat order. Its header's metadata then
says where they belong (`slices`: name to [first element, shape of the whole]), so that the files of all ranks explain
themselves. Format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fitune.files import BINARY, parse_json, write_out
from fitune.parallel.slices import Saved, Slice

_SLICES = "slices"
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor | Slice]) -> None:
    """A new safetensors file, on the disk when this returns. What is on another device comes through host memory tensor
    by tensor; nothing else is copied.

    Raises:
        OSError: it cannot be written; a part may be there.
    """
    slices = {name: [t.start, list(t.shape)] for name, t in tensors.items() if isinstance(t, Slice)}
    stored = {name: t.part if isinstance(t, Slice) else t for name, t in tensors.items()}
    metadata = {"format": "pt"} | ({_SLICES: json.dumps(slices, separators=(",", ":"))} if slices else {})
    header: dict[str, Any] = {"__metadata__": metadata}
    # Wide elements first, so that every tensor starts at a multiple of its element's size.
    order = sorted(stored, key=lambda name: (-stored[name].element_size(), name))
    end = 0
    for name in order:
        start, end = end, end + stored[name].numel() * stored[name].element_size()
        shape = list(stored[name].shape)
        header[name] = {"dtype": _TYPES[stored[name].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
    try:
        write_out(descriptor, len(text).to_bytes(8, "little") + text)
        for name in order:
            if stored[name].numel():
                flat = stored[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                write_out(descriptor, memoryview(flat.numpy()))
        os.fsync(descriptor)  # by the machine that wrote it: the one that names the folder may be another
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Piece:
    """Where some elements of a tensor, from `start` on, are stored."""

    file: Any
    start: int
    count: int


class TensorFiles(Saved):
    """The tensors of some files, mapped into memory: what is asked for is read, and no more.

    Raises (on construction):
        OSError, SafetensorError, ValueError: a file is damaged, or a tensor is not there in whole.
    """

    def __init__(self, paths: Iterable[Path]):
        from safetensors import safe_open

        self._pieces: dict[str, list[_Piece]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            file: Any = safe_open(str(path), framework="pt", device="cpu")
            slices = parse_json((file.metadata() or {}).get(_SLICES, "{}"))
            if not isinstance(slices, dict):
                raise ValueError("its slices are no object")
            for name in file.keys():  # noqa: SIM118  no mapping
                stored = tuple(file.get_slice(name).get_shape())
                start, shape = slices.get(name, (0, stored))
                if self._shapes.setdefault(name, tuple(shape)) != tuple(shape):
                    raise ValueError(f"{name} has two shapes")
                self._pieces.setdefault(name, []).append(_Piece(file, int(start), math.prod(stored)))
        for name, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece.start)
            end = 0
            for piece in pieces:
                end = end + piece.count if piece.start == end else -1
            if end != math.prod(self._shapes[name]):
                raise ValueError(f"{name} is not there in whole")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def elements(self, name: str, start: int, count: int) -> torch.Tensor:
        found = []
        for piece in self._pieces[name]:
            first, last = max(start, piece.start), min(start + count, piece.start + piece.count)
            if first < last:
                flat = piece.file.get_tensor(name).reshape(-1)
                found.append(flat[first - piece.start : last - piece.start])
        return found[0] if len(found) == 1 else torch.cat(found)

    def __getitem__(self, name: str) -> torch.Tensor:
        pieces = self._pieces[name]
        if len(pieces) == 1:
            whole: torch.Tensor = pieces[0].file.get_tensor(name)
            return whole.reshape(self._shapes[name])
        return self.elements(name, 0, math.prod(self._shapes[name])).reshape(self._shapes[name])

    def __contains__(self, name: object) -> bool:
        return name in self._pieces  # a mapping's own would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)
