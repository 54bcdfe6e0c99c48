"""Forward and backward of an optimizer step, one decoder layer at a time. The same code runs on cpu, cuda and meta.

Micro-batches come in groups. A group of one is plain gradient accumulation; a group of all is layer-major accumulation
(every micro-batch passes a layer before the next layer is touched). The mathematics is the same.

Activation policy: the first `recompute_layers` layers save only their input and run again in backward; the rest keep
their activations. The saved inputs are allocated before the first layer runs: made one by one between the layers'
temporaries they would leave holes that the allocator cannot give back. The loss tail runs on chunks of tokens,
forward and backward at once: full logits never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fitune.engine.batch import Batch
from fitune.engine.driver import Driver, LayerCall
from fitune.model.loss import chunk_cross_entropy

Observer = Callable[[str, int], None]
"""Called at the start of a part of the step: ("embed" | "stash" | "forward" | "tail" | "backward" | "optimizer",
layer or 0); layer -1 of "backward" is the embedding."""
GradsReady = Callable[[str, int], None]
"""Called when gradients of a part have been added: ("layer", index), ("tail", 0) or ("embed", 0)."""


def ignore(part: str, index: int) -> None:
    """The observer of a run that nobody watches."""


@dataclass
class _Running:
    batch: Batch
    embedded: torch.Tensor | None  # with its graph, where the embedding is trained
    calls: list[LayerCall]
    hidden: torch.Tensor
    saved: list[torch.Tensor] = field(default_factory=list)  # inputs of recomputed layers
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
) -> torch.Tensor:
    """Add the gradients of `grad_scale * sum of losses` over a group of micro-batches.

    Returns:
        The unscaled sum of token losses, a fp32 scalar on the device (no synchronisation happens here).
    """
    num_layers = len(driver.built.layers)
    assert 0 <= recompute_layers <= num_layers, f"{recompute_layers} of {num_layers} layers cannot recompute"
    observe("embed", 0)
    running = [_start(driver, batch, trains_embedding) for batch in group]
    for index in range(recompute_layers):
        observe("stash", index)
        for state in running:
            state.saved.append(torch.empty_like(state.hidden))
    for index in range(num_layers):
        observe("forward", index)
        for state in running:
            _forward_layer(
                driver,
                state,
                index,
                recompute=index < recompute_layers,
                first=index == 0,
                trains_embedding=trains_embedding,
            )
    observe("tail", 0)
    loss = torch.zeros((), dtype=torch.float32, device=driver.built.device)
    for state in running:
        state.batch.enter(driver.built.context)
        part, state.grad = tail_loss(
            driver, state.hidden, state.batch, loss_chunk, grad_scale, lambda: grads_ready("tail", 0)
        )
        loss += part
        del state.hidden
    for index in reversed(range(num_layers)):
        observe("backward", index)
        for state in running:
            _backward_layer(
                driver, state, index, recompute=index < recompute_layers, needs_input_grad=index > 0 or trains_embedding
            )
            grads_ready("layer", index)
    if trains_embedding:
        observe("backward", -1)
        for state in running:
            assert state.embedded is not None
            state.embedded.backward(state.grad)
            grads_ready("embed", 0)
    return loss


def _start(driver: Driver, batch: Batch, trains_embedding: bool) -> _Running:
    batch.enter(driver.built.context)
    with torch.set_grad_enabled(trains_embedding):
        hidden, calls = driver.record(batch.input_ids, batch.position_ids)
    return _Running(batch, hidden if trains_embedding else None, calls, hidden.detach())


def _forward_layer(
    driver: Driver, state: _Running, index: int, *, recompute: bool, first: bool, trains_embedding: bool
) -> None:
    state.batch.enter(driver.built.context)
    if recompute:
        state.hidden = state.saved[index].copy_(state.hidden)
        with torch.no_grad():
            state.hidden = driver.run_layer(index, state.hidden, state.calls[index])
        return
    inputs = state.hidden.detach().requires_grad_(not first or trains_embedding)
    with torch.enable_grad():
        outputs = driver.run_layer(index, inputs, state.calls[index])
    state.kept.append((inputs, outputs))
    state.hidden = outputs.detach()


def _backward_layer(driver: Driver, state: _Running, index: int, *, recompute: bool, needs_input_grad: bool) -> None:
    state.batch.enter(driver.built.context)
    if recompute:
        inputs = state.saved.pop().detach().requires_grad_(needs_input_grad)
        with torch.enable_grad():
            outputs = driver.run_layer(index, inputs, state.calls[index])
    else:
        inputs, outputs = state.kept.pop()
    grad, state.grad = state.grad, None
    if outputs.requires_grad:  # the first layer may have nothing to train (no adapter, frozen embedding)
        outputs.backward(grad)
    state.grad = inputs.grad


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
        chunk_loss, d_logits = chunk_cross_entropy(logits_CV, targets_N[rows], grad_scale, driver.built.context.scratch)
        loss += chunk_loss
        if grad_NH is not None:
            logits_CV.backward(d_logits)
            grad_NH[rows] = chunk_CH.grad
            chunk_done()
        del logits_CV, d_logits, chunk_CH
    return loss, grad_NH.view_as(hidden) if grad_NH is not None else None


@torch.no_grad()
def evaluate(driver: Driver, batch: Batch, loss_chunk: int, observe: Observer = ignore) -> torch.Tensor:
    """Sum of token losses of one micro-batch, without gradients or dropout."""
    batch.enter(driver.built.context)
    observe("embed", 0)
    hidden, calls = driver.record(batch.input_ids, batch.position_ids)
    for index, call in enumerate(calls):
        observe("forward", index)
        hidden = driver.run_layer(index, hidden, call)
    observe("tail", 0)
    return tail_loss(driver, hidden, batch, loss_chunk, None)[0]
