"""One decoder layer of transformers: what it keeps for backward, and what backward adds at its worst moment.

Sources, read in transformers 4.48.1 and peft 0.13.2: ``models/mistral/modeling_mistral.py`` and ``models/llama``
(RMSNorm upcasts to fp32, SwiGLU as separate ops, ``repeat_kv`` for eager and sdpa), ``tuners/lora/layer.py`` (the
input of every adapter is cast to the adapter's dtype), ``tuners/lora/bnb.py`` (no cast under autocast, output cloned).
All figures are bytes a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from fitune.memory.stacks.settings import StackSettings


@dataclass(frozen=True)
class Precision:
    """Bytes an element of what flows through a layer.

    ``residual``: the stream between layers. ``normed``: outputs of norms, and with them (a quantised linear gives its
    output the dtype of its input) gate and up. ``adapter``: adapter weights. ``autocast``: matmuls cast their inputs to
    16 bits. ``trained_norms``: norm weights get gradients.
    """

    residual: int
    normed: int
    adapter: int
    autocast: bool
    dropout: float
    trained_norms: bool = False


@dataclass(frozen=True)
class LayerBytes:
    """``saved`` without checkpointing; with it ``peak`` is the most that one recomputed layer holds at a time."""

    saved: float
    peak: float


def layer_bytes(s: StackSettings, p: Precision) -> LayerBytes:
    """Attention part, then MLP part; backward goes through the MLP first, so that attention's grads meet a freed MLP.

    The MLP's worst moment is the product of gate and up: its gradient and both results exist, nothing is freed yet.
    Liger's kernels (liger_kernel ``ops/swiglu.py``, ``ops/rms_norm.py``) keep gate, up and the norms' inputs only, and
    write the gradients of gate and up over them.
    """
    m = s.shape
    attention = _attention_saved(s, p)
    mlp, width = _mlp_saved(s, p)
    # RMSNorm keeps an fp32 copy of its input; autocast runs LayerNorm in fp32 as well
    fp32 = m.norm == "rms" or p.autocast
    norms = (4 if fp32 else p.residual) * m.hidden * m.norms_per_layer
    if p.trained_norms:
        norms += p.normed * m.hidden * m.norms_per_layer
    if s.kernels == "liger" or (s.kernels == "foak" and p.trained_norms):
        # one kernel a norm, which keeps its input: the checkpoint, and the stream's second sum
        norms = p.residual * m.hidden * (m.norms_per_layer - (s.checkpointing != "no"))
    elif p.residual == 4 and s.checkpointing != "no":  # the first norm's fp32 input is the checkpoint itself
        norms -= 4 * m.hidden
    saved = attention + mlp + norms
    stream = 2 * p.residual * m.hidden  # recomputed output of the layer, and the gradient that comes in
    tensors = 1 if s.kernels == "liger" and m.gated else (3 if m.gated else 2)
    mlp_gradients = tensors * width * m.intermediate
    at_mlp = saved + mlp_gradients + stream
    at_attention = saved - mlp + _attention_gradients(s) + stream
    return LayerBytes(saved, max(at_mlp, at_attention))


def adapter_inputs(s: StackSettings, p: Precision, targets: tuple[str, ...], width: int) -> float:
    """What the linears that share one input of ``width`` keep of it.

    A trained linear keeps it once in 16 bits. peft casts the input of a 16-bit layer's adapter to the adapter's dtype
    (each adapter its own copy, which autocast casts back to 16 bits and keeps); of a quantised layer only without
    autocast. Dropout keeps a one-byte mask and its output.
    """
    if s.method == "full":
        return (2 if p.autocast else p.normed) * width
    adapted = [t for t in targets if t in s.targets]
    if not adapted:
        return 0.0
    kept = 2 if p.autocast else p.adapter
    cast = p.adapter != p.normed if not (s.quantised and p.autocast) else p.normed != 2
    if p.dropout:
        own_output = p.normed if s.quantised and p.autocast else p.adapter
        return len(adapted) * width * (1 + (kept if p.autocast and own_output == 4 else own_output))
    return width * kept * (len(adapted) if cast else 1)


def _attention_saved(s: StackSettings, p: Precision) -> float:
    m = s.shape
    a, kv = m.attention_width, m.kv_width
    total = adapter_inputs(s, p, ("q", "k", "v"), m.hidden) + adapter_inputs(s, p, ("o",), a)
    width = 2 if (p.autocast or p.normed == 2) else 4
    keys = kv if s.attention in ("flash", "flex") or m.heads == m.kv_heads else a  # repeat_kv copies K and V
    total += width * (a + 2 * keys) + (4 * (a + kv) if m.qk_norm else 0)
    if s.attention == "eager":
        total += 6 * m.heads * s.seq_len  # softmax in fp32, and its 16-bit copy for the product with V
    # the attention's output is what a trained or quantised output projection keeps; a cast copy is another tensor
    shared = s.method == "full" or (s.quantised and p.autocast and not p.dropout and "o" in s.targets)
    total += (0 if shared else width * a) + 4 * m.heads
    return total


def _attention_gradients(s: StackSettings) -> float:
    """Gradients of Q, K, V and the output; eager attention's scores in 16 bits, twice in fp32, and in 16 bits again."""
    m = s.shape
    gradients = 2 * (2 * m.attention_width + 2 * m.attention_width)
    return gradients + (12 * m.heads * s.seq_len if s.attention == "eager" else 0)


def _mlp_saved(s: StackSettings, p: Precision) -> tuple[float, int]:
    """Bytes kept by the MLP, and the bytes an element of its inner activations."""
    m = s.shape
    width = p.normed if s.quantised else (2 if p.autocast or p.normed == 2 else 4)
    tensors = 2 if s.kernels == "liger" else 3
    inner = (tensors if m.gated else 1) * width * m.intermediate
    inputs = adapter_inputs(s, p, ("gate", "up"), m.hidden) + adapter_inputs(s, p, ("down",), m.intermediate)
    return inner + inputs, width
