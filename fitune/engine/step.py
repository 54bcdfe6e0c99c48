"""Forward and backward of an optimizer step, one decoder layer at a time. The same code runs on cpu, cuda and meta.

Micro-batches come in groups. A group of one is plain gradient accumulation; a group of all is layer-major accumulation
(every micro-batch passes a layer before the next layer is touched). The mathematics is the same.

Activation policy: the first `recompute_layers` layers save only their input and run again in backward; the rest keep
their activations. The saved inputs are allocated before the first layer runs: made one by one between the layers'
temporaries they would leave holes that the allocator cannot give back. With `offload` they wait in host memory instead.
The loss tail runs on chunks of tokens, forward and backward at once: full logits never exist.

Weights come from `driver.weights` (see `fitune.engine.ring`), which is told the order of a pass before it begins; a
layer's weights are on the device inside `weights.layer(index)` only. On `meta` a ring has its buffers, allocated when
the driver is made, and no copies happen; what a streamed step allocates besides the resident one's is: nothing in
"forward" and "backward"; with a head in host memory, in "tail", see `fitune.engine.tiled_tail`; with `offload`, no
"stash" but two buffers of the largest input at the start of "backward" of the last recomputed layer, and a recomputed
layer's output goes before its backward pass. From the second time a layer is recomputed its last product is not made
where nothing reads it (`Driver.run_layer_again`): the tensor is there, as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from fitune.engine.batch import Batch
from fitune.engine.driver import Driver, LayerCall
from fitune.engine.inputs import OffloadedInputs
from fitune.engine.ring import Item
from fitune.engine.tiled_tail import tail_items, tiled_tail
from fitune.model.backward import backward

Observer = Callable[[str, int], None]
"""Called at the start of a part of the step: ("embed" | "stash" | "forward" | "tail" | "backward" | "optimizer" |
"publish", layer or 0); layer -1 of "backward" is the embedding, "publish" comes where ranks exchange what they have
updated."""
GradsReady = Callable[[str, int], None]
"""Called when gradients of a part have been added: ("layer", index), ("tail", 0) or ("embed", 0)."""


def ignore(part: str, index: int) -> None:
    """The observer of a run that nobody watches."""


@dataclass
class Running:
    """A micro-batch on its way through the layers."""

    batch: Batch
    embedded: torch.Tensor | None  # with its graph, where the embedding is trained
    calls: list[LayerCall]
    hidden: torch.Tensor
    kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (input, output) with their graphs
    grad: torch.Tensor | None = None


def forward_backward(
    driver: Driver,
    group: Sequence[Batch],
    *,
    recompute_layers: int,
    loss_chunk: int,
    grad_scale: float,
    trains_embedding: bool = False,
    observe: Observer = ignore,
    grads_ready: GradsReady = ignore,
    part_done: GradsReady = ignore,
    offload: OffloadedInputs | None = None,
    mlp_tiles: int = 1,
) -> torch.Tensor:
    """Add the gradients of `grad_scale * sum of losses` over a group of micro-batches.

    Args:
        part_done: called as `grads_ready` is, once all micro-batches of the group have added theirs.
        offload: where the inputs of recomputed layers wait in host memory; None: on the device.
        mlp_tiles: pieces of tokens in which a recomputed layer's gated MLP runs.

    Returns:
        The unscaled sum of token losses, a fp32 scalar on the device (no synchronisation happens here).
    """
    num_layers = len(driver.built.layers)
    assert 0 <= recompute_layers <= num_layers, f"{recompute_layers} of {num_layers} layers cannot recompute"
    driver.weights.begin(pass_items(driver, group, loss_chunk))
    observe("embed", 0)
    running = [start(driver, batch, trains_embedding) for batch in group]
    stash = _Stash(running, recompute_layers, offload, observe)
    for index in range(num_layers):
        observe("forward", index)
        with driver.weights.layer(index), _tiling(driver, mlp_tiles if index < recompute_layers else 1):
            for state in running:
                forward_layer(driver, state, index, stash=stash, trains_embedding=trains_embedding)
    observe("tail", 0)
    loss = tail(driver, running, loss_chunk, grad_scale, lambda: grads_ready("tail", 0))
    part_done("tail", 0)
    for index in reversed(range(num_layers)):
        observe("backward", index)
        if index == recompute_layers - 1:
            stash.turn()
        with driver.weights.layer(index), _tiling(driver, mlp_tiles if index < recompute_layers else 1):
            for state in running:
                backward_layer(
                    driver,
                    state,
                    index,
                    stash=stash,
                    needs_input_grad=index > 0 or trains_embedding,
                    frees_output=offload is not None,
                )
                grads_ready("layer", index)
        part_done("layer", index)
    stash.end()
    if trains_embedding:
        observe("backward", -1)
        for state in running:
            assert state.embedded is not None
            assert state.grad is not None
            backward(state.embedded, state.grad)
            grads_ready("embed", 0)
    part_done("embed", 0)
    return loss


def start(driver: Driver, batch: Batch, trains_embedding: bool) -> Running:
    """Embed a micro-batch."""
    batch.enter(driver.built.context)
    with torch.set_grad_enabled(trains_embedding):
        hidden, calls = driver.record(batch.input_ids, batch.position_ids, batch.host_ids)
    return Running(batch, hidden if trains_embedding else None, calls, hidden.detach())


class Stash(Protocol):
    """Where the inputs of the first `num_layers` layers wait for their backward pass."""

    num_layers: int

    def put(self, index: int, state: Running) -> None:
        """Save a layer's input, `state.hidden`."""

    def take(self, index: int, state: Running) -> torch.Tensor:
        """A layer's input, for the last time."""
        ...


