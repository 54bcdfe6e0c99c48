"""Gradients of a part of the model in one buffer of host memory, on their way to its update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fitune.model.host import HostBuffer

_ALIGNMENT_BYTES = 64
_ROW, _ROWS = 2**14, 2**8  # elements whose squares are summed in one go, and how many such rows are widened at a time


@dataclass(eq=False)
class Parcel:
    """Gradients of some tensors in one host buffer. `norms`: of each, where the device has taken them."""

    buffer: HostBuffer
    tensors: dict[str, torch.Tensor]
    norms: torch.Tensor | None = None


def aligned(num_bytes: int) -> int:
    """Room for so many bytes."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def cut(buffer: HostBuffer, shapes: Iterable[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
    """A buffer as tensors, one after the other."""
    tensors, start = [], 0
    for shape, dtype in shapes:
        flat = buffer.tensor[start : start + shape.numel() * dtype.itemsize]
        tensors.append(flat.view(dtype).view(shape))
        start += aligned(flat.numel())
    return tensors


def norm_of(grad: torch.Tensor) -> torch.Tensor:
    """L2 norm, a fp32 scalar; of a large one by rows: torch's sum over ten million elements on the CPU is off in the
    fourth digit, and takes several times as long."""
    flat = grad.reshape(-1)
    num_whole = flat.numel() // _ROW * _ROW
    if num_whole == 0:
        return torch.linalg.vector_norm(flat.float())
    parts = flat[:num_whole].view(-1, _ROW).split(_ROWS)
    norms = [torch.linalg.vector_norm(rows.float(), dim=1) for rows in parts]
    return torch.linalg.vector_norm(torch.cat([*norms, torch.linalg.vector_norm(flat[num_whole:].float()).view(1)]))
