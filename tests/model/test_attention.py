"""Attention kernels against a plain fp32 reference with an explicit mask."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from fitune.errors import UserError
from fitune.model import attention
from fitune.model.attention import attention_forward
from fitune.model.linear import StepContext


class _Module:
    layer_idx = 1

    def __init__(self, context, chunk=None):
        self.fitune_context = context
        types = ["full_attention", "chunked_attention"]
        self.config = SimpleNamespace(attention_chunk_size=chunk, layer_types=types)


def reference(q, k, v, scale, documents, window, softcap, sinks):
    """Plain attention in fp64 with a mask: [B, H, T, D] in, [B, T, H, D] out."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    rows, tokens = q.shape[0], q.shape[2]
    at = torch.arange(tokens, device=q.device)
    allowed = at[None, :] <= at[:, None]
    if window:
        allowed = allowed & (at[None, :] > at[:, None] - window)
    allowed = allowed.expand(rows, tokens, tokens).clone()
    if documents is not None:
        for row, lengths in enumerate(documents):
            owner = torch.repeat_interleave(
                torch.arange(len(lengths) + 1, device=q.device),
                torch.tensor([*lengths, tokens - sum(lengths)], device=q.device),
            )
            allowed[row] &= owner[:, None] == owner[None, :]
    scores = scores.masked_fill(~allowed[:, None], float("-inf"))
    if sinks is not None:
        sink = sinks.double().view(1, -1, 1, 1).expand(rows, -1, tokens, 1)
        probs = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    else:
        probs = torch.softmax(scores, -1)
    return (probs @ v).transpose(1, 2)


CASES = {
    "causal": {},
    "grouped heads": dict(heads=8, kv_heads=2),
    "packed": dict(documents=((30, 20, 9), (64,))),
    "window": dict(window=16),
    "window, packed": dict(window=16, documents=((40, 20), (30, 30))),
    "soft-capped": dict(softcap=5.0),
    "sinks": dict(sinks=True, window=16),
    "value size differs": dict(value_dim=32),
    "chunks": dict(chunk=24),
    "chunks, packed": dict(chunk=16, documents=((40, 20), (30, 30))),
    "long": dict(tokens=700, documents=((300, 350), (700,))),
}


