"""Cross-entropy over the vocabulary in tiles: two passes, sums in fp32, never more than one tile of logits.

The first pass keeps the running maximum and the sum of exponentials per token (the online softmax of
https://arxiv.org/abs/1805.02867); the second makes each tile's gradient from them. Shapes: C tokens of a chunk, W
vocabulary entries of a tile.
"""

from __future__ import annotations

import torch

from fitune.model.formats import Scratch
from fitune.model.loss import IGNORED


class TiledCrossEntropy:
    """Of one chunk of tokens. Holds 12 bytes per token.

    Args:
        targets_C: [C] int64, IGNORED where there is no loss.
    """

    def __init__(self, targets_C: torch.Tensor):
        self.targets_C = targets_C
        self.counted_C = targets_C != IGNORED
        options = dict(dtype=torch.float32, device=targets_C.device)
        self.highest_C = torch.full(targets_C.shape, float("-inf"), **options)
        self.total_C = torch.zeros(targets_C.shape, **options)
        self.at_target_C = torch.zeros(targets_C.shape, **options)

    def _place(self, num_columns: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(column of each token's target, whether it is in this tile), both [C, 1]."""
        column_C = self.targets_C - first
        inside_C = self.counted_C & (column_C >= 0) & (column_C < num_columns)
        return column_C.clamp(0, num_columns - 1)[:, None], inside_C[:, None]

    @torch.no_grad()
    def see(self, logits_CW: torch.Tensor, first: int, scratch: Scratch | None = None) -> None:
        """Add a tile of logits, in any floating dtype and not changed; `first` is its first vocabulary entry."""
        work_CW = _wide(logits_CW, scratch)
        column_C1, inside_C1 = self._place(work_CW.shape[1], first)
        self.at_target_C += torch.where(inside_C1, work_CW.gather(1, column_C1), 0.0).squeeze(1)
        highest_C = torch.maximum(self.highest_C, work_CW.amax(1))
        self.total_C *= torch.exp(self.highest_C - highest_C)
        self.total_C += work_CW.sub_(highest_C[:, None]).exp_().sum(1)
        self.highest_C = highest_C

    @torch.no_grad()
    def loss(self) -> torch.Tensor:
        """Sum of the chunk's losses, once all tiles have been seen."""
        losses_C = self.total_C.log() + self.highest_C - self.at_target_C
        return torch.where(self.counted_C, losses_C, 0.0).sum()

    @torch.no_grad()
    def gradient(
        self, logits_CW: torch.Tensor, first: int, grad_scale: float, scratch: Scratch | None = None
    ) -> torch.Tensor:
        """Gradient [C, W] of `grad_scale * loss` with respect to a tile, in the logits' dtype."""
        work_CW = _wide(logits_CW, scratch)
        column_C1, inside_C1 = self._place(work_CW.shape[1], first)
        weight_C1 = self.counted_C.to(torch.float32)[:, None] * grad_scale
        work_CW.sub_(self.highest_C[:, None]).exp_().mul_(weight_C1 / self.total_C[:, None])
        work_CW.scatter_add_(1, column_C1, -weight_C1 * inside_C1)
        return work_CW.to(logits_CW.dtype)


def _wide(logits_CW: torch.Tensor, scratch: Scratch | None) -> torch.Tensor:
    if scratch is None:
        return logits_CW.detach().to(torch.float32, copy=True)
    return scratch.take(tuple(logits_CW.shape), torch.float32).copy_(logits_CW)
