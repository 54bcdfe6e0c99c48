"""LitGPT (and its predecessor lit-gpt): finetune/lora.py and finetune/full.py on one GPU.

Sources, read in litgpt 0.4.13 and 0.5.13: ``litgpt/model.py`` (fp32 RMSNorm, K and V for all heads), ``lora.py``
(one adapter over Q, K and V whose unadapted part is filled with zeros by ``index_copy``), ``finetune/lora.py`` (head in
chunks of 128 tokens, no activation checkpointing on one GPU), ``utils.chunked_cross_entropy``; lightning-fabric 2.6
``plugins/precision``: 16-bit "true" precision, outputs cast to fp32, weights quantised from fp16, the head too; and
bitsandbytes 0.42 ``autograd/_functions.py`` (the version LitGPT pins): ``MatMul4Bit`` keeps its input on ``ctx``.

Left out: LongLoRA, GaLore, mixture of experts, KV cache of the sample generation.
"""

from __future__ import annotations

from dataclasses import replace

from fitune.memory.stacks import constants
from fitune.memory.stacks.prediction import Phase, StackPrediction, Term, settle
from fitune.memory.stacks.settings import StackSettings
from fitune.memory.stacks.sharding import share
from fitune.memory.stacks.storage import fp32_weights, linear_bytes, optimizer
from fitune.units import format_bytes

DROPOUT = 0.05  # lora_dropout of every config in config_hub/finetune