class _Stash:
    """Saved inputs of the first `num_layers` layers, for every micro-batch of a group."""

    def __init__(
        self, running: list[Running], num_layers: int, offload: OffloadedInputs | None, observe: Observer
    ) -> None:
        self.num_layers, self._running = num_layers, running
        self._offload = offload if num_layers > 0 else None
        self._saved: list[list[torch.Tensor]] = [[] for _ in running]
        if self._offload is not None:
            self._offload.begin([state.hidden for state in running], num_layers)
            return
        for index in range(num_layers):
            observe("stash", index)
            for saved, state in zip(self._saved, running, strict=True):
                saved.append(torch.empty_like(state.hidden))

    def put(self, index: int, state: Running) -> None:
        """Save the layer's input, which `state.hidden` stays."""
        if self._offload is not None:
            self._offload.put(index, self._member(state), state.hidden)
        else:
            state.hidden = self._saved[self._member(state)][index].copy_(state.hidden)

    def turn(self) -> None:
        if self._offload is not None:
            self._offload.turn()

    def take(self, index: int, state: Running) -> torch.Tensor:
        if self._offload is not None:
            return self._offload.take(index, self._member(state))
        return self._saved[self._member(state)].pop()

    def end(self) -> None:
        if self._offload is not None:
            self._offload.end()

    def _member(self, state: Running) -> int:
        return next(i for i, other in enumerate(self._running) if other is state)


@contextmanager
def _tiling(driver: Driver, mlp_tiles: int) -> Iterator[None]:
    context = driver.built.context
    context.mlp_tiles = mlp_tiles
    try:
        yield
    finally:
        context.mlp_tiles = 1


