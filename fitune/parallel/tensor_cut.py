"""Which slices of a tensor a tensor-parallel rank holds: of plain tensors, and of packed ones.

A packed weight is cut after the whole tensor has been packed, so that every value is the one that a single process
computes with: int8 has a scale per row, 4-bit formats one per block of 64 along a row, which a cut must not split.
Scales that are quantised themselves (double quantisation) are kept so where the cut leaves their own blocks whole;
elsewhere they are stored as the fp32 numbers that they stand for (0.047 bytes per weight more).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fitune.errors import UserError
from fitune.model.formats import BLOCK_4BIT, BLOCK_SCALES, DENSE, Packed

Range = tuple[int, int]
"""First index, and the one after the last."""


def shares(count: int, size: int, unit: int = 1) -> list[Range]:
    """`count` indices in `size` ranges of whole units, as even as possible; the first ones are the larger ones."""
    each, more = divmod(-(-count // unit), size)
    bounds = [min(count, (rank * each + min(rank, more)) * unit) for rank in range(size + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


@dataclass(frozen=True)
class Cut:
    """A tensor of which every rank holds slices along `axis`: `parts` are each rank's ranges there. Together they are
    the whole axis, once."""

    axis: int
    parts: tuple[tuple[Range, ...], ...]

    @classmethod
    def of(cls, axis: int, ranges: Sequence[Range], copies: int = 1) -> Cut:
        """One range for each rank; with `copies`, the same in so many stretches that stand one after the other."""
        length = ranges[-1][1]
        parts = [tuple((start + i * length, end + i * length) for i in range(copies)) for start, end in ranges]
        return cls(axis, tuple(parts))

    @property
    def length(self) -> int:
        """Of the whole axis."""
        return max(end for part in self.parts for _, end in part)

    def scaled(self, factor: int) -> Cut:
        """The same cut of an axis on which each index stands for `factor` of this one's.

        Raises:
            ValueError: a range does not begin or end there.
        """
        if any(bound % factor for part in self.parts for ends in part for bound in ends):
            raise ValueError(f"ranges {self.parts} are not multiples of {factor}")
        parts = tuple(tuple((start // factor, end // factor) for start, end in part) for part in self.parts)
        return Cut(self.axis, parts)

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part, in memory of its own."""
        return torch.cat([whole.narrow(self.axis, start, end - start) for start, end in self.parts[rank]], self.axis)

    def put(self, whole: torch.Tensor, part: torch.Tensor, rank: int) -> None:
        """Inverse of `take`: write a rank's part where it belongs."""
        at = 0
        for start, end in self.parts[rank]:
            whole.narrow(self.axis, start, end - start).copy_(part.narrow(self.axis, at, end - start))
            at += end - start

    def shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Of a rank's part of a tensor of `shape`."""
        made = list(shape)
        made[self.axis] = sum(end - start for start, end in self.parts[rank])
        return tuple(made)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the whole tensor of which a part has `shape`."""
        made = list(shape)
        made[self.axis] = self.length
        return tuple(made)


def check_blocks(name: str, shape: Sequence[int], cut: Cut, base_format: str) -> None:
    """Raises UserError where a rank's part of a weight would end inside a block of a 4-bit format."""
    if base_format not in ("nf4", "fp4"):
        return
    along = cut.axis % len(shape) == len(shape) - 1
    bounds = [bound for part in cut.parts for ends in part for bound in ends] if along else []
    if shape[-1] % BLOCK_4BIT or any(bound % BLOCK_4BIT for bound in bounds):
        raise UserError(
            f"the {base_format} base cannot be split over {len(cut.parts)} GPUs (--parallel tp)",
            f"{name} has {shape[-1]} inputs: a part would end inside a block of {BLOCK_4BIT} that share a scale",
            "use fewer GPUs, --base-format int8 or a 16-bit base, or --parallel fsdp2",
        )


def take_packed(packed: Packed, cut: Cut, rank: int) -> Packed:
    """A rank's part of a packed weight, with the whole one's values (see `check_blocks`)."""
    shape = cut.shape(packed.shape, rank)
    tensors = packed.tensors
    along = cut.axis % len(shape) == len(shape) - 1
    if packed.format in DENSE:
        return Packed(packed.format, shape, {"weight": cut.take(tensors["weight"], rank)})
    rows = packed.shape[:-1]
    if packed.format == "int8":
        codes = cut.take(tensors["codes"].view(packed.shape), rank)
        scale = tensors["scale"].view(*rows, 1)
        scale = scale.clone() if along else cut.take(scale, rank)
        return Packed(packed.format, shape, {"codes": codes.view(-1, shape[-1]), "scale": scale.view(-1, 1)})
    codes = (cut.scaled(2) if along else cut).take(tensors["codes"].view(*rows, -1), rank)
    blocks = cut.scaled(BLOCK_4BIT) if along else cut
    made = {"codes": codes.view(-1, 1)}
    made |= _scales(tensors, (*rows, packed.shape[-1] // BLOCK_4BIT), blocks, rank)
    return Packed(packed.format, shape, made)


def _scales(tensors: dict[str, torch.Tensor], shape: tuple[int, ...], cut: Cut, rank: int) -> dict[str, torch.Tensor]:
    """A rank's scales of a 4-bit weight's blocks, which lie in a grid of `shape`."""
    absmax = tensors["absmax"]
    if "absmax2" not in tensors:
        return {"absmax": cut.take(absmax.view(shape), rank).view(-1)}
    span = _span(shape, cut, rank)
    if span is not None and span[0] % BLOCK_SCALES == 0:
        start, end = span
        groups = slice(start // BLOCK_SCALES, -(-end // BLOCK_SCALES))
        same = {key: tensors[key] for key in ("offset", "code2")}
        return same | {"absmax": absmax[start:end].clone(), "absmax2": tensors["absmax2"][groups].clone()}
    if absmax.device.type == "meta":
        wide = torch.empty(absmax.shape, dtype=torch.float32, device="meta")
    else:
        wide = torch.ops.bitsandbytes.dequantize_blockwise(
            absmax, tensors["absmax2"], tensors["code2"], BLOCK_SCALES, torch.float32
        )
        wide += tensors["offset"]
    return {"absmax": cut.take(wide.view(shape), rank).view(-1)}


def _span(shape: tuple[int, ...], cut: Cut, rank: int) -> Range | None:
    """Where a rank's part lies in the flat order of the whole, if in one stretch."""
    if math.prod(shape[: cut.axis % len(shape)]) != 1 or len(cut.parts[rank]) != 1:
        return None
    inner = math.prod(shape[cut.axis % len(shape) + 1 :])
    start, end = cut.parts[rank][0]
    return start * inner, end * inner