def padded_vocab(vocab: int) -> int:
    """Rows of LitGPT's embedding: ``Config.padded_vocab_size`` rounds up to a multiple of 64 at least."""
    return -(-vocab // 64) * 64


def saved_per_token(s: StackSettings) -> tuple[float, float]:
    """Bytes a token that one layer keeps for backward, and those that bitsandbytes' 4-bit matmul keeps beside.

    16-bit "true" precision, so every activation has two bytes except inside RMSNorm. An unfused dropout's output and
    its one-byte mask are kept by every adapter; a frozen 16-bit linear keeps nothing, a trained one its input. The
    output of flash attention has the layout of Q (batch, heads, tokens, width), so that re-assembling the heads copies.
    """
    m, full, t = s.shape, s.method == "full", set(s.targets)
    h, i, a, kv = m.hidden, m.intermediate, m.attention_width, m.kv_width
    adapter_input = 3 if _dropout(s) else 2  # output and mask; without dropout the input itself
    norm = (4 * h + (4 * h if full else 0)) if m.norm == "rms" else 0.0
    # the fused kernel keeps its 16-bit input, which parallel norms share
    layer_norm = 2 * h * (1 if m.parallel_residual else m.norms_per_layer) if m.norm == "layer" else 0
    total = norm * m.norms_per_layer + layer_norm
    total += 4 * (a + kv) if m.qk_norm else 0
    qkv_adapted = t & {"q", "k", "v"}
    if qkv_adapted:
        total += adapter_input * h
        if qkv_adapted != {"q", "k", "v"}:
            total += 2 * ((a if "q" in t else 0) + kv * len(qkv_adapted - {"q"}))
    whole_qkv = a + 2 * kv
    total += 4 * a + 2 * (whole_qkv if m.heads == m.kv_heads else a)
    total += 8 * m.heads * s.seq_len if m.softcap else 2 * a + 4 * m.heads
    total += (adapter_input * a if "o" in t else 0) + (2 * a if full else 0)
    if m.gated:
        total += 6 * i + adapter_input * h * len(t & {"gate", "up"})
    else:
        total += 2 * i + adapter_input * h * len(t & {"up"})
    total += adapter_input * i if "down" in t else 0
    normed = 2 * h * (1 if m.shared_norm else 2)
    if full:
        total += normed + 2 * i
    four_bit = normed + 2 * a + 2 * i if s.method == "qlora" else 0.0
    return total, four_bit


def _dropout(s: StackSettings) -> float:
    return DROPOUT if s.adapter_dropout is None else s.adapter_dropout


def predict(s: StackSettings) -> StackPrediction:
    """Peak of a LitGPT run. Mean error over the published rows and its sources: docs/stacks.md."""
    m = s.shape
    vocab = padded_vocab(m.vocab)
    element = 2.0 if not fp32_weights(s) else 4.0
    head = m.hidden * vocab
    weights = linear_bytes(s) * (m.linear_params + head) + element * (head + m.norm_params)
    trained = s.adapter_params if s.method != "full" else m.linear_params + 2 * head + m.norm_params
    opt = optimizer(s, element)
    if s.method == "qlora":  # instantiate_bnb_optimizer: paged moments, outside torch's counters
        opt = optimizer(replace(s, optimizer="paged_adamw"), element)
    part = share(s)
    static = [
        Term("weights", "embedding and head apart, also where the model ties them", weights * part.weights),
        Term("adapters", "adapters", s.adapter_params * element if s.method != "full" else 0),
        Term("optimizer", "moments", trained * opt.state_bytes * part.optimizer),
        Term("workspace", "cuBLAS workspace", constants.CUBLAS_WORKSPACE_BYTES),
    ]
    # FSDP accumulates whole gradients: no_backward_sync is torch's no_sync, which reduces only at the last micro-batch
    kept_share = 1.0 if s.grad_accum > 1 else part.gradients
    gradients = Term("gradients", "gradients", trained * element * kept_share)
    saved, previous = _saved(s, vocab)
    held = (*static, *saved, *_root_unit(s, vocab), *([gradients] if s.grad_accum > 1 else []))
    phases = _loss_phases(s, vocab, held, previous)
    step = Term("temporary", "square roots of the second moments", trained * opt.temporary_bytes * part.optimizer,
                "passing")  # fmt: skip
    phases.append(Phase("optimizer step", (*static, gradients, step)))
    logits = Term("logits", "logits of evaluation, fp32, copied and log-softmaxed", 12 * s.tokens * vocab, "passing")
    phases.append(Phase("evaluation", (*static, logits)))
    return settle("litgpt", s, phases, _notes(s, vocab, saved, previous))


def _saved(s: StackSettings, vocab: int) -> tuple[list[Term], list[Term]]:
    """Activations kept to backward (with several GPUs every block is checkpointed), and what is left of the previous
    micro-batch: ``ctx`` attributes live as long as the graph, which ``logits`` and ``loss`` hold until rebound."""
    per_token, four_bit = saved_per_token(s)
    m, tokens = s.shape, s.tokens
    terms = []
    if fp32_weights(s):
        # autocast casts a frozen weight at every use and keeps the copy for backward: the head's once a chunk
        chunks = -(-s.seq_len // constants.LITGPT_HEAD_CHUNK) if s.method != "full" else 1
        copies = 2.0 * (m.linear_params + m.hidden * vocab * chunks)
        terms.append(Term("activations", "16-bit copies of fp32 weights kept by autocast", copies, "kept"))
    if s.n_gpus > 1 or s.checkpointing == "yes":
        inputs = Term("activations", "layer inputs", 2.0 * m.hidden * m.layers * tokens, "kept")
        layer = Term("activations", "one recomputed layer", (per_token + 6 * m.intermediate) * tokens, "passing")
        return [inputs, layer, *terms], []
    name = f"activations of {m.layers} layers"
    terms.insert(0, Term("activations", name, per_token * m.layers * tokens, "kept"))
    one_pass = four_bit * m.layers * tokens
    if not four_bit:
        return terms, []
    terms.append(Term("activations", "inputs kept by the 4-bit matmul", one_pass, "kept"))
    previous = Term("activations", "inputs kept by the previous micro-batch's 4-bit matmul", one_pass, "kept")
    return terms, [] if _longest_row_first(s) else [previous]


def _longest_row_first(s: StackSettings) -> bool:
    """lit-gpt of 2023 fed its one longest row in the very first iteration: nothing of an earlier one was left."""
    return bool(s.released) and s.released < "2024"


def _loss_phases(s: StackSettings, vocab: int, held: tuple[Term, ...], previous: list[Term]) -> list[Phase]:
    """Head and loss. Fabric casts the 16-bit logits to fp32 while both lists are alive, and the loop still holds the
    previous micro-batch's fp32 logits at that moment (their name is bound again after the forward pass)."""

    def logits(name: str, bytes_each: float) -> Term:
        return Term("logits", name, bytes_each * vocab * s.tokens, "passing")

    chunk = 10.0 * vocab * min(s.seq_len, constants.LITGPT_HEAD_CHUNK) * s.micro_batch
    # the head's 4-bit weight becomes fp16, then a bf16 copy: both at once
    dequantised = 4.0 * vocab * s.shape.hidden if s.method == "qlora" else 0.0
    head = Term("workspace", "head dequantised to fp16 and cast to bf16", dequantised, "passing")
    older = logits("the previous micro-batch's logits, fp32", 0 if _longest_row_first(s) else 4)
    bf16, fp32 = logits("logits, bf16", 2), logits("logits, fp32", 4)
    softmax = logits("log-softmax, fp32", 4)
    phases = [
        Phase("forward head", (*held, *previous, older, bf16, head)),
        Phase("forward cast", (*held, *previous, older, bf16, fp32)),
    ]
    if s.method == "full":  # logits whole: shifted by a copy; gradients of the chunks are joined
        phases.append(Phase("forward loss", (*held, fp32, logits("shifted logits, fp32", 4), softmax)))
        phases.append(Phase("backward", (*held, fp32, logits("gradient of the logits, in chunks and joined", 8))))
    else:
        grads = Term("logits", "gradients of one chunk of logits", chunk, "passing")
        phases.append(Phase("forward loss", (*held, *previous, fp32, softmax)))
        phases.append(Phase("backward", (*held, fp32, softmax, grads)))
        phases.append(Phase("backward head", (*held, fp32, softmax, head)))
    return phases


def _root_unit(s: StackSettings, vocab: int) -> list[Term]:
    """FSDP wraps the blocks; embedding and head stay in the root unit, gathered from forward to the end of backward."""
    if s.n_gpus == 1:
        return []
    root = 4.0 * vocab * s.shape.hidden
    gradients = [Term("gradients", "gradients of embedding and head, whole", root, "passing")]
    return [Term("weights", "embedding and head, gathered", root, "passing"), *(gradients * (s.method == "full"))]


def _notes(s: StackSettings, vocab: int, saved: list[Term], previous: list[Term]) -> list[str]:
    notes = [f"logits cast to fp32 by Fabric: {format_bytes(4 * s.tokens * vocab)}"]
    if s.n_gpus == 1 and s.checkpointing == "no":
        notes.append(f"no activation checkpointing on one GPU: {format_bytes(saved[0].num_bytes)} of activations")
    if s.shape.tied:
        notes.append(f"the tied head is stored twice: {format_bytes(2 * vocab * s.shape.hidden)} more in 16 bits")
    if previous:
        notes.append(f"4-bit matmul inputs of the previous micro-batch stay: {format_bytes(previous[0].num_bytes)}")
    return notes
