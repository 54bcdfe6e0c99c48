"""What tensor-parallel ranks exchange inside a pass: sums, at the borders of what is split.

A region is a module whose weights are split: its input is the same on all ranks and its output is the sum of theirs.
The two borders are each other's transpose (Megatron-LM's f and g, https://arxiv.org/abs/1909.08053): what enters passes
as it is and its gradients are added up on the way back; what leaves is added up, and its gradient passes as it is.

A rank that fails in the middle of a pass still owes the rest of the pass' exchanges, since the others wait in them:
`Exchanges` knows a pass' exchanges beforehand and how many of them are done.

Shapes: C tokens of a chunk, W vocabulary entries of a rank, N ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fitune.model.formats import Scratch
from fitune.model.loss import IGNORED
from fitune.parallel.exchange import all_reduce

Sizes = tuple[int, torch.dtype]
"""Elements of a tensor that is exchanged, and their format."""


class Exchanges:
    """The sums of a pass, in their order, which is the same on all ranks."""

    def __init__(self) -> None:
        self._expected: Sequence[Sizes] = ()
        self._done = 0
        self._noted: list[Sizes] | None = None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, contiguous, becomes the sum of every rank's."""
        self._done += 1
        if self._noted is not None:
            self._noted.append((tensor.numel(), tensor.dtype))
        all_reduce(tensor)
        return tensor

    @contextmanager
    def noting(self) -> Iterator[list[Sizes]]:
        """Inside, sums are noted too."""
        noted: list[Sizes] = []
        self._noted = noted
        try:
            yield noted
        finally:
            self._noted = None

    def begin(self, expected: Sequence[Sizes]) -> None:
        """A pass begins that has these sums."""
        self._expected, self._done = expected, 0

    def finish(self, device: torch.device) -> None:
        """Take part in the sums of the pass that are left; what comes of them is nothing."""
        while self._done < len(self._expected):
            count, dtype = self._expected[self._done]
            self.sum(torch.zeros(count, dtype=dtype, device=device))


class Enter(torch.autograd.Function):
    """Into a region."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchanges: Exchanges) -> torch.Tensor:
        ctx.exchanges = exchanges
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # in place: it comes from the products of this region alone, which keep nothing of it
        return ctx.exchanges.sum(grads[0].contiguous()), None


class Leave(torch.autograd.Function):
    """Out of a region."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, exchanges: Exchanges) -> torch.Tensor:
        if y._is_view() or not y.is_contiguous():
            return exchanges.sum(y.clone(memory_format=torch.contiguous_format))
        ctx.mark_dirty(y)
        return exchanges.sum(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class VocabularyLoss:
    """`model.loss.chunk_cross_entropy` where each rank has some of the vocabulary's logits. Of each token three numbers
    are exchanged: the ranks' largest logits, their sums of exponentials, and the target's logit.

    Args:
        first: this rank's first vocabulary entry.
    """

    def __init__(self, exchanges: Exchanges, first: int, rank: int, size: int):
        self.exchanges, self.first, self.rank, self.size = exchanges, first, rank, size

    def sizes(self, num_tokens: int) -> Sizes:
        """Of the exchange for a chunk."""
        return self.size * 3 * num_tokens, torch.float32

    def __call__(
        self, logits_CW: torch.Tensor, targets_C: torch.Tensor, grad_scale: float | None, scratch: Scratch | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(sum of the chunk's losses, the same on all ranks; gradient [C, W] of this rank's logits or None)."""
        with torch.no_grad():
            logits_CW = logits_CW.detach()
            if scratch is None:
                work_CW = logits_CW.to(torch.float32, copy=True)
            else:
                work_CW = scratch.take(tuple(logits_CW.shape), torch.float32).copy_(logits_CW)
            counted_C = targets_C != IGNORED
            column_C = targets_C - self.first
            mine_C = counted_C & (column_C >= 0) & (column_C < work_CW.shape[1])
            column_C1 = column_C.clamp(0, work_CW.shape[1] - 1)[:, None]
            told_N3C = torch.zeros(self.size, 3, targets_C.shape[0], dtype=torch.float32, device=work_CW.device)
            highest_C, total_C, target_C = told_N3C[self.rank]
            highest_C.copy_(work_CW.amax(-1))
            target_C.copy_(torch.where(mine_C, work_CW.gather(1, column_C1).squeeze(1), 0.0))
            work_CW.sub_(highest_C[:, None]).exp_()
            total_C.copy_(work_CW.sum(-1))
            own_C = highest_C.clone()
            self.exchanges.sum(told_N3C)  # the other ranks' places are zeros: every rank learns all of them
            whole_C = told_N3C[:, 0].amax(0)
            total_C = (told_N3C[:, 1] * torch.exp(told_N3C[:, 0] - whole_C)).sum(0)
            losses_C = total_C.log() + whole_C - told_N3C[:, 2].sum(0)
            loss = torch.where(counted_C, losses_C, 0.0).sum()
            if grad_scale is None:
                return loss, None
            weight_C = counted_C.to(torch.float32) * grad_scale
            work_CW.mul_((weight_C * torch.exp(own_C - whole_C) / total_C)[:, None])
            work_CW.scatter_add_(1, column_C1, -torch.where(mine_C, weight_C, 0.0)[:, None])
            return loss, work_CW.to(logits_CW.dtype)
