"""Attention as transformers' models call it, exact and document-safe, without a mask of T x T.

Registered under the name `fitune` (transformers' AttentionInterface); with an unregistered mask function transformers
passes no mask, and causality, documents, sliding windows, soft-capping and sinks are handled here.

Shapes: B rows, H query heads, K key heads, T tokens, D head size. Models pass query [B, H, T, D], key and value
[B, K, T, D], and expect [B, T, H, D] back. Right padding needs no mask: a token never attends to a later one.

Kernels: `flash` (CUDA, 16-bit, compute capability >= 8.0), `efficient` (CUDA otherwise), `cpu` (torch's fused CPU
kernel), `blockwise` (plain torch on blocks of queries, for what the kernels cannot do). The fused kernels are called
as the ATen ops themselves, whose meta implementations give the same outputs and saved tensors, so that a trace on
`meta` sees what the GPU will hold.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch

from fitune.errors import UserError
from fitune.model.linear import StepContext

NAME = "fitune"
_BLOCK_QUERIES = 256  # rows of scores that exist at once in the blockwise kernel
_aten = torch.ops.aten


def register() -> None:
    """Make `attn_implementation="fitune"` known to transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)


def uses_interface(model_class: type) -> bool:
    """Whether a transformers class calls attention through the interface (its own flag says less: it is about vLLM)."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[model_class.__module__])


def packs(model_class: type) -> bool:
    """Whether the attention of a class tells packed records apart: by the positions that it is given."""
    return not any(counts_tokens(c) for c in vars(sys.modules[model_class.__module__]).values() if isinstance(c, type))


def counts_tokens(cls: Any) -> bool:
    """Whether an attention class takes positions from its input's length instead of those it is given (Llama 4)."""
    return "Attention" in cls.__name__ and "forward" in vars(cls) and "torch.arange(" in inspect.getsource(cls.forward)


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers' attention modules call. Returns ([B, T, H, D], None)."""
    assert dropout == 0.0, "models run in eval mode: attention dropout is not applied"
    if attention_mask is not None:  # transformers makes none for this function: it is the model's own
        raise UserError(
            f"cannot train a model with {type(module).__name__}",
            "its attention chooses tokens by a mask of its own, which fused kernels do not take",
            "use a model with plain attention such as Llama, Qwen, Mistral, Gemma, Phi, OLMo or GLM",
        )
    context: StepContext = module.fitune_context
    num_tokens = query.shape[2]
    if key.shape[2] != num_tokens:
        # the cache of such a layer holds one stretch: what comes later is not told apart (`fitune.train.sampling`)
        assert _chunk_of(module, key.shape[2]) is None, "answers longer than a stretch are made without a cache"
        return _decode(query, key, value, s_aux, scaling, sliding_window, softcap), None
    window = sliding_window if sliding_window is not None and sliding_window < num_tokens else None
    chunk = _chunk_of(module, num_tokens)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    plain = softcap is None and s_aux is None and query.shape[-1] == value.shape[-1]
    kernel = context.attention
    if kernel == "flash" and plain and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256:
        return _flash(query, key, value, context, scale, window, chunk), None
    if kernel in ("cpu", "efficient") and plain and window is None:
        return _per_document(query, key, value, context, scale, kernel, chunk), None
    out = _Blockwise.apply(query, key, value, s_aux, scale, window, softcap, _documents(context, query, chunk))
    return out.transpose(1, 2).contiguous(), None  # some classes take a view of it (Afmoe); the others copy it anyway


def _chunk_of(module: Any, num_tokens: int) -> int | None:
    """Tokens of the stretches into which a layer cuts every document, none of which sees another (Llama 4, whose other
    layers see all); None where a row of so many tokens has one only. transformers says so in a mask, which is not made.
    """
    config = getattr(module, "config", None)
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    if config is None or chunk is None or num_tokens <= chunk:
        return None
    return chunk if config.layer_types[module.layer_idx] == "chunked_attention" else None


