"""Cross-entropy over the vocabulary in tiles, loss and gradient in one pass: one tile of logits exists at a time, and
no tile is needed twice.

Loss: a running maximum and sum of exponentials per token (online softmax, https://arxiv.org/abs/1805.02867). Gradient
with respect to the head's input: the sum over the vocabulary of p_v W_v less W_target. Its first part is summed up with
weights exp(l_v - running maximum) and scaled down whenever the maximum rises, as attention kernels do with their values
(https://arxiv.org/abs/2205.14135); the division by the total comes last. Sums are fp32.

Shapes: C tokens of a chunk, W vocabulary entries of a tile, H width of the head's input.
"""

from __future__ import annotations

import torch

from fitune.model.ends import wide_product
from fitune.model.formats import Scratch
from fitune.model.loss import IGNORED

_FP16_LIFT = 2.0**10  # weights are at most 1; lifted, fp16 keeps those that it would round to zero


class TiledCrossEntropy:
    """Of one chunk of tokens; see each tile once, in any order.

    Args:
        targets_C: [C] int64, IGNORED where there is no loss.
        width: H, where the gradient is wanted; it then holds 4 + 2 (in 16 bit) bytes per token and unit of width.
        dtype: of the head's weight.
    """

    def __init__(self, targets_C: torch.Tensor, width: int | None = None, dtype: torch.dtype = torch.float32):
        self.targets_C = targets_C
        self.counted_C = targets_C != IGNORED
        count, device = targets_C.shape[0], targets_C.device
        self.highest_C = torch.full((count,), float("-inf"), dtype=torch.float32, device=device)
        self.total_C = torch.zeros(count, dtype=torch.float32, device=device)
        self.at_target_C = torch.zeros(count, dtype=torch.float32, device=device)
        self._placed: tuple[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] | None = None
        self._lift = _FP16_LIFT if dtype == torch.float16 else 1.0
        self._sum_CH: torch.Tensor | None = None
        self._target_CH: torch.Tensor | None = None
        if width is not None:
            self._sum_CH = torch.zeros(count, width, dtype=torch.float32, device=device)
            self._target_CH = torch.zeros(count, width, dtype=dtype, device=device)

    def place(self, num_columns: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(column of each token's target in a tile, whether it is in this tile), both [C, 1]; `first` is the tile's
        first vocabulary entry."""
        if self._placed is None or self._placed[0] != (num_columns, first):
            wanted_C1 = (self.targets_C - first)[:, None]  # below 0 for IGNORED
            column_C1 = wanted_C1.clamp(0, num_columns - 1)
            self._placed = (num_columns, first), (column_C1, column_C1 == wanted_C1)
        return self._placed[1]

    @torch.no_grad()
    def see(self, logits_CW: torch.Tensor, first: int, scratch: Scratch | None = None) -> torch.Tensor:
        """Add a tile's logits, in any floating dtype and not changed.

        Returns:
            exp(logits - running maximum), fp32 [C, W]; in `scratch` where that is given.
        """
        if scratch is None:
            work_CW = logits_CW.detach().to(torch.float32, copy=True)
        else:
            work_CW = scratch.take(tuple(logits_CW.shape), torch.float32).copy_(logits_CW)
        column_C1, inside_C1 = self.place(work_CW.shape[1], first)
        found_C = work_CW.gather(1, column_C1).squeeze(1)
        self.at_target_C = torch.where(inside_C1.squeeze(1), found_C, self.at_target_C)
        highest_C = torch.maximum(self.highest_C, work_CW.amax(1))
        shrink_C = torch.exp(self.highest_C - highest_C)
        work_CW.sub_(highest_C[:, None]).exp_()
        self.total_C.mul_(shrink_C).add_(work_CW.sum(1))
        if self._sum_CH is not None:
            self._sum_CH *= shrink_C[:, None]
        self.highest_C = highest_C
        return work_CW

    @torch.no_grad()
    def add(
        self, weights_CW: torch.Tensor, head_WH: torch.Tensor, first: int, slope_C1: torch.Tensor | None = None
    ) -> None:
        """Add a tile's part of the gradient, after `see`.

        Args:
            weights_CW: what `lifted` gives, times the slope of what the model does to its logits.
            head_WH: the tile of the head's weight.
            slope_C1: that slope at the targets' logits; None where nothing is done to them.
        """
        assert self._sum_CH is not None and self._target_CH is not None
        self._sum_CH += wide_product(weights_CW, head_WH)
        column_C1, inside_C1 = self.place(head_WH.shape[0], first)
        row_CH = head_WH[column_C1.squeeze(1)]
        if slope_C1 is not None:
            row_CH = row_CH * slope_C1.to(row_CH.dtype)
        self._target_CH = torch.where(inside_C1, row_CH, self._target_CH)

    def lifted(self, seen_CW: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What `see` returned, in the head's dtype; in fp16 times a factor that keeps small ones from vanishing."""
        return (seen_CW if self._lift == 1.0 else seen_CW.mul_(self._lift)).to(dtype)

    @torch.no_grad()
    def loss(self) -> torch.Tensor:
        """Sum of the chunk's losses, once all tiles have been seen."""
        losses_C = self.total_C.log() + self.highest_C - self.at_target_C
        return torch.where(self.counted_C, losses_C, 0.0).sum()

    @torch.no_grad()
    def gradient(self, grad_scale: float) -> torch.Tensor:
        """Gradient of `grad_scale * loss` with respect to the head's input, [C, H] in the head's dtype. Called once."""
        assert self._sum_CH is not None and self._target_CH is not None
        grad_CH = self._sum_CH.div_(self.total_C[:, None] * self._lift).sub_(self._target_CH)
        grad_CH *= self.counted_C.to(torch.float32)[:, None] * grad_scale
        made = grad_CH.to(self._target_CH.dtype)
        self._sum_CH = self._target_CH = self._placed = None
        return made
