"""What the engine asks of the other processes that train the same model. `Alone` asks nobody; `fitune.parallel` has the
others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fitune.engine.optimizers import Masters
from fitune.engine.step import Observer
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

    def prepare(self, loss: torch.Tensor, masters: Masters) -> Any:
        """Called when the passes are over, before the ranks agree on the update: makes the memory that adding up takes,
        so that a rank which has none for it fails while the others still ask."""

    def add_up(self, loss: torch.Tensor, masters: Masters, made: Any) -> torch.Tensor:
        """The step's loss from each rank's part of it; the masters' gradients become the whole step's.

        Args:
            made: what `prepare` gave.
        """
        return loss

    def norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """L2 norm of all gradients, a scalar."""
        return torch.nn.utils.get_total_norm(grads)

    def publish(self, masters: Masters, observe: Observer) -> None:
        """Called after the optimizer's update: the masters become what the layers compute with. Where ranks exchange
        something for it, `observe("publish", 0)` comes first: an update may fail on one of them."""
        masters.publish()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, ranks meet in exchanges that one which leaves with an error cannot catch up with."""
        yield

    def drain(self) -> None:
        """Called after a failure: take part in what other ranks still do together in the passes that were begun.

        Raises:
            RuntimeError: there is no way to: the processes have to be started again.
        """


class Several(Alone):
    """What all views of other ranks have.

    Attributes:
        is_exchanging: inside `together`, or left it with an error.
    """

    is_exchanging = False

    @contextmanager
    def together(self) -> Iterator[None]:
        self.is_exchanging = True
        yield
        self.is_exchanging = False

    def drain(self) -> None:
        if self.is_exchanging:
            raise RuntimeError("the other ranks wait in an exchange that this one has left")