def run_case(
    kernel,
    dtype,
    device,
    *,
    heads=4,
    kv_heads=4,
    tokens=64,
    dim=16,
    value_dim=None,
    documents=None,
    window=None,
    softcap=None,
    sinks=False,
    chunk=None,
):
    torch.manual_seed(0)
    make = lambda h, d: torch.randn(2, h, tokens, d, device=device).to(dtype).requires_grad_()  # noqa: E731
    q, k, v = make(heads, dim), make(kv_heads, dim), make(kv_heads, value_dim or dim)
    sink = torch.randn(heads, device=device).to(dtype).requires_grad_() if sinks else None
    context = StepContext(attention=kernel, doc_lengths=documents)
    if documents is not None and device == "cuda":
        bounds = [0]
        for lengths in documents:
            for length in [*lengths, tokens - sum(lengths)]:
                bounds += [bounds[-1] + length] if length else []
        context.cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    out, _ = attention_forward(
        _Module(context, chunk), q, k, v, scaling=0.2, sliding_window=window, softcap=softcap, s_aux=sink
    )
    leaves = [t for t in (q, k, v, sink) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    apart = documents
    if chunk is not None:  # a stretch is as a document of its own
        whole = documents or ((tokens,), (tokens,))
        apart = [[min(chunk, length - at) for length in row for at in range(0, length, chunk)] for row in whole]
    expected = reference(*wide[:3], 0.2, apart, window, softcap, wide[3] if sinks else None)
    real = torch.zeros(2, tokens, dtype=torch.bool, device=device)
    for row in range(2):
        real[row, : sum(documents[row]) if documents else tokens] = True
    grad = torch.randn_like(expected) * real[..., None, None]
    ours = [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]
    theirs = [expected, *torch.autograd.grad(expected, wide, grad)]
    ours[0], theirs[0] = ours[0] * real[..., None, None], theirs[0] * real[..., None, None]
    return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("kernel", ["cpu", "blockwise"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cpu_kernels_equal_plain_attention(case, kernel):
    assert max(run_case(kernel, torch.float32, "cpu", **case)) < 5e-6


def test_a_layer_that_sees_all_has_no_chunks():
    module = _Module(None, chunk=16)
    assert attention._chunk_of(module, 17) == 16 and attention._chunk_of(module, 16) is None
    module.layer_idx = 0
    assert attention._chunk_of(module, 17) is None


def test_bounds_of_chunks_for_the_flash_kernel(monkeypatch):
    """Cumulative over both rows, each stretch and what is padding by itself."""
    seen = []
    monkeypatch.setattr(attention._Flash, "apply", lambda q, k, v, bounds, longest, *rest: (seen.append(
        (bounds.tolist(), longest)), q)[1])  # fmt: skip
    q = torch.randn(2, 4, 40, 16)
    for documents in (None, ((20, 15), (40,))):
        context = StepContext(attention="flash", doc_lengths=documents)
        assert attention_forward(_Module(context, 16), q, q, q)[0].shape == (2, 40, 4, 16)
    assert seen == [([0, 16, 32, 40, 56, 72, 80], 16), ([0, 16, 20, 35, 40, 56, 72, 80], 16)]


def test_a_mask_of_the_models_own_is_refused():
    q = torch.randn(1, 4, 8, 16)
    with pytest.raises(UserError, match="chooses tokens by a mask of its own"):
        attention_forward(_Module(StepContext()), q, q, q, torch.zeros(1, 1, 8, 8))


@pytest.mark.parametrize(
    ("name", "whether"),
    [("Llama4ForCausalLM", False), ("LlamaForCausalLM", True), ("GptOssForCausalLM", True), ("Qwen3ForCausalLM", True)],
)
def test_attention_that_counts_tokens_cannot_pack(name, whether):
    assert attention.packs(getattr(transformers, name)) is whether


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kernel", ["flash", "efficient"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cuda_kernels_equal_plain_attention(case, kernel, dtype):
    """Error relative to the largest value: a few roundings of the dtype."""
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert max(run_case(kernel, dtype, "cuda", **case)) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["grouped heads", "packed", "window, packed"])
def test_heads_in_pieces_on_cuda(case, monkeypatch):
    """A long row's backward pass goes through the heads piece by piece: within the same few roundings."""
    monkeypatch.setattr(attention, "_ACCUMULATOR_BYTES", 8 * 1024)
    assert max(run_case("flash", torch.bfloat16, "cuda", **CASES[case])) < 2e-2


def test_heads_in_pieces_are_put_together(monkeypatch):
    """Each piece gets its own heads of everything, and its gradients come to their places. (The kernel, which needs a
    GPU, stands aside for one whose results say which heads it was given.)"""
    heads, key_heads, calls = 8, 4, []

    def backward(grad, q, k, v, out, lse, rng, unused, cu_seqlens, settings):
        calls.append(q.shape[-2])
        groups = q.shape[-2] // k.shape[-2]
        dq = grad * lse.mT[..., None] + out
        return dq, k * 2 + q.unflatten(-2, (-1, groups)).sum(-2), v * 3

    monkeypatch.setattr(attention, "_flash_backward", backward)
    make = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[-2]))  # noqa: E731
    q, k, v = make(1, 32, heads, 16), make(1, 32, key_heads, 16), make(1, 32, key_heads, 16) + 1
    grad, out, lse = make(1, 32, heads, 16) - 1, make(1, 32, heads, 16) * 2, make(1, heads, 32)

    class Context:
        saved_tensors, settings = (q, k, v, out, lse, None, None, None), (32, 1.0, -1, 0)

    whole = attention._Flash.backward(Context, grad)[:3]
    assert calls == [heads]
    monkeypatch.setattr(attention, "_ACCUMULATOR_BYTES", q.numel() * 4 // 4)
    pieces = attention._Flash.backward(Context, grad)[:3]
    assert calls == [heads, 2, 2, 2, 2]
    assert all(torch.equal(a, b) for a, b in zip(pieces, whole, strict=True))


def test_heads_stay_together_on_short_rows():
    q = torch.empty(1, 16_383, 32, 128, device="meta")
    assert attention._pieces_of_heads(q, 8) == 1
    assert attention._pieces_of_heads(q.new_empty(1, 65_536, 32, 128), 8) == 4
    assert attention._pieces_of_heads(q.new_empty(1, 65_536, 32, 128), 1) == 1, "one key head cannot be cut"
