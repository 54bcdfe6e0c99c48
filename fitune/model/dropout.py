"""Dropout whose masks come from a counter, not from a generator's state.

A mask bit is a hash of (seed, optimizer step, record, position in the record, module, feature). It does not depend on
the micro-batch, the order of layers, recomputation or the rank, so accumulation, packing, activation checkpointing
and resuming stay exact with dropout on. The hash is a 32-bit multiply-xorshift finaliser ("lowbias32", C. Wellons,
https://github.com/skeeto/hash-prospector); its constants are facts of that search.

On a GPU one Triton kernel makes the mask and applies it, in place of some forty elementwise kernels over 32-bit hashes.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from typing import Any

import torch

_CHUNK_ELEMENTS = 1 << 22  # the hash works on at most this many elements at once: 2 x 16 MiB of temporaries
_GOLDEN = 0x9E3779B1
_MASK31 = 0x7FFFFFFF


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _scramble(h: torch.Tensor) -> torch.Tensor:
    """lowbias32 in place on int32 (products wrap around; `>>` is arithmetic, so its sign bits are masked off)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h ^= (h >> shift) & ((1 << (32 - shift)) - 1)
        h *= _signed(factor)
    h ^= (h >> 16) & 0xFFFF
    return h


def scramble_int(value: int) -> int:
    """lowbias32 of one Python integer, as a signed 32-bit integer."""
    value &= 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        value ^= value >> shift
        value = (value * factor) & 0xFFFFFFFF
    return _signed(value ^ (value >> 16))


def token_keys(record_ids: torch.Tensor, position_ids: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """One int32 key per token. `record_ids`, `position_ids`: [B, T] int64; returns [B * T]."""
    start = scramble_int(seed ^ scramble_int(step + 1))
    keys = record_ids.to(torch.int32).reshape(-1) * _signed(0x85EBCA6B)
    keys ^= start
    keys = _scramble(keys)
    keys ^= position_ids.to(torch.int32).reshape(-1) * _signed(0xC2B2AE35)
    return _scramble(keys)


def apply(
    x: torch.Tensor, p: float, keys: torch.Tensor, module_key: int, *, first: int = 0, on_cuda: bool = False
) -> torch.Tensor:
    """`x` [N, F] with a share `p` of its elements zeroed and the rest scaled by 1 / (1 - p). Linear in x.

    `keys` [N] int32 as from `token_keys`. The same call on a gradient is the backward pass. `first`: the feature that
    the first column of `x` is, where it is a part of a wider tensor. `on_cuda`: the plan's device is a GPU, also while
    the step runs on meta.
    """
    if x.device.type == "meta" and on_cuda:
        return torch.empty_like(x)
    if x.device.type == "cuda" and x.dtype != torch.float64 and (kernel := _fused(x.device)) is not None:
        return _launch(kernel, x, p, keys, module_key, first)
    return _plain(x, p, keys, module_key, first)


def _plain(x: torch.Tensor, p: float, keys: torch.Tensor, module_key: int, first: int = 0) -> torch.Tensor:
    """With torch's own elementwise kernels."""
    num_features = x.shape[1]
    out = torch.empty_like(x)
    threshold = int(p * (_MASK31 + 1))
    features = torch.arange(first, first + num_features, dtype=torch.int32, device=x.device) * _signed(_GOLDEN)
    keys = keys ^ module_key
    rows = max(1, _CHUNK_ELEMENTS // num_features)
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        h = _scramble(keys[part, None] ^ features[None, :])
        h &= _MASK31
        torch.mul(x[part], h >= threshold, out=out[part])
    return out.mul_(1 / (1 - p))


def _launch(
    kernel: Any, x: torch.Tensor, p: float, keys: torch.Tensor, module_key: int, first: int = 0
) -> torch.Tensor:
    """One launch over all elements. The result equals that of `_plain` for finite x."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_rows, num_features = x.shape
    block = min(2048, 1 << max(num_features - 1, 1).bit_length())
    grid = (num_rows, -(-num_features // block))
    if x.numel():
        with torch.cuda.device(x.device):
            kernel[grid](
                x, out, keys, num_features, x.stride(0), x.stride(1), module_key, first, int(p * (_MASK31 + 1)),
                1 / (1 - p),
                BLOCK=block,
            )  # fmt: skip
    return out


@functools.cache
def _fused(device: torch.device) -> Any:
    """The kernel, where Triton is there and can build it (it needs a C compiler); else None, and said once."""
    x = torch.arange(24, dtype=torch.float32, device=device).view(2, 12)
    keys = torch.arange(2, dtype=torch.int32, device=device)
    try:
        from fitune.model.dropout_kernel import dropout_kernel

        if torch.equal(_launch(dropout_kernel, x, 0.5, keys, 7, 3), _plain(x, 0.5, keys, 7, 3)):
            return dropout_kernel
        why = "what it gives is not what plain torch gives"
    except kernel_failures() as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
    logging.getLogger(__name__).warning("LoRA dropout runs without its Triton kernel, which is slower: %s", why)
    return None


def kernel_failures() -> tuple[type[Exception], ...]:
    """What a kernel that cannot be built or run raises: Triton's compiler and `ptxas` an Exception of its own."""
    usual = (ImportError, OSError, RuntimeError, subprocess.SubprocessError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return usual
    return (*usual, TritonError)
