"""Formats of frozen weights: dense (fp32, bf16, fp16), int8 per row, NF4 and FP4 per block of 64.

Packing happens once, at load, on whatever device the weight is on; unpacking happens at every use and is one
temporary in the compute dtype. NF4 and FP4 are bitsandbytes' (QLoRA, https://arxiv.org/abs/2305.14314), with or
without double quantisation of the block scales; int8 is symmetric per output row, weight only (activations stay in
the compute dtype, unlike LLM.int8).
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import Any

import torch

from fitune.model import native_unpack

BLOCK_4BIT = 64  # values per scale, as in QLoRA
BLOCK_SCALES = 256  # scales per second-level scale (double quantisation)
# bitsandbytes' plain code on the CPU (0.50.2) takes some 20 bytes per weight at once: 10 MiB for so many.
_CPU_ELEMENTS = 1 << 19
_MOST_VIEWS = 64  # of a scratch that are kept: chunks of logits have new lengths in every step
DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_bitsandbytes() -> Any:
    """The library, without its advice to install a hub client for a kernel that fitune does not use."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes

    return bitsandbytes


class Scratch:
    """One device buffer for what lives only between two kernels: an unpacked weight, a chunk's fp32 logits.

    Made and freed a hundred times a layer, such tensors would leave holes between the activations that are kept
    (0.6 GiB of 9.3 on an 8B model, H200, 2026-11-30). All users run on one stream, and each result is consumed before
    the next is taken.
    """

    def __init__(self, num_bytes: int, device: torch.device | str):
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._views: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in the buffer; outside it when it does not fit."""
        view = self._views.get((shape, dtype))
        if view is not None:  # the same few for every layer: making them took as long as a kernel's launch
            return view
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self.buffer.numel():
            return torch.empty(shape, dtype=dtype, device=self.buffer.device)
        view = self.buffer[:num_bytes].view(dtype).view(shape)
        if len(self._views) < _MOST_VIEWS:
            self._views[shape, dtype] = view
        return view


@dataclass
class Packed:
    """A frozen weight of `shape` in a base format.

    `tensors` per format: dense `weight`; int8 `codes` [rows, cols] int8 and `scale` [rows, 1] fp32; nf4 and fp4
    `codes` [n/2, 1] uint8 and either `absmax` [n/64] fp32, or doubly quantised `absmax` [n/64] uint8,
    `absmax2` [n/64/256] fp32, `offset` [] fp32 and `code2` [256] fp32.
    """

    format: str
    shape: tuple[int, ...]
    tensors: dict[str, torch.Tensor]

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def to(self, device: torch.device | str) -> Packed:
        return Packed(self.format, self.shape, {k: t.to(device) for k, t in self.tensors.items()})


def pack(weight: torch.Tensor, format: str, double_quant: bool = True) -> Packed:
    """Pack a floating weight of any shape (the last axis is the input axis). On `meta` only shapes are made."""
    shape = tuple(weight.shape)
    if format in DENSE:
        return Packed(format, shape, {"weight": weight.to(DENSE[format]).contiguous()})
    if format not in ("int8", "nf4", "fp4"):
        raise ValueError(f"unknown base format {format!r}")
    if weight.device.type == "meta":
        return _pack_meta(shape, format, double_quant)
    if format == "int8":
        rows = weight.reshape(-1, shape[-1])
        scale = rows.abs().amax(dim=1, keepdim=True).float().clamp_min(torch.finfo(torch.float32).tiny) / 127
        codes = torch.round(rows / scale).clamp_(-127, 127).to(torch.int8)
        return Packed(format, shape, {"codes": codes, "scale": scale})
    return Packed(format, shape, _pack_4bit(weight.reshape(-1), format, double_quant))


def _pack_4bit(flat: torch.Tensor, format: str, double_quant: bool) -> dict[str, torch.Tensor]:
    """As bitsandbytes' `quantize_4bit` (0.50) packs it, to the bit; on the CPU some blocks at a time."""
    bnb = load_bitsandbytes().functional
    step = _CPU_ELEMENTS if flat.device.type == "cpu" else max(flat.numel(), 1)
    parts = [
        bnb.quantize_4bit(some, blocksize=BLOCK_4BIT, compress_statistics=False, quant_type=format)
        for some in flat.split(step)
    ]
    codes, absmax = parts[0][0], parts[0][1].absmax
    if len(parts) > 1:
        codes, absmax = torch.cat([some for some, _ in parts]), torch.cat([state.absmax for _, state in parts])
    if not double_quant:
        return {"codes": codes, "absmax": absmax}
    offset = absmax.mean()
    scales, state = bnb.quantize_blockwise(absmax - offset, blocksize=BLOCK_SCALES)
    return {"codes": codes, "absmax": scales, "absmax2": state.absmax, "offset": offset.float(), "code2": state.code}


