"""torchtune's single-device recipes (full and LoRA), with and without ``torch.compile``.

Sources, read in torchtune 0.6.1: ``modules/transformer.py`` (head split into ``num_output_chunks`` outputs),
``modules/loss/ce_chunked_output_loss.py`` (each chunk to fp32 inside the loss), ``modules/rms_norm.py``,
``modules/attention.py``, and the recipes' configurations: everything, adapters and moments too, in bf16; fused AdamW.
With ``torch.compile`` the partitioner keeps the inputs of matmuls and recomputes pointwise work (torch
``_functorch/partitioners.py``).
"""

from __future__ import annotations

from dataclasses import replace

from fitune.memory.stacks import constants
from fitune.memory.stacks.prediction import Phase, StackPrediction, Term, settle
from fitune.memory.stacks.settings import StackSettings
from fitune.memory.stacks.sharding import gathers, share
from fitune.memory.stacks.storage import fp32_weights, largest_linear, linear_bytes, optimizer
from fitune.units import format_bytes

# fp32 copies (gradient and both moments) of the parameter that an 8-bit AdamW updates: bytes an element.
EIGHT_BIT_UPDATE_BYTES = 12.0


def saved_per_token(s: StackSettings) -> float:
    """Bytes a token that one layer keeps for backward.

    Eager: fp32 input and 16-bit result of each RMSNorm and its scaled output; Q, K, V (K and V expanded to all heads)
    and the attention's output; gate, its activation, up and their product. Compiled: the two stream sums, two norm
    outputs, Q, K, V, output, and gate, up and product; the rest is computed again.
    """
    m = s.shape
    h, i, a, kv = m.hidden, m.intermediate, m.attention_width, m.kv_width
    trained = s.method == "full" or bool(set(s.targets) & {"q", "k", "v", "gate", "up"})
    outputs = 2 * h * m.norms_per_layer if trained else 0
    product = 2 * i if s.method == "full" or "down" in s.targets else 0
    if s.torch_compile:
        return 2 * h * 2 + outputs + 4 * a + 4 * kv + 4 * m.heads + 4 * i + product
    norms = m.norms_per_layer * (4 * h + (2 * h if s.method == "full" else 0)) + (4 * (a + kv) if m.qk_norm else 0)
    keys = a if m.heads != m.kv_heads else kv
    return norms + outputs + 4 * a + 4 * keys + 4 * m.heads + 6 * i + product


def predict(s: StackSettings) -> StackPrediction:
    """Peak of a torchtune run; error over the published ladder: docs/stacks.md."""
    m, part = s.shape, share(s)
    each = 4.0 if fp32_weights(s) else 2.0
    head_params = m.embedding_params * (1 if m.tied else 2)
    # torchao's NF4: blocks of 64, block scales quantised to 8 bits in groups of 256; always doubly quantised
    linear = constants.NF4_DOUBLE_BYTES if s.method == "qlora" else linear_bytes(s)
    weights = (linear * m.linear_params + each * (head_params + m.norm_params)) * part.weights
    trained = m.params if s.method == "full" else s.adapter_params
    opt = optimizer(s, each)
    if not opt.in_backward and "8bit" not in s.optimizer:
        opt = optimizer(replace(s, optimizer=s.optimizer + " fused"), each)
    on_gpu = 0.0 if "params" in s.offload else 1.0
    static = [
        Term("weights", "weights", on_gpu * weights),
        Term("adapters", "adapters, bf16", 0 if s.method == "full" else trained * each * part.weights),
        Term("optimizer", "moments", on_gpu * trained * opt.state_bytes * part.optimizer),
        Term("workspace", "cuBLAS workspace", constants.CUBLAS_WORKSPACE_BYTES),
    ]
    gradients = Term("gradients", "gradients", on_gpu * trained * each * part.gradients)
    if opt.in_backward:
        gradients = Term("gradients", "the gradient being applied", each * largest_linear(s) * part.gradients)
    kept = _kept(s)
    accumulated = [gradients] if s.grad_accum > 1 else []
    phases = [
        Phase("backward loss", (*static, *accumulated, *kept, *_logits(s))),
        Phase("backward, last layer", (*static, *accumulated, *kept, *_layer(s)), "layer"),
        Phase("backward, first layer", (*static, gradients, *_layer(s)), "layer"),
        Phase("optimizer step", (*static, *_update(s, gradients, trained * opt.temporary_bytes)), "step"),
    ]
    return settle("torchtune", s, phases, _notes(s))