def pass_items(driver: Driver, group: Sequence[Batch], loss_chunk: int, *, backward: bool = True) -> list[Item]:
    """The order in which a pass over a group uses weights."""
    layers: list[Item] = [("layer", index) for index in range(len(driver.built.layers))]
    tail: list[Item] = []
    if driver.tiled_head is not None:
        tail = tail_items(driver.tiled_head, group, loss_chunk)
    elif driver.built.host_head is not None:
        tiles: list[Item] = [("head", tile) for tile in range(driver.built.host_head.num_tiles)]
        chunks = sum(-(-batch.num_targets // loss_chunk) for batch in group)
        tail = (tiles + tiles[::-1] if backward else tiles) * chunks
    return layers + tail + (layers[::-1] if backward else [])


def forward_layer(driver: Driver, state: Running, index: int, *, stash: Stash, trains_embedding: bool) -> None:
    """One layer forward, its activations kept or its input saved."""
    state.batch.enter(driver.built.context)
    if index < stash.num_layers:
        stash.put(index, state)
        with torch.no_grad(), driver.casts[index]:
            state.hidden = driver.run_layer(index, state.hidden, state.calls[index])
        return
    inputs = state.hidden.detach().requires_grad_(index > 0 or trains_embedding)
    with torch.enable_grad(), driver.casts[index]:
        outputs = driver.run_layer(index, inputs, state.calls[index], keep=True)
    state.kept.append((inputs, outputs))
    state.hidden = outputs.detach()


def backward_layer(
    driver: Driver,
    state: Running,
    index: int,
    *,
    stash: Stash,
    needs_input_grad: bool,
    frees_output: bool = False,
) -> None:
    """One layer backward: `state.grad` becomes the gradient of its input.

    `frees_output`: the layer's output goes before its backward pass, which needs only the graph that made it.
    """
    state.batch.enter(driver.built.context)
    with driver.casts[index]:
        if index < stash.num_layers:
            inputs = stash.take(index, state).detach().requires_grad_(needs_input_grad)
            with torch.enable_grad():
                outputs = driver.run_layer_again(index, inputs, state.calls[index])
        else:
            inputs, outputs = state.kept.pop()
        grad, state.grad = state.grad, None
        if outputs.requires_grad:  # the first layer may have nothing to train (no adapter, frozen embedding)
            root = get_gradient_edge(outputs) if frees_output else outputs
            del outputs
            backward(root, grad)
    state.grad = inputs.grad


def tail(
    driver: Driver,
    running: list[Running],
    loss_chunk: int,
    grad_scale: float,
    chunk_done: Callable[[], None],
) -> torch.Tensor:
    """Sum of the group's losses; each state's `hidden` becomes its `grad`."""
    loss = torch.zeros((), dtype=torch.float32, device=driver.built.device)
    if driver.tiled_head is not None:
        hidden, batches = [state.hidden for state in running], [state.batch for state in running]
        result = tiled_tail(driver, hidden, batches, loss_chunk, grad_scale, chunk_done)
        for state, part, grad in zip(running, result.losses, result.grads, strict=True):
            loss += part
            state.grad = grad
            del state.hidden
        return loss
    for state in running:
        state.batch.enter(driver.built.context)
        part, state.grad = tail_loss(driver, state.hidden, state.batch, loss_chunk, grad_scale, chunk_done)
        loss += part
        del state.hidden
    return loss


def tail_loss(
    driver: Driver,
    hidden: torch.Tensor,
    batch: Batch,
    loss_chunk: int,
    grad_scale: float | None,
    chunk_done: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Loss of a micro-batch from its last hidden states, `loss_chunk` tokens at a time, those without a target skipped.

    Args:
        hidden: [B, T, H].
        grad_scale: None in evaluation (no gradient).

    Returns:
        (sum of losses fp32 scalar, gradient [B, T, H] of grad_scale times that sum, or None).
    """
    flat_NH = hidden.detach().reshape(-1, hidden.shape[-1])
    targets_N = batch.targets.reshape(-1)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_NH = None
    if grad_scale is not None:
        grad_NH = torch.empty_like(flat_NH) if batch.counted is None else torch.zeros_like(flat_NH)
    for start in range(0, batch.num_targets, loss_chunk):
        part = slice(start, min(start + loss_chunk, batch.num_targets))
        rows = part if batch.counted is None else batch.counted[part]
        chunk_CH = flat_NH[rows]
        with torch.set_grad_enabled(grad_scale is not None):
            chunk_CH = chunk_CH.detach().requires_grad_(grad_scale is not None)
            logits_CV = driver.tail(chunk_CH)
        scratch = driver.built.context.scratch
        chunk_loss, d_logits = driver.cross_entropy(logits_CV, targets_N[rows], grad_scale, scratch)
        loss += chunk_loss
        if grad_NH is not None:
            backward(logits_CV, d_logits)
            grad_NH[rows] = chunk_CH.grad
            chunk_done()
        del logits_CV, d_logits, chunk_CH
    return loss, grad_NH.view_as(hidden) if grad_NH is not None else None


@torch.no_grad()
def evaluate(
    driver: Driver, batch: Batch, loss_chunk: int, observe: Observer = ignore, mlp_tiles: int = 1
) -> torch.Tensor:
    """Sum of token losses of one micro-batch, without gradients or dropout."""
    driver.weights.begin(pass_items(driver, [batch], loss_chunk, backward=False))
    batch.enter(driver.built.context)
    observe("embed", 0)
    hidden, calls = driver.record(batch.input_ids, batch.position_ids, batch.host_ids)
    for index, call in enumerate(calls):
        observe("forward", index)
        with driver.weights.layer(index), _tiling(driver, mlp_tiles), driver.casts[index]:
            hidden = driver.run_layer(index, hidden, call)
    observe("tail", 0)
    if driver.tiled_head is not None:
        return tiled_tail(driver, [hidden], [batch], loss_chunk, None).losses[0]
    return tail_loss(driver, hidden, batch, loss_chunk, None)[0]


def pass_idly(driver: Driver, loss_chunk: int) -> None:
    """A forward pass over nothing, for what ranks do together at each layer."""
    driver.weights.begin(pass_items(driver, [], loss_chunk, backward=False))
    for index in range(len(driver.built.layers)):
        with driver.weights.layer(index):
            pass