def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One new token [B, H, 1, D] over the keys of a cache (generation only). Returns [B, 1, H, D]."""
    assert query.shape[2] == 1, "a cache is read one token at a time"
    if window is not None:
        key, value = key[:, :, -window:], value[:, :, -window:]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    scores = _grouped(query, key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    lse = torch.logsumexp(scores, -1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(1, -1, 1, 1))
    return _grouped(torch.exp(scores - lse).to(value.dtype), value).transpose(1, 2)


def _documents(
    context: StepContext, query: torch.Tensor, chunk: int | None = None
) -> tuple[tuple[int, int, int], ...]:  # fmt: skip
    """(row, start, end) of every document; row -1 stands for all rows at once. With `chunk`, of every stretch of so
    many tokens of a document, row by row."""
    if chunk is not None:
        return tuple(
            (one, first, min(first + chunk, end))
            for row, start, end in _documents(context, query)
            for one in (range(query.shape[0]) if row < 0 else (row,))
            for first in range(start, end, chunk)
        )
    num_tokens = query.shape[2]
    if context.doc_lengths is None:
        return ((-1, 0, num_tokens),)
    documents = []
    for row, lengths in enumerate(context.doc_lengths):
        start = 0
        for length in lengths:
            documents.append((row, start, start + length))
            start += length
        if start < num_tokens:
            documents.append((row, start, num_tokens))  # padding attends to itself: harmless and finite
    return tuple(documents)


def _rows(row: int) -> slice:
    return slice(None) if row < 0 else slice(row, row + 1)


class _Flash(torch.autograd.Function):
    """FlashAttention-2 as torch ships it (aten::_flash_attention_forward): layout [B, T, H, D] or packed [N, H, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        longest: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        left, right = (window - 1, 0) if window is not None else (-1, -1)
        out, lse, rng, unused, _ = _aten._flash_attention_forward(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            0.0,
            True,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        ctx.save_for_backward(q, k, v, out, lse, rng, unused, cu_seqlens)
        ctx.settings = (longest, scale, left, right)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, rng, unused, cu_seqlens = ctx.saved_tensors
        grad = grads[0].contiguous()
        key_heads = k.shape[-2]
        pieces = _pieces_of_heads(q, key_heads)
        if pieces == 1:
            parts = _flash_backward(grad, q, k, v, out, lse, rng, unused, cu_seqlens, ctx.settings)
            return *parts, None, None, None, None
        whole = [torch.empty_like(t) for t in (q, k, v)]
        for piece in range(pieces):
            keys = slice(piece * key_heads // pieces, (piece + 1) * key_heads // pieces)
            groups = q.shape[-2] // key_heads
            queries = slice(keys.start * groups, keys.stop * groups)
            parts = _flash_backward(
                grad[..., queries, :], q[..., queries, :], k[..., keys, :], v[..., keys, :], out[..., queries, :],
                lse[..., queries, :].contiguous(), rng, unused, cu_seqlens, ctx.settings,
            )  # fmt: skip
            for total, heads, part in zip(whole, (queries, keys, keys), parts, strict=True):
                total[..., heads, :] = part
            del parts, part
        return *whole, None, None, None, None


_ACCUMULATOR_BYTES = 256 * 2**20


def _pieces_of_heads(q: torch.Tensor, key_heads: int) -> int:
    """In how many pieces the backward pass goes through the heads, which are independent of each other: on long rows
    the kernel's own buffers (fp32 sums of dq, gradients of every query head's key) take as much as a layer's input
    several times over. One piece below 512 MiB of sums; else pieces of 256 MiB, as far as key heads divide."""
    pieces = 1
    if q.numel() * 4 < 2 * _ACCUMULATOR_BYTES:
        return pieces
    while key_heads % (2 * pieces) == 0 and q.numel() * 4 > pieces * _ACCUMULATOR_BYTES:
        pieces *= 2
    return pieces


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rng: torch.Tensor,
    unused: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    settings: tuple[int, float, int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of some heads, with what the kernel allocates on the way."""
    longest, scale, left, right = settings
    if q.is_meta:  # what the CUDA op does first (torch 2.11, attention_backward.cu); of some heads these are copies
        grad, out = grad.contiguous(), out.contiguous()
    dq, dk, dv = _aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        0.0,
        True,
        rng,
        unused,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    if dk.device.type == "meta":
        _allocate_as_the_kernel(q, dk, dv, None if cu_seqlens is None else cu_seqlens.shape[0] - 1)
    return dq, dk, dv


def _allocate_as_the_kernel(q: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, num_documents: int | None) -> None:
    """What the CUDA kernel's host code makes besides its results, in its order: a sum per query, an fp32 accumulator of
    dq, and for grouped heads gradients of every query head, which it then adds up into those of the key heads.

    Source: torch 2.11 (`mha_bwd`, `mha_varlen_bwd` of FlashAttention 2), held to records of an H200
    (tests/memory/test_cuda_events.py) for rows that are not packed.
    """
    num_heads, size = q.shape[-2:]
    wide = -(-size // 32) * 32 if size <= 192 else 256
    if num_documents is None:
        padded = -(-q.shape[1] // 128) * 128
        shapes: tuple[tuple[int, ...], ...] = ((q.shape[0], num_heads, padded), (q.shape[0], padded, num_heads, wide))
    else:
        padded = q.shape[0] + 128 * num_documents
        shapes = ((num_heads, padded), (padded, num_heads, wide))
    per_query = torch.empty(shapes[0], dtype=torch.float32, device=q.device)
    accumulator = torch.empty(shapes[1], dtype=torch.float32, device=q.device)
    groups = num_heads // dk.shape[-2]
    if groups > 1:
        dk_expanded = torch.empty(q.shape, dtype=dk.dtype, device=q.device)
        dv_expanded = torch.empty(q.shape, dtype=dk.dtype, device=q.device)
        for expanded, total in ((dk_expanded, dk), (dv_expanded, dv)):
            torch.sum(expanded.view(*dk.shape[:-1], groups, size), -2, out=total)
        del expanded, dv_expanded, dk_expanded
    del accumulator, per_query


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: StepContext, scale: float,
    window: int | None, chunk: int | None,
) -> torch.Tensor:  # fmt: skip
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # [B, T, H, D]
    if context.doc_lengths is None and chunk is None:
        return _Flash.apply(q, k, v, None, q.shape[1], scale, window)
    documents = _documents(context, query, chunk)
    longest = max(end - start for _, start, end in documents)
    bounds = context.cu_seqlens
    if chunk is not None:
        ends = [row * q.shape[1] + end for row, _, end in documents]
        bounds = torch.tensor([0, *ends], dtype=torch.int32, device=q.device)
    packed = [t.reshape(-1, *t.shape[2:]) for t in (q, k, v)]
    return _Flash.apply(*packed, bounds, longest, scale, window).view(q.shape)


class _Fused(torch.autograd.Function):
    """One causal block through the CPU's fused kernel or CUDA's memory-efficient one. Layout [B, H, T, D]."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kernel: str) -> torch.Tensor:
        ctx.scale, ctx.kernel = scale, kernel
        if kernel == "cpu":
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            out, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, True, scale=scale
            )
            ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.kernel == "cpu":
            q, k, v, out, lse = ctx.saved_tensors
            dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grads[0], q, k, v, out, lse, 0.0, True, scale=ctx.scale
            )
        else:
            q, k, v, out, lse, seed, offset = ctx.saved_tensors
            dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
                grads[0], q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], True, scale=ctx.scale
            )
        return dq, dk, dv, None, None


