"""An optimizer for each part of a model (a decoder layer, or the model's ends), so that parts can be updated one by one
and apart from each other. Every part's mathematics is the whole's: AdamW and its kin treat each tensor alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fitune.engine.optimizers import NEEDS_CUDA, Picked, build_optimizer, restore_state
from fitune.errors import UserError

ENDS = -1
"""The part of everything outside the decoder layers: embedding, final norm, head."""


def part_of(name: str, layers_prefix: str) -> int:
    """The part that a parameter belongs to: its decoder layer's index, or `ENDS`."""
    inside = name.removeprefix(layers_prefix + ".")
    return ENDS if inside == name else int(inside.partition(".")[0])


# Bytes of state per trained parameter (sources: see `optimizers.abstract_state`; the factored state of Adafactor is
# below a hundredth of a byte).
_STATE_BYTES = {"adamw": 8.0, "adamw8bit": 2 + 8 / 256, "lion": 4.0, "lion8bit": 1 + 4 / 256, "adafactor": 0.01,
                "sgd": 0.0}  # fmt: skip
STREAMED = ("adamw", "adamw8bit")
"""Optimizers whose update can run on a GPU while masters and state wait in host memory."""


def require_host_update(name: str, place: str) -> None:
    """Raises UserError when this optimizer cannot have its state in host memory, updated at `place`."""
    if name in NEEDS_CUDA:
        raise UserError(
            f"optimizer {name} cannot have its state in host memory",
            "paged state is moved by the GPU's driver and not by fitune",
            f"use --optimizer {name.removeprefix('paged_')}",
        )
    if place == "streamed" and name not in STREAMED:
        raise UserError(
            f"optimizer {name} cannot be updated on the GPU with its state in host memory",
            f"only {' and '.join(STREAMED)} can",
            "use --optimizer adamw or adamw8bit",
        )


def state_bytes_per_parameter(name: str) -> float:
    """Of an optimizer's state; small tensors, which 8-bit optimizers keep in fp32, are left out."""
    return _STATE_BYTES[name.removeprefix("paged_")]


class PartedOptimizer:
    """One optimizer per part over fp32 masters.

    Attributes:
        each: the optimizer of every part.
    """

    def __init__(self, name: str, parts: dict[int, list[nn.Parameter]], *, lr: float, weight_decay: float):
        self.each: dict[int, torch.optim.Optimizer] = {
            part: build_optimizer(name, list(parameters), lr=lr, weight_decay=weight_decay)
            for part, parameters in parts.items()
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all parts, in their order."""
        return [group for optimizer in self.each.values() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """Of all parts, by parameter."""
        return {p: state for optimizer in self.each.values() for p, state in optimizer.state.items()}

    def restore(
        self, parts: dict[int, list[str]], tensors: Mapping[str, torch.Tensor], numbers: dict[str, Any]
    ) -> None:  # fmt: skip
        """The state that `optimizers.flatten_state` gave, part by part.

        Raises:
            UserError: the state is of other parameters or another optimizer.
        """
        owner = {name: part for part, names in parts.items() for name in names}
        split: dict[int, tuple[dict[str, str], dict[str, Any]]] = {part: ({}, {}) for part in parts}
        for kind, flats in enumerate((tensors, numbers)):
            for flat in flats:
                part = owner.get(flat.rpartition("|")[0], next(iter(parts)))  # one that is not trained: refused there
                split[part][kind][flat] = numbers[flat] if kind else flat
        for part, names in parts.items():
            wanted, own = split[part]
            restore_state(self.each[part], names, Picked(tensors, wanted), own)
