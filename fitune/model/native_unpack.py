"""bitsandbytes' unpacking kernels, called in its library directly.

Its operators go through torch's dispatcher, checks and device guards in Python: on a machine whose processor is the
limit (short rows on a fast card) that took several times as long as the kernel's launch. The kernels, their arguments
and so the bits are the same. What is not as expected (another build of the library, a tensor that is not in one piece)
goes the operators' way.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_Kernel = Callable[[int | None, int, int, int, int, int, int], None]
# (code or NULL, packed, scales, out, values per scale, values, stream); backends/cuda/ops.py of bitsandbytes 0.49 and
# 0.50; from 0.50 on the library's own functions say so too
_ARGUMENTS = [*[ctypes.c_void_p] * 4, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
_PROTOTYPE = ctypes.CFUNCTYPE(None, *_ARGUMENTS)
_MOST_VALUES = 2**31 - 1  # they are counted in a C int
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Kernels:
    """`four_bits` by (format, dtype of the result); `scales` gives fp32."""

    four_bits: Mapping[tuple[str, torch.dtype], _Kernel]
    scales: _Kernel


@functools.cache
def kernels() -> Kernels | None:
    """Of the library that bitsandbytes has loaded; None where it has none for CUDA."""
    if torch.version.cuda is None:
        return None
    try:
        from bitsandbytes.cextension import lib

        library = lib._lib
        if not _takes_these(library.cdequantize_blockwise_fp32, library.cdequantize_blockwise_bf16_nf4):
            return None
        found = {(format, dtype): _PROTOTYPE((f"cdequantize_blockwise_{name}_{format}", library))
                 for format in ("nf4", "fp4") for dtype, name in _NAMES.items()}  # fmt: skip
        return Kernels(found, _PROTOTYPE(("cdequantize_blockwise_fp32", library)))
    except (ImportError, AttributeError):  # another version, or a build for another kind of processor
        return None


def _takes_these(*functions: Any) -> bool:
    """Whether nothing else is declared: with other arguments a kernel would write anywhere."""
    return all(f.argtypes is None or list(f.argtypes) == _ARGUMENTS for f in functions)


def fits(codes: torch.Tensor, absmax: torch.Tensor) -> bool:
    """Whether a packed weight can be unpacked here: on the CUDA device in use, in one piece."""
    return (
        codes.is_cuda
        and codes.is_contiguous()
        and absmax.is_contiguous()
        and 2 * codes.numel() <= _MOST_VALUES
        and codes.get_device() == torch._C._cuda_getDevice()
        and kernels() is not None
    )


def scales(
    absmax: torch.Tensor, absmax2: torch.Tensor, code2: torch.Tensor, offset: torch.Tensor, values_per_scale: int
) -> torch.Tensor:
    """Scales [n] in fp32 of doubly quantised ones [n] uint8."""
    known = kernels()
    assert known is not None
    made = torch.empty_like(absmax, dtype=torch.float32)
    stream = torch._C._cuda_getCurrentRawStream(absmax.get_device())
    known.scales(code2.data_ptr(), absmax.data_ptr(), absmax2.data_ptr(), made.data_ptr(), values_per_scale,
                 absmax.numel(), stream)  # fmt: skip
    return made.add_(offset)


def weight(codes: torch.Tensor, absmax: torch.Tensor, format: str, values_per_scale: int, out: torch.Tensor) -> None:
    """Fill `out`, in one piece, with a weight of 4 bits whose scales are in fp32."""
    known = kernels()
    assert known is not None
    stream = torch._C._cuda_getCurrentRawStream(codes.get_device())
    known.four_bits[format, out.dtype](None, codes.data_ptr(), absmax.data_ptr(), out.data_ptr(), values_per_scale,
                                       out.numel(), stream)  # fmt: skip
