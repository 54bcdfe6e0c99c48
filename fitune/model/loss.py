"""Cross-entropy on a chunk of logits, its gradient included, in fp32 whatever the logits' dtype.

The step never holds the logits of more than `loss_chunk` tokens; training and evaluation use the same function.
"""

from __future__ import annotations

import torch

from fitune.model.formats import Scratch

IGNORED = -100  # target of a token without loss, as in torch and transformers


def chunk_cross_entropy(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    grad_scale: float | None,
    scratch: Scratch | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sum of the losses of a chunk and, unless `grad_scale` is None, the gradient of `grad_scale * sum`.

    Args:
        logits_CV: [chunk, vocabulary] in the compute dtype; not changed.
        targets_C: [chunk] int64, IGNORED where there is no loss.

    Returns:
        (fp32 scalar, gradient [chunk, vocabulary] in the logits' dtype or None). One fp32 copy of the chunk exists
        while it runs: 4 bytes per logit, besides the logits and their gradient.
    """
    with torch.no_grad():
        counted = targets_C != IGNORED
        safe_C1 = torch.where(counted, targets_C, 0)[:, None]
        logits_CV = logits_CV.detach()
        if scratch is None:
            work = logits_CV.to(torch.float32, copy=True)
        else:
            work = scratch.take(tuple(logits_CV.shape), torch.float32).copy_(logits_CV)
        work -= work.amax(-1, keepdim=True)
        at_target = work.gather(1, safe_C1).squeeze(1)
        total = work.exp_().sum(-1, keepdim=True)
        loss = torch.where(counted, total.squeeze(1).log() - at_target, 0.0).sum()
        if grad_scale is None:
            return loss, None
        weight = counted.to(torch.float32)[:, None] * grad_scale
        work.mul_(weight / total)
        work.scatter_add_(1, safe_C1, -weight)
        return loss, work.to(logits_CV.dtype)
