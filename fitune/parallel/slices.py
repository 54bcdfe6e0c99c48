"""State that is cut up: what one rank keeps of a tensor, and reading no more of a saved one than that."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `start + n` of a tensor of `shape` in its flat order: `part` [n]."""

    part: torch.Tensor
    start: int
    shape: tuple[int, ...]


class Parts(dict[str, torch.Tensor | Slice]):
    """A rank's share of a run's state: together the ranks' shares have every element once. What is no `Slice` is
    whole."""


class Gathered(dict[str, torch.Tensor]):
    """State that was put together from all ranks in host memory: copies, which nothing else holds."""


class Saved(Mapping[str, torch.Tensor]):
    """Saved tensors by name; each is read when it is asked for."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor; nothing of it is read."""

    @abstractmethod
    def elements(self, name: str, start: int, count: int) -> torch.Tensor:
        """Some elements [count] of a tensor in its flat order; nothing else of it is read."""
