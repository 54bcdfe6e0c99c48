"""The Triton kernel of AdamW with 8-bit state (`fitune.engine.streamed_update`). Imported where a GPU runs it.

State as bitsandbytes 0.50 keeps it: per moment one byte per value, an index into an ascending table of 256 values, and
one fp32 scale per 256 values, their largest absolute value ("8-bit Optimizers via Block-wise Quantization", T. Dettmers
et al., arXiv 2110.02861). The arithmetic is that of the library's kernel for CUDA, in its order: the update comes from
the moments before they are rounded, weight decay is applied last, and elements whose gradient is not finite stay and
lose their moments. Here divisions and roots are rounded correctly and powers are exact; there they are the GPU's fast
ones, so that moments in the middle between two values of the table may be rounded to the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

_BLOCKS = 4  # of 256 values, in a program. (Chosen, not measured.)


@triton.jit
def _moment(codes_ptr, table, scale, at, inside):
    """Values of a moment from their codes."""
    codes = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    return tl.load(table + codes) * scale[:, None]


@triton.jit
def _largest(moment):
    """Of each row; and what the row is divided by, 1 where all is zero."""
    largest = tl.max(tl.abs(moment), axis=1)
    return largest, tl.where(largest > 0.0, largest, 1.0)


@triton.jit
def _nearest(x, table):
    """Index of the nearest value of the table; of the lower one where two are as near."""
    code = tl.zeros_like(x).to(tl.int32)
    for i in tl.static_range(8):  # the last that is below x, or the first
        further = code + (128 >> i)
        code = tl.where(tl.load(table + further) < x, further, code)
    above = tl.minimum(code + 1, 255)
    middle = (tl.load(table + code) + tl.load(table + above)) * 0.5
    return tl.where(x > middle, above, code)


@triton.jit(do_not_specialize=["num_elements"])
def adamw8bit_kernel(
    master_ptr,
    grad_ptr,
    codes1_ptr,
    codes2_ptr,
    scales1_ptr,
    scales2_ptr,
    table1,
    table2,
    num_elements,
    step_size,
    eps,
    kept,
    beta1,
    beta2,
    rest1,
    rest2,
    BLOCKS: tl.constexpr,
):
    """One program per `BLOCKS` rows of 256 values. `step_size` < 0 and `eps` hold the step's bias corrections; `kept`
    is what weight decay leaves of a value, `rest` 1 - beta."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * 256 + tl.arange(0, 256)[None, :]
    inside, begun = at < num_elements, block * 256 < num_elements
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
    master = tl.load(master_ptr + at, mask=inside, other=0.0)
    finite = tl.abs(grad) < float("inf")  # false for NaN
    first = _moment(codes1_ptr, table1, tl.load(scales1_ptr + block, mask=begun, other=0.0), at, inside)
    second = _moment(codes2_ptr, table2, tl.load(scales2_ptr + block, mask=begun, other=0.0), at, inside)
    first = tl.where(inside & finite, first * beta1 + rest1 * grad, 0.0)
    second = tl.where(inside & finite, second * beta2 + rest2 * grad * grad, 0.0)

    updated = (master + step_size * tl.div_rn(first, tl.sqrt_rn(second) + eps)) * kept
    tl.store(master_ptr + at, tl.where(finite, updated, master), mask=inside)

    largest, divisor = _largest(first)
    code = _nearest(tl.div_rn(first, tl.broadcast_to(divisor[:, None], first.shape)), table1)
    # As in the library a negative moment never becomes zero: it takes the value below.
    code = tl.where((first < 0.0) & (tl.load(table1 + code) >= 0.0), code - 1, code)
    tl.store(codes1_ptr + at, code.to(tl.uint8), mask=inside)
    tl.store(scales1_ptr + block, largest, mask=begun)
    largest, divisor = _largest(second)
    code = _nearest(tl.div_rn(second, tl.broadcast_to(divisor[:, None], second.shape)), table2)
    tl.store(codes2_ptr + at, code.to(tl.uint8), mask=inside)
    tl.store(scales2_ptr + block, largest, mask=begun)


def launch(
    master: torch.Tensor,
    grad: torch.Tensor,
    codes: list[torch.Tensor],
    scales: list[torch.Tensor],
    tables: list[torch.Tensor],
    *,
    step_size: float,
    eps: float,
    kept: float,
    betas: tuple[float, float],
) -> None:
    """One update in place, on the current stream of the current device; no memory is allocated.

    Args:
        master, grad: fp32, contiguous, as many elements as each of the two `codes` (uint8), fewer than 2**31.
        scales: fp32, one per 256 elements of a moment.
        tables: 256 ascending fp32 values; that of the first moment holds 0.
        step_size, eps, kept: see the kernel.
    """
    grid: Any = (-(-master.numel() // (256 * _BLOCKS)),)
    adamw8bit_kernel[grid](
        master, grad, *codes, *scales, *tables, master.numel(), step_size, eps, kept, *betas,
        *(float(np.float32(1) - np.float32(beta)) for beta in betas), BLOCKS=_BLOCKS,
    )  # fmt: skip
