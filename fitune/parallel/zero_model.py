"""A built model as DeepSpeed's ZeRO wants it: one module whose forward pass is a micro-batch's loss.

ZeRO counts on autograd: one backward pass from the loss over the whole micro-batch, in which hooks on parameters hand
their gradients over, and for stage 3 on modules' own forward and backward passes, around which their parameters are put
together. fitune's driver runs layers one by one and makes their backward passes itself, so here its pieces (embedding,
one layer, loss tail) are called inside of modules that own the parameters the piece uses: `Unit`s. A unit has no module
below it, so all of its parameters are gathered and released at once. Nothing of the model's own code is replaced.

Shapes: B rows, T tokens, H hidden size, C tokens of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fitune.engine.batch import Batch
from fitune.engine.driver import Driver, LayerCall
from fitune.engine.parts import ENDS, part_of
from fitune.engine.step import tail_loss
from fitune.model.build import Built
from fitune.model.formats import DENSE
from fitune.model.loss import chunk_cross_entropy

Tried = Callable[[Callable[..., Any]], Callable[..., Any]]


class Unit(nn.Module):
    """Parameters that are used together; what uses them is told before each call."""

    def __init__(self, parameters: dict[str, nn.Parameter]):
        super().__init__()
        self._run: Callable[..., Any] = lambda *tensors: None
        for name, parameter in parameters.items():
            self.register_parameter(name.replace(".", "/"), parameter)

    def running(self, run: Callable[..., Any]) -> Unit:
        """Itself, for a call that does this. (DeepSpeed looks through a module's arguments: tensors only.)"""
        self._run = run
        return self

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._run(*tensors)


class Work(nn.Module):
    """The whole model in units: `forward` is a micro-batch's loss.

    Args:
        sharded: all parameters belong to it (stage 3); else the trained ones only, and the frozen ones, packed or not,
            are none of DeepSpeed's business.

    Attributes:
        failures: of the last evaluation.
    """

    def __init__(self, driver: Driver, *, sharded: bool, trains_embedding: bool):
        super().__init__()
        self.__dict__["driver"] = driver
        built: Built = driver.built
        self.sharded, self.trains_embedding = sharded, trains_embedding
        self.failures: list[Exception] = []
        named = dict(built.model.named_parameters())
        if sharded:
            named |= dense_weights(built)
        parts: dict[int, dict[str, nn.Parameter]] = {index: {} for index in (ENDS, *range(len(built.layers)))}
        for name, p in named.items():
            if (sharded and p.device == built.device) or p.requires_grad:
                parts[part_of(name, built.layers_prefix)][name] = p
        head = {id(p) for p in built.model.get_output_embeddings().parameters()}
        embedding = {id(p) for p in built.model.get_input_embeddings().parameters()}
        ends = parts[ENDS].items()
        # The dry pass that records the layers' calls runs the final norm too; the tail embeds nothing.
        self.embed = Unit({n: p for n, p in ends if id(p) not in head or id(p) in embedding})
        self.layers = nn.ModuleList(Unit(parts[i]) for i in range(len(built.layers)))
        self.tail = Unit({n: p for n, p in ends if id(p) not in embedding or id(p) in head})

    def forward(self, batch: Batch, recompute_layers: int, loss_chunk: int, scale: float, weight: float) -> Any:
        """(`weight * sum of losses`, with its graph; the sum of losses, fp32).

        Args:
            scale: what the gradient that arrives will have been multiplied by (the loss scale).
        """
        driver: Driver = self.__dict__["driver"]
        batch.enter(driver.built.context)
        if not torch.is_grad_enabled():
            return self._evaluate(batch, loss_chunk)
        calls: list[LayerCall] = []
        with torch.set_grad_enabled(self.trains_embedding):
            hidden = self._embed(calls)(batch.input_ids, batch.position_ids)
        if not self.trains_embedding:
            hidden = hidden.detach().requires_grad_()  # its gradient tells the first unit that its backward is over
        for index, call in enumerate(calls):
            hidden = self._layer(index, hidden, call, recompute=index < recompute_layers)
        trained = [p for p in self.tail.parameters() if p.requires_grad]
        chunked = lambda hidden_BTH: _ChunkedLoss.apply(  # noqa: E731
            hidden_BTH, driver, batch, loss_chunk, scale, weight, *trained
        )
        return self.tail.running(chunked)(hidden)

    def _embed(self, calls: list[LayerCall], tried: Tried = lambda run: run) -> Unit:
        """The unit that embeds; what each layer is called with is put into `calls`."""

        def embed(input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            hidden, calls[:] = self.__dict__["driver"].record(input_ids, position_ids)
            return hidden

        return self.embed.running(tried(embed))

    def _evaluate(self, batch: Batch, loss_chunk: int) -> torch.Tensor:
        """The sum of losses. What fails is put into `failures`, and the pass goes on with nothing to compute: around
        the units all ranks gather parameters together, and none may stay away."""
        driver: Driver = self.__dict__["driver"]
        self.failures.clear()
        calls: list[LayerCall] = []

        def tried(run: Callable[..., Any]) -> Callable[..., Any]:
            def work(*tensors: torch.Tensor) -> Any:
                if not self.failures:
                    try:
                        return run(*tensors)
                    except Exception as problem:  # noqa: BLE001 not silenced: the engine raises it after the pass
                        self.failures.append(problem.with_traceback(None))
                return tensors[0]

            return work

        hidden = self._embed(calls, tried)(batch.input_ids, batch.position_ids)
        for index, unit in enumerate(self.layers):
            assert isinstance(unit, Unit)
            run = lambda hidden_BTH, i=index: driver.run_layer(i, hidden_BTH, calls[i])  # noqa: E731
            hidden = unit.running(tried(run))(hidden)
        tail = lambda hidden_BTH: tail_loss(driver, hidden_BTH, batch, loss_chunk, None)[0]  # noqa: E731
        loss: torch.Tensor = self.tail.running(tried(tail))(hidden)
        return loss

    def _layer(self, index: int, hidden: torch.Tensor, call: LayerCall, recompute: bool) -> torch.Tensor:
        driver: Driver = self.__dict__["driver"]

        def run(hidden_BTH: torch.Tensor) -> torch.Tensor:
            unit: Any = self.layers[index]
            out: torch.Tensor = unit.running(functools.partial(layer, unit))(hidden_BTH)
            return out

        def layer(unit: Unit, hidden_BTH: torch.Tensor) -> torch.Tensor:
            with by_reference(list(unit.parameters())) if self.sharded else nullcontext():
                return driver.run_layer(index, hidden_BTH, call)

        if not recompute:
            return run(hidden)
        out: torch.Tensor = checkpoint(run, hidden, use_reentrant=True, preserve_rng_state=False)
        return out


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients of the tail chunk by chunk, as in `fitune.engine.step.tail_loss`, in one node of the graph;
    every trained parameter gets a gradient, also without any target."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, driver: Driver, batch: Batch, loss_chunk: int, scale: float, weight: float,
        *trained: nn.Parameter,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        flat_NH, targets_N = hidden.detach().reshape(-1, hidden.shape[-1]), batch.targets.reshape(-1)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_NH = torch.zeros_like(flat_NH)
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in trained]
        for start in range(0, batch.num_targets, loss_chunk):
            part = slice(start, min(start + loss_chunk, batch.num_targets))
            rows = part if batch.counted is None else batch.counted[part]
            with torch.enable_grad():
                chunk_CH = flat_NH[rows].detach().requires_grad_()
                logits_CV = driver.tail(chunk_CH)
            scratch = driver.built.context.scratch
            chunk_loss, d_logits = chunk_cross_entropy(logits_CV, targets_N[rows], scale * weight, scratch)
            loss += chunk_loss
            grads = torch.autograd.grad(logits_CV, [chunk_CH, *trained], d_logits, allow_unused=True)
            grad_NH[rows] = grads[0]
            for total, grad in zip(sums, grads[1:], strict=True):
                if grad is not None:
                    total += grad
        ctx.scale, ctx.dtypes = scale, [p.dtype for p in trained]
        ctx.grads = [grad_NH.view_as(hidden), *sums]
        ctx.mark_non_differentiable(loss)
        return loss * weight, loss

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[Any, ...]:
        factor = outer[0] / ctx.scale  # the gradients hold the scale already: it kept fp16 from rounding them to zero
        hidden, *sums = ctx.grads
        ctx.grads = None
        return (
            hidden.mul_(factor.to(hidden.dtype)), None, None, None, None, None,
            *(total.mul_(factor).to(dtype) for total, dtype in zip(sums, ctx.dtypes, strict=True)),
        )  # fmt: skip


@contextmanager
def by_reference(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, autograd keeps no memory of these parameters: what it saves of one is taken from it again in the backward
    pass, when it has been gathered anew. (A product with a weight saves the weight's transpose, a tensor of its own.)
    """
    inside = [(p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), p) for p in parameters]

    def saved(tensor: torch.Tensor) -> Any:
        for start, end, p in inside:
            if start <= tensor.data_ptr() < end:
                offset = (tensor.data_ptr() - start) // p.element_size()
                return p, tensor.shape, tensor.stride(), offset
        return tensor

    def back(kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        p, shape, stride, offset = kept
        return p.detach().as_strided(shape, stride, p.storage_offset() + offset)

    with torch.autograd.graph.saved_tensors_hooks(saved, back):
        yield


def dense_weights(built: Built) -> dict[str, nn.Parameter]:
    """The frozen weights that are kept packed, as parameters: each takes its tensor's place, so that whoever unpacks it
    reads what the parameter holds at the time."""
    names = [f"{name}.weight" for name in built.linears] + [name for e in built.experts for name in e.names()]
    return {name: dense_weight(built, name) for name in names}


def dense_weight(built: Built, name: str) -> Any:
    """A weight that is in its place, by its name in the model's files; what is no parameter there (a buffer) as it
    is."""
    module, _, leaf = name.rpartition(".")
    packed = built.linears[module].packed if module in built.linears and leaf == "weight" else None
    for experts in built.experts:
        packed = packed or (experts.packed.get(leaf) if experts.prefix == module else None)
    if packed is None:
        return getattr(built.model.get_submodule(module), leaf)
    assert packed.format in DENSE, "refused before the model was loaded"
    weight = packed.tensors["weight"]
    if not isinstance(weight, nn.Parameter):
        weight = packed.tensors["weight"] = nn.Parameter(weight, requires_grad=False)
    return weight
