"""Write safetensors files tensor by tensor: sizes are known before the first byte, no shard is ever in memory.

The format is eight bytes of header length, a JSON header, then the tensors' bytes in order
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fitune.model.checkpoint import ELEMENT_BYTES, INDEX

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Entry:
    """One tensor to be written. ``dtype`` is the safetensors name (``BF16``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def split(entries: list[Entry], max_shard_bytes: int) -> list[list[Entry]]:
    """Consecutive entries in shards of at most ``max_shard_bytes`` (one larger tensor is a shard of its own)."""
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(e.num_bytes for e in shards[-1]) + entry.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    return shards


def write(folder: Path, entries: list[Entry], tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int) -> int:
    """Write ``tensors``, which come in the order of ``entries``, as ``model.safetensors`` or shards with an index.

    Returns:
        The number of files. One tensor is in memory at a time, beyond what ``tensors`` itself holds.

    Raises:
        OSError: no space, no permission.
    """
    shards = split(entries, max_shard_bytes)
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    source = iter(tensors)
    for file_name, shard in zip(names, shards, strict=True):
        with (folder / file_name).open("wb") as out:
            out.write(_header(shard))
            for entry in shard:
                name, tensor = next(source)
                assert (name, tuple(tensor.shape)) == (entry.name, entry.shape), f"{name} came, {entry.name} was due"
                out.write(_bytes(tensor, entry))
    assert next(source, None) is None, "more tensors than entries"
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(e.num_bytes for e in entries)},
            "weight_map": {e.name: n for n, shard in zip(names, shards, strict=True) for e in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(names)


def _header(shard: list[Entry]) -> bytes:
    header: dict = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in shard:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.num_bytes],
        }
        position += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin on a multiple of eight
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: torch.Tensor, entry: Entry) -> memoryview:
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    raw = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
    assert raw.nbytes == entry.num_bytes, f"{entry.name} is {tensor.dtype}, {entry.dtype} was due"
    return raw