def _pack_meta(shape: tuple[int, ...], format: str, double_quant: bool) -> Packed:
    count = math.prod(shape)

    def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    if format == "int8":
        rows = count // shape[-1]
        return Packed(
            format,
            shape,
            {"codes": empty(rows, shape[-1], dtype=torch.int8), "scale": empty(rows, 1, dtype=torch.float32)},
        )

    blocks = -(-count // BLOCK_4BIT)
    tensors = {"codes": empty((count + 1) // 2, 1, dtype=torch.uint8)}
    if double_quant:
        tensors |= {
            "absmax": empty(blocks, dtype=torch.uint8),
            "absmax2": empty(-(-blocks // BLOCK_SCALES), dtype=torch.float32),
            "offset": empty(dtype=torch.float32),
            "code2": empty(256, dtype=torch.float32),
        }
    else:
        tensors["absmax"] = empty(blocks, dtype=torch.float32)
    return Packed(format, shape, tensors)


def unpack(packed: Packed, dtype: torch.dtype, scratch: Scratch | None = None) -> torch.Tensor:
    """The weight in `dtype`: the stored tensor itself when it is dense in that dtype, else a temporary; in `scratch`
    when that is given, where the next user of the scratch overwrites it."""
    tensors = packed.tensors
    if packed.format in DENSE:
        stored = tensors["weight"]
        if stored.dtype == dtype or scratch is None:
            return stored.to(dtype)
        return scratch.take(packed.shape, dtype).copy_(stored)
    if packed.format == "int8":
        make = scratch.take if scratch is not None else functools.partial(torch.empty, device=tensors["codes"].device)
        weight = make(tuple(tensors["codes"].shape), dtype=dtype)
        # computed in fp32 and rounded once, without an fp32 copy of the weight
        torch.mul(tensors["codes"], tensors["scale"], out=weight)
        return weight.view(packed.shape)
    absmax = tensors["absmax"]
    if absmax.device.type == "meta":  # what the ops below allocate, without the second that importing them takes
        if "absmax2" in tensors:
            absmax = torch.empty(absmax.shape, dtype=torch.float32, device="meta")
        make = scratch.take if scratch is not None else functools.partial(torch.empty, device="meta")
        return make(packed.shape, dtype=dtype)
    if native_unpack.fits(tensors["codes"], absmax):
        if "absmax2" in tensors:
            absmax = native_unpack.scales(absmax, tensors["absmax2"], tensors["code2"], tensors["offset"], BLOCK_SCALES)
        make = scratch.take if scratch is not None else functools.partial(torch.empty, device=absmax.device)
        weight = make(packed.shape, dtype=dtype)
        native_unpack.weight(tensors["codes"], absmax, packed.format, BLOCK_4BIT, weight)
        return weight
    if "absmax2" in tensors:
        absmax = torch.ops.bitsandbytes.dequantize_blockwise(
            absmax, tensors["absmax2"], tensors["code2"], BLOCK_SCALES, torch.float32
        )
        absmax += tensors["offset"]
    # Blocks run across rows, but bitsandbytes' CPU kernel (0.50.2) reads wrong scales unless rows are whole blocks.
    shape = packed.shape if packed.shape[-1] % BLOCK_4BIT == 0 else (math.prod(packed.shape),)
    if scratch is not None:
        weight = scratch.take(shape, dtype)
        torch.ops.bitsandbytes.dequantize_4bit.out(
            tensors["codes"], absmax, BLOCK_4BIT, packed.format, shape, dtype, out=weight
        )
        return weight.view(packed.shape)
    weight = torch.ops.bitsandbytes.dequantize_4bit(tensors["codes"], absmax, BLOCK_4BIT, packed.format, shape, dtype)
    return weight.view(packed.shape)


def bytes_per_parameter(format: str, double_quant: bool) -> float:
    """Storage per weight, scales included, for large tensors (the constants of double quantisation left out)."""
    if format in DENSE:
        return float(torch.empty((), dtype=DENSE[format]).element_size())
    if format == "int8":
        return 1.0
    return 0.5 + (1 + 4 / BLOCK_SCALES) / BLOCK_4BIT if double_quant else 0.5 + 4 / BLOCK_4BIT
