"""Drive any transformers decoder layer by layer, with the model's own code around the layers.

A dry forward pass, in which each layer only notes its arguments and returns its input, yields what every layer is
called with (rotary tables, positions, ...) for any architecture; replaying the calls on the real layers gives the same
hidden states bit for bit. The loss tail (final norm, head, soft-capping, logit scale) is the model's forward too, run
with the layers replaced by one that hands over a chunk of hidden states.

Shapes: B rows, T tokens, H hidden size, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fitune.errors import UserError
from fitune.model.build import Built


@dataclass
class LayerCall:
    """The arguments of one decoder layer besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Recorder(nn.Module):
    """Stands in for a decoder layer: notes the call, returns its input (or a given tensor) unchanged."""

    def __init__(self, real: nn.Module, owner: Driver):
        super().__init__()
        self.__dict__["real"], self.__dict__["owner"] = real, owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)  # e.g. attention_type, read by some decoders' loops

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        owner: Driver = self.__dict__["owner"]
        if owner._injected is not None:
            hidden = owner._injected
        else:
            owner._inputs.append(hidden)
            owner._calls.append(LayerCall(args, kwargs))
        return (hidden,) if owner.returns_tuple else hidden


class Driver:
    """Embedding, layers and tail of a built model as three calls.

    Raises (on construction):
        UserError: the decoder changes hidden states between its layers, so they cannot be run one by one.
    """

    def __init__(self, built: Built):
        self.built = built
        self.returns_tuple = False
        self._injected: torch.Tensor | None = None
        self._inputs: list[torch.Tensor] = []
        self._calls: list[LayerCall] = []
        self._recorders = nn.ModuleList([_Recorder(layer, self) for layer in built.layers])

    @contextmanager
    def _recording(self) -> Iterator[None]:
        decoder, name = self.built.decoder, self.built.layers_name
        decoder._modules[name] = self._recorders
        try:
            yield
        finally:
            decoder._modules[name] = self.built.layers

    def check(self) -> None:
        """One tiny dry pass: find out whether layers return tuples, and that nothing happens between them."""
        ids = torch.zeros(1, 4, dtype=torch.long, device=self.built.device)
        positions = torch.arange(4, device=self.built.device)[None]
        why = "its decoder changes hidden states between the layers"
        for self.returns_tuple in (False, True):
            try:
                self._dry(ids, positions)
            except (IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                # a decoder that unpacks tuples fails on a tensor in one of these ways
                why = f"{type(error).__name__}: {error}"
                continue
            if all(i is self._inputs[0] for i in self._inputs) and self._inputs[0].dim() == 3:
                return
        raise UserError(
            f"cannot train {type(self.built.model).__name__}",
            f"its decoder layers cannot run one by one ({why})",
            "use another model; this architecture is not supported",
        )

    def _dry(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> None:
        self._inputs, self._calls = [], []
        with self._recording():
            self.built.decoder(input_ids=input_ids, use_cache=False, **self._positions(position_ids))

    def _positions(self, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Positions, and for a model with its own attention the causal mask, boolean [1, 1, T, T]. (Left to make one,
        transformers would look for packed rows in the positions, which synchronises and cannot run on meta.)"""
        if self.built.context.attention != "native":
            return {"position_ids": position_ids}
        size = position_ids.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool, device=position_ids.device).tril_()
        return {"position_ids": position_ids, "attention_mask": mask[None, None]}

    def record(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, list[LayerCall]]:
        """Embed a micro-batch. `input_ids`, `position_ids` [B, T]; returns (hidden [B, T, H], one call per layer)."""
        self._dry(input_ids, position_ids)
        hidden, calls = self._inputs[0], self._calls
        self._inputs, self._calls = [], []
        return hidden, calls

    def run_layer(self, index: int, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """One real layer, [B, T, H] to [B, T, H], its fused experts unpacked around it."""
        with ExitStack() as stack:
            for experts in self.built.experts_of(index):
                stack.enter_context(experts.unpacked(self.built.compute_dtype))
            out = self.built.layers[index](hidden, *call.args, **call.kwargs)
        return out[0] if isinstance(out, tuple) else out

    def _embedding_width(self) -> int:
        embedding = self.built.host_embedding or self.built.model.get_input_embeddings()
        return int(embedding.weight.shape[-1])

    def tail(self, hidden_CH: torch.Tensor) -> torch.Tensor:
        """Logits [C, V] of a chunk of the last layer's output [C, H], by the model's own code."""
        self._injected = hidden_CH[None]
        # what the embedding would give; the layers hand over the chunk instead, so only its shape matters
        width = self._embedding_width()
        placeholder = torch.empty(1, hidden_CH.shape[0], width, dtype=hidden_CH.dtype, device=hidden_CH.device)
        positions = torch.zeros(1, hidden_CH.shape[0], dtype=torch.long, device=hidden_CH.device)
        try:
            with self._recording():
                logits = self.built.model(
                    inputs_embeds=placeholder, use_cache=False, **self._positions(positions)
                ).logits
        finally:
            self._injected = None
        return logits[0]
