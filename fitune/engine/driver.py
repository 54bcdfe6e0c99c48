"""Drive any transformers decoder layer by layer, with the model's own code around the layers.

A dry forward pass, in which each layer only notes its arguments and returns its input, yields what every layer is
called with (rotary tables, positions, ...) for any architecture; replaying the calls on the real layers gives the same
hidden states bit for bit. The loss tail (final norm, head, soft-capping, logit scale) is the model's forward too, run
with the layers replaced by one that hands over a chunk of hidden states.

Shapes: B rows, T tokens, H hidden size, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fitune.engine.ring import source_of
from fitune.errors import UserError
from fitune.model.build import Built
from fitune.model.casts import LayerCasts
from fitune.model.linear import OutputWatch
from fitune.model.loss import chunk_cross_entropy


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
        self.weights = source_of(built)
        self.ready: Callable[[int], None] = lambda part: None
        """Called before a layer (-1: what is around the layers) computes."""
        self.tiled_head = built.host_head  # None: the tail runs on whole logits
        self.cross_entropy: Any = chunk_cross_entropy  # of a chunk of logits; another where a process has some of them
        self.plain_logits = True  # the head's output is the model's, nothing comes after it
        self.returns_tuple = False
        self._injected: torch.Tensor | None = None
        self._inputs: list[torch.Tensor] = []
        self._calls: list[LayerCall] = []
        self._inputs_width = 0
        self._unneeded: dict[tuple[int, bool], object | None] = {}
        self.casts: Sequence[AbstractContextManager[None]] = self._casts_by_layer()
        self._recorders = nn.ModuleList([_Recorder(layer, self) for layer in built.layers])

    def _casts_by_layer(self) -> list[LayerCasts]:
        """To be entered while a layer runs, forward, or forward and backward."""
        context, members = self.built.context, [set(layer.modules()) for layer in self.built.layers]
        return [LayerCasts([lin for lin in self.built.linears.values() if lin in own], context) for own in members]

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
                self._inputs_width = self._inputs[0].shape[-1]
                self._check_tail()
                return
        raise UserError(
            f"cannot train {type(self.built.model).__name__}",
            f"its decoder layers cannot run one by one ({why})",
            "use another model; this architecture is not supported",
        )

    def _check_tail(self) -> None:
        """Find out, for a head in host memory, whether what the model does to its logits is done to each alone: only
        then can they be made in tiles. Random logits, large enough for any soft-capping to show, go through whole and
        in parts."""
        if self.built.host_head is None:
            return
        generator = torch.Generator().manual_seed(0)
        logits_CV = torch.randn(3, 12, generator=generator) * 40
        order = torch.tensor([7, 2, 11, 0])
        try:
            whole, parts = self.after_head(logits_CV), self.after_head(logits_CV[:, order])
            alone = torch.cat([self.after_head(logits_CV[row : row + 1]) for row in range(3)])
        except RuntimeError:  # shapes that do not go with the model's own
            self.tiled_head = None
            return
        self.plain_logits = torch.equal(whole, logits_CV)
        if not (torch.equal(whole[:, order], parts) and torch.equal(whole, alone)):
            self.tiled_head = None

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

    def record(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, host_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[LayerCall]]:
        """Embed a micro-batch. `input_ids`, `position_ids` [B, T], `host_ids` the former on the CPU if they are;
        returns (hidden [B, T, H], one call per layer)."""
        self.ready(-1)
        embedding = self.built.host_embedding
        with embedding.knowing(input_ids, host_ids) if embedding is not None else nullcontext():
            self._dry(input_ids, position_ids)
        hidden, calls = self._inputs[0], self._calls
        self._inputs, self._calls = [], []
        return hidden, calls

    def run_layer(self, index: int, hidden: torch.Tensor, call: LayerCall, *, keep: bool = False) -> torch.Tensor:
        """One real layer, [B, T, H] to [B, T, H], its fused experts unpacked around it; inside `weights.layer(index)`.

        `keep`: its activations are kept for a backward pass that comes after other layers' weights.
        """
        self.ready(index)
        experts_there = self.built.experts_of(index)
        if not keep and not experts_there:
            out = self.built.layers[index](hidden, *call.args, **call.kwargs)
            return out[0] if isinstance(out, tuple) else out
        with ExitStack() as stack:
            if keep:
                stack.enter_context(self.weights.keeping(index))
            for experts in experts_there:
                stack.enter_context(experts.unpacked(self.built.compute_dtype))
            out = self.built.layers[index](hidden, *call.args, **call.kwargs)
        return out[0] if isinstance(out, tuple) else out

    def _embedding_width(self) -> int:
        embedding = self.built.host_embedding or self.built.model.get_input_embeddings()
        return int(embedding.weight.shape[-1])

    def tail(self, hidden_CH: torch.Tensor) -> torch.Tensor:
        """Logits [C, V] of a chunk of the last layer's output [C, H], by the model's own code."""
        return self._run_tail(hidden_CH)

    def head_input(self, hidden_CH: torch.Tensor) -> torch.Tensor:
        """What a chunk [C, H] of the last layer's output is when it enters the head in host memory, [C, H]."""
        assert self.built.host_head is not None
        with self.built.host_head.tapped() as seen:
            self._run_tail(hidden_CH)
        return seen[-1][0]

    def after_head(self, logits_CW: torch.Tensor) -> torch.Tensor:
        """What the model makes of some of its logits [C, W] (soft-capping, a scale); autograd goes through."""
        head = self.built.host_head
        assert head is not None
        one_1H = torch.zeros(1, self._hidden_width(), dtype=self.built.compute_dtype, device=self.built.device)
        with head.standing_in(logits_CW[None]):
            return self._run_tail(one_1H)

    def run_layer_again(self, index: int, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """`run_layer` for the graph alone: the output is used by nothing but its own backward pass, so the layer's last
        product is left out where autograd does not need it. The gradients are the same to the bit."""
        context = self.built.context
        key = index, context.mlp_tiles > 1
        if key in self._unneeded:
            context.unneeded = self._unneeded[key]
            try:
                return self.run_layer(index, hidden, call)
            finally:
                context.unneeded = None
        context.watch = watch = OutputWatch()
        try:
            with torch.autograd.graph.saved_tensors_hooks(watch.saved, lambda tensor: tensor):
                output = self.run_layer(index, hidden, call)
        finally:
            context.watch = None
        self._unneeded[key] = watch.found()
        return output

    def _hidden_width(self) -> int:
        return int(self._inputs_width or self._embedding_width())

    def _run_tail(self, hidden_CH: torch.Tensor) -> torch.Tensor:
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
