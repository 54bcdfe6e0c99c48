"""What the engine asks of the other processes that train the same model. `Alone` asks nobody; `fitune.parallel` has the
others."""

from __future__ import annotations

import torch
from torch import nn

from fitune.engine.optimizers import Masters
from fitune.model.build import Built


class Alone:
    """One process: every sum over ranks is its own term."""

    def masters(self, built: Built, trainable: dict[str, nn.Parameter]) -> Masters:
        """What the optimizer updates."""
        return Masters(trainable)

    def totals(self, num_tokens: int, num_targets: int, num_passes: int) -> tuple[int, int, int]:
        """Called at the start of a step: tokens and target tokens of all of it, and how often this rank must go through
        the layers, where it has work for `num_passes`."""
        return num_tokens, num_targets, num_passes

    def begin(self, num_passes: int) -> None:
        """Called before the passes of a step."""

    def evaluations(self, num_passes: int) -> int:
        """Called before an evaluation: how often this rank must go through the layers."""
        return num_passes

    def add_up(self, loss: torch.Tensor, masters: Masters) -> torch.Tensor:
        """The step's loss from each rank's part of it; the masters' gradients become the whole step's."""
        return loss

    def norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """L2 norm of all gradients, a scalar."""
        return torch.nn.utils.get_total_norm(grads)

    def drain(self) -> None:
        """Called after a failure: take part in what other ranks still do together in the passes that were begun."""