def _per_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: StepContext, scale: float, kernel: str,
    chunk: int | None,
) -> torch.Tensor:  # fmt: skip
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    documents = _documents(context, query, chunk)
    parts = []
    for row, start, end in documents:
        q, k, v = (t[_rows(row), :, start:end] for t in (query, key, value))
        parts.append(_Fused.apply(q, k, v, scale, kernel).transpose(1, 2))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([p.reshape(-1, *p.shape[2:]) for p in parts]).view(
        query.shape[0], query.shape[2], query.shape[1], query.shape[3]
    )


class _Blockwise(torch.autograd.Function):
    """Exact attention on blocks of queries in plain torch: causal, windowed, soft-capped, with sinks, grouped heads.

    Saves query, key, value, the output and the log-sum-exp; probabilities are recomputed per block in backward
    (the recurrences of FlashAttention, https://arxiv.org/abs/2205.14135, without its tiling over keys).
    Scores and their gradients are fp32. Returns [B, H, T, D].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        documents: tuple[tuple[int, int, int], ...],
    ) -> torch.Tensor:
        out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        for row, queries, keys in _blocks(documents, window):
            scores, _ = _scores(q, k, row, queries, keys, scale, window, softcap)
            block_lse = _logsumexp(scores)
            if sinks is not None:
                block_lse = torch.logaddexp(block_lse, sinks.float().view(1, -1, 1))
            probs = torch.exp(scores.sub_(block_lse[..., None]))
            out[row, :, queries] = _grouped(probs.to(v.dtype), v[row, :, keys])
            lse[row, :, queries] = block_lse
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.settings = (scale, window, softcap, documents)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        scale, window, softcap, documents = ctx.settings
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k, v))
        d_sinks = torch.zeros_like(sinks, dtype=torch.float32) if sinks is not None else None
        g = grads[0]
        groups = q.shape[1] // k.shape[1]
        for row, queries, keys in _blocks(documents, window):
            scores, capped = _scores(q, k, row, queries, keys, scale, window, softcap)
            block_lse = lse[row, :, queries]
            probs = torch.exp(scores.sub_(block_lse[..., None]))
            g_blk, o_blk = g[row, :, queries], out[row, :, queries]
            dv[row, :, keys] += _reduced(probs.to(g.dtype), g_blk, groups)
            d_probs = _grouped(g_blk, v[row, :, keys].transpose(-1, -2)).float()
            delta = (g_blk.float() * o_blk.float()).sum(-1)
            if d_sinks is not None:
                p_sink = torch.exp(sinks.float().view(1, -1, 1) - block_lse)
                d_sinks -= (p_sink * delta).sum((0, 2))
            d_scores = d_probs.sub_(delta[..., None]).mul_(probs)
            if capped is not None:
                d_scores.mul_(1 - capped.square_())
            d_scores = d_scores.mul_(scale).to(q.dtype)
            dq[row, :, queries] = _grouped(d_scores, k[row, :, keys])
            dk[row, :, keys] += _reduced(d_scores, q[row, :, queries], groups)
        d_sinks = d_sinks.to(sinks.dtype) if d_sinks is not None else None
        return dq, dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None, None, None


def _logsumexp(scores: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, in the steps of torch's own, so that a trace sees what they allocate."""
    highest = scores.amax(-1, keepdim=True)
    finite = highest.squeeze(-1)
    sizes = finite.abs()
    finite.masked_fill_(sizes == float("inf"), 0.0)
    del sizes
    total = (scores - highest).exp_().sum(-1)
    return total.log_().add_(finite)


