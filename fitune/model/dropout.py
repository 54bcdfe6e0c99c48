"""Dropout whose masks come from a counter, not from a generator's state.

A mask bit is a hash of (seed, optimizer step, record, position in the record, module, feature). It does not depend on
the micro-batch, the order of layers, recomputation or the rank, so accumulation, packing, activation checkpointing
and resuming stay exact with dropout on. The hash is a 32-bit multiply-xorshift finaliser ("lowbias32", C. Wellons,
https://github.com/skeeto/hash-prospector); its constants are facts of that search.
"""

from __future__ import annotations

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


def apply(x: torch.Tensor, p: float, keys: torch.Tensor, module_key: int) -> torch.Tensor:
    """`x` [N, F] with a share `p` of its elements zeroed and the rest scaled by 1 / (1 - p). Linear in x.

    `keys` [N] int32 as from `token_keys`. The same call on a gradient is the backward pass.
    """
    num_features = x.shape[1]
    out = torch.empty_like(x)
    threshold = int(p * (_MASK31 + 1))
    features = torch.arange(num_features, dtype=torch.int32, device=x.device) * _signed(_GOLDEN)
    keys = keys ^ module_key
    rows = max(1, _CHUNK_ELEMENTS // num_features)
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        h = _scramble(keys[part, None] ^ features[None, :])
        h &= _MASK31
        torch.mul(x[part], h >= threshold, out=out[part])
    return out.mul_(1 / (1 - p))