def _kept(s: StackSettings) -> list[Term]:
    m = s.shape
    if s.checkpointing == "no":
        return [Term("activations", f"activations of {m.layers} layers", saved_per_token(s) * m.layers * s.tokens,
                     "kept")]  # fmt: skip
    inputs = 0.0 if "activations" in s.offload else 2.0 * m.hidden * m.layers * s.tokens
    return [Term("activations", "layer inputs", inputs, "kept")]


def _logits(s: StackSettings) -> list[Term]:
    """Chunked: all chunks' 16-bit logits exist until backward reaches them; of a trained head two gradients, the new
    chunk's and the sum. Whole: fp32 logits; compiled, one softmax gradient and its 16-bit cast beside them."""
    m = s.shape
    unit = s.tokens * m.vocab
    terms = []
    if s.loss in ("chunked", "fused"):
        terms.append(
            Term("logits", f"16-bit logits of {constants.TORCHTUNE_LOSS_CHUNKS} chunks", 2.0 * unit, "passing")
        )
        if not s.torch_compile:
            each = 12.0 * unit / constants.TORCHTUNE_LOSS_CHUNKS
            terms.append(Term("logits", "fp32 copy and gradients of one chunk", each, "passing"))
    else:
        units = 10.0 if s.torch_compile else 12.0
        terms.append(Term("logits", "whole logits, fp32, log-softmax and gradients", units * unit, "passing"))
    if s.method == "full":
        terms.append(Term("gradients", "gradient of the head, new and summed", 4.0 * m.embedding_params, "passing"))
    return terms


def _layer(s: StackSettings) -> list[Term]:
    """Inside one layer's backward: gradients of product, gate and up; with checkpointing what was recomputed, too."""
    m = s.shape
    inner = 6 * m.intermediate + 4 * m.hidden
    recomputed = saved_per_token(s) if s.checkpointing != "no" else 0.0
    terms = [Term("activations", "one layer's backward", (inner + recomputed) * s.tokens, "passing")]
    if s.torch_compile:  # fused pointwise backward writes gate's and up's gradients in one go and frees the product's
        terms = [Term("activations", "one layer's backward",
                      (4 * m.intermediate + 2 * m.hidden + recomputed) * s.tokens, "passing")]  # fmt: skip
    if s.quantised:
        terms.append(Term("workspace", "one linear, dequantised", 2.0 * largest_linear(s), "passing"))
    if gathers(s):
        terms.append(Term("workspace", "two gathered layers", 4.0 * m.linear_params / m.layers, "passing"))
    return terms


def _update(s: StackSettings, gradients: Term, temporary: float) -> list[Term]:
    """The update. Applied in backward, the widest parameter (the embedding) is the last."""
    if "in backward" not in s.optimizer:
        return [gradients, Term("temporary", "temporaries of the update", temporary, "passing")]
    widest = float(max(s.shape.embedding_params, largest_linear(s)))
    each = EIGHT_BIT_UPDATE_BYTES if "8bit" in s.optimizer and "paged" not in s.optimizer else 0.0
    return [
        Term("gradients", "gradient of the embedding", 2.0 * widest, "passing"),
        Term("temporary", "fp32 gradient and moments of one parameter", each * widest, "passing"),
    ]


def _notes(s: StackSettings) -> list[str]:
    unit = s.tokens * s.shape.vocab
    notes = []
    if s.loss == "full_logits":
        size = format_bytes((10 if s.torch_compile else 12) * unit)
        notes.append(f"whole logits in fp32 with their gradients, {s.micro_batch}x{s.seq_len}x{s.shape.vocab}: {size}")
    else:
        notes.append(f"the chunks' 16-bit logits all exist at once: {format_bytes(2 * unit)}")
    if s.checkpointing == "no":
        size = format_bytes(saved_per_token(s) * s.shape.layers * s.tokens)
        notes.append(f"no activation checkpointing: {size} of activations")
    return notes
