"""Head and loss of transformers: bytes a token in units of the vocabulary, version by version."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fitune.memory.stacks.settings import StackSettings


@dataclass(frozen=True)
class LossBytes:
    """Bytes per token and vocabulary entry at the worst moment of the forward loss and of its backward."""

    forward: float
    backward: float


def full_loss(s: StackSettings, *, logits_bytes: int, outputs_alive: bool) -> LossBytes:
    """Cross-entropy over whole logits.

    Up to 4.44-4.45 the model itself upcasts (``logits = logits.float()``: the 16-bit tensor is free at once) and shifts
    by a contiguous copy. From 4.46 ``ForCausalLMLoss`` does so while its caller holds the 16-bit logits. From 4.50 the
    labels are shifted instead, without a copy (transformers ``loss/loss_utils.py``). Then the log-softmax, fp32.
    Backward: log-softmax, gradient of the negative log-likelihood and of the softmax, 4 bytes each; a loop that holds
    the model's output keeps its logits too, the Trainer drops it.
    ``full_logits_fastce`` is a kernel that keeps the log-sum-exp only and writes the gradient into the logits.
    """
    if s.kernels == "unsloth":  # its kernel works on the 16-bit logits and writes the gradient over them
        return LossBytes(2, 2)
    upcast = 0 if logits_bytes == 4 else 4
    in_model = s.transformers < (4, 46)
    shifted = 4 if s.transformers < (4, 50) else 0
    held = 4 if in_model else logits_bytes
    forward = (4 if in_model else logits_bytes + upcast) + shifted
    if s.loss == "full_logits_fastce":
        return LossBytes(forward, forward)
    return LossBytes(forward + 4, 12 + (held if outputs_alive else 0))


def evaluation_loss(s: StackSettings, logits_bytes: int) -> float:
    """Bytes a token and vocabulary entry in evaluation.

    Fused and chunked losses act in training only: Liger skips the logits only where ``self.training``
    (liger_kernel ``transformers/model``), Unsloth returns whole fp32 logits (unslothai/unsloth#1147). So they are
    whole, with their fp32 copies and the log-softmax. Metrics, which would keep them for every row, are not assumed.
    """
    whole = replace(s, loss="full_logits", kernels="")
    return full_loss(whole, logits_bytes=logits_bytes, outputs_alive=False).forward


def liger_chunk_tokens(tokens: int, vocab: int, hidden: int) -> int:
    """Tokens of one chunk of Liger's fused linear cross-entropy (liger_kernel ``ops/fused_linear_cross_entropy.py``:
    as many chunks as the vocabulary is wider than the hidden size, chunk size a power of two)."""
    wanted = -(-tokens // -(-vocab // hidden))
    return min(tokens, 1 << (wanted - 1).bit_length())
