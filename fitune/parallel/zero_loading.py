"""Stage 3 of ZeRO from the first weight on: each is cut into parts as soon as it is in place, so that no rank holds the
whole model at any time."""

from __future__ import annotations

import torch
from torch import nn

from fitune.model.build import Built
from fitune.parallel.zero_config import config_of, low_precision
from fitune.parallel.zero_library import card_of_this_rank, load_deepspeed
from fitune.parallel.zero_model import Unit, dense_weight
from fitune.plan import Plan


class Parts:
    """How this process holds the weights of the layers (see `Built.parts`).

    Attributes:
        num_parameters: of the whole model.
    """

    def __init__(self, built: Built, plan: Plan):
        self.num_parameters = built.num_parameters()
        self._built, self._config = built, config_of(plan)
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, None: torch.float32}[low_precision(plan)]
        self._last: str | None = None

    def take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A weight is about to be put in its place; the one before is there now."""
        self._cut()
        self._last = name
        return tensor

    def finish(self) -> None:
        """After the last weight."""
        self._cut()

    def _cut(self) -> None:
        """All ranks do this together, in the order of the files."""
        name, self._last = self._last, None
        if name is None or not name.startswith(f"{self._built.layers_prefix}."):
            return  # what is around the layers is needed whole until the engine is made
        weight = dense_weight(self._built, name)
        if isinstance(weight, nn.Parameter):
            device = self._built.device
            with card_of_this_rank(device):
                zero = load_deepspeed(device.type).zero
                zero.Init(module=Unit({name: weight}), config_dict_or_path=self._config, dtype=self._dtype)
