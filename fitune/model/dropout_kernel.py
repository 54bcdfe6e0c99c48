"""The Triton kernel of counter dropout (`fitune.model.dropout`). Imported where a GPU runs it, and nowhere else."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scrambled(h):
    """lowbias32 on int32; `>>` is arithmetic, so its sign bits are masked off."""
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * 0x7FEB352D
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * -2073254261  # 0x846CA68B
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def dropout_kernel(
    x_ptr,
    out_ptr,
    keys_ptr,
    num_features,
    row_stride,
    feature_stride,
    module_key,
    first,
    threshold,
    scale,
    BLOCK: tl.constexpr,
):
    """One program per row and block of features, of which column 0 is feature `first`; `out` is contiguous."""
    row = tl.program_id(0)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < num_features
    key = tl.load(keys_ptr + row) ^ module_key
    h = _scrambled(((feature + first) * -1640531535) ^ key) & 0x7FFFFFFF  # 0x9E3779B1
    x = tl.load(x_ptr + row.to(tl.int64) * row_stride + feature * feature_stride, mask=inside)
    kept = tl.where(h >= threshold, x.to(tl.float32) * scale, 0.0)
    tl.store(out_ptr + row.to(tl.int64) * num_features + feature, kept.to(x.dtype), mask=inside)