def _blocks(documents: tuple[tuple[int, int, int], ...], window: int | None) -> Iterator[tuple[slice, slice, slice]]:
    """(rows, queries, keys) of each block; keys reach back to the document's start or the window's."""
    for row, start, end in documents:
        for first in range(start, end, _BLOCK_QUERIES):
            last = min(first + _BLOCK_QUERIES, end)
            earliest = start if window is None else max(start, first - window + 1)
            yield _rows(row), slice(first, last), slice(earliest, last)


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    row: slice,
    queries: slice,
    keys: slice,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fp32 scores [B, H, queries, keys], and the tanh of the soft-cap (for its derivative)."""
    scores = _grouped(q[row, :, queries], k[row, :, keys].transpose(-1, -2)).float().mul_(scale)
    capped = None
    if softcap is not None:
        capped = torch.tanh(scores.div_(softcap))
        scores = capped * softcap
    query_at = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
    key_at = torch.arange(keys.start, keys.stop, device=q.device)[None, :]
    forbidden = key_at > query_at
    if window is not None:
        forbidden |= key_at <= query_at - window
    return scores.masked_fill_(forbidden, float("-inf")), capped


def _grouped(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [B, H, M, N] @ right [B, K, N, P] where each of the K heads serves H / K query heads."""
    B, H, M, N = left.shape
    K = right.shape[1]
    if H == K:
        return left @ right
    return (left.reshape(B, K, H // K * M, N) @ right).view(B, H, M, right.shape[-1])


def _reduced(left: torch.Tensor, right: torch.Tensor, groups: int) -> torch.Tensor:
    """sum over query heads of one group of left^T [.., N, M] @ right [.., M, P]; returns fp32 [B, K, N, P]."""
    B, H, M, N = left.shape
    K = H // groups
    return (
        left.reshape(B, K, groups * M, N).transpose(-1, -2) @ right.reshape(B, K, groups * M, right.shape[-1])
    ).float()
