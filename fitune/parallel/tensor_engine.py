"""The engine of a tensor-parallel rank: the same step on all ranks, with sums inside it (see `tensor`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fitune.engine.batch import Batch, HostBatch
from fitune.engine.engine import Engine, StepResult
from fitune.engine.optimizers import Masters, Picked, flatten_state
from fitune.engine.ranks import Several
from fitune.engine.step import Observer, ignore, tail_loss
from fitune.model.backward import backward
from fitune.model.build import Built
from fitune.model.loss import IGNORED
from fitune.parallel.exchange import receive, send, total_norm
from fitune.parallel.group import Group
from fitune.parallel.replicated import room_for, sum_gradients
from fitune.parallel.slices import Gathered
from fitune.parallel.tensor import Split
from fitune.parallel.tensor_exchange import Exchanges, Sizes
from fitune.plan import Plan

_TRIED_TOKENS = 4


class TensorRanks(Several):
    """The engine's view of the other ranks: the same records and loss on all, other parts of each weight."""

    def __init__(self, split: Split, device: torch.device):
        self.split, self.device = split, device
        self._kinds: dict[str, list[nn.Parameter]] = {"cut": [], "partial": [], "same": []}

    def masters(self, built: Built, trainable: dict[str, nn.Parameter]) -> Masters:
        made = super().masters(built, trainable)
        for name, (_, master) in made.pairs.items():
            self._kinds[self.split.kind(name)].append(master)
        return made

    def _added_up(self) -> list[nn.Parameter]:
        return [p for kind in ("same", "partial") for p in self._kinds[kind] if p.grad is not None]

    def prepare(self, loss: torch.Tensor, masters: Masters) -> torch.Tensor | None:
        added_up = self._added_up()
        return room_for(added_up) if added_up else None

    def add_up(self, loss: torch.Tensor, masters: Masters, made: torch.Tensor | None) -> torch.Tensor:
        """Partial gradients are added up. Those that are the same are averaged: kernels need not give the same bits
        everywhere, and copies that drift apart would be found by nobody."""
        for p in self._kinds["same"]:
            if p.grad is not None:
                p.grad /= self.split.size
        if made is not None:
            sum_gradients(self._added_up(), made)
        return loss

    def norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        own = {id(p.grad) for p in self._kinds["cut"]}
        cut = total_norm([grad for grad in grads if id(grad) in own])
        whole = torch.nn.utils.get_total_norm([grad for grad in grads if id(grad) not in own])
        return torch.hypot(cut, whole.to(cut.device))

    def drain(self) -> None:
        super().drain()
        self.split.exchanges.finish(self.device)


@dataclass
class _Layer:
    """What a layer exchanges per token of a micro-batch: forward, run again for its backward pass, and backward."""

    forward: list[Sizes] = field(default_factory=list)
    again: list[Sizes] = field(default_factory=list)
    backward: list[Sizes] = field(default_factory=list)


class TensorEngine(Engine):
    """The engine of one rank; state is saved whole by the first one, so that any other layout can go on from it."""

    def __init__(self, built: Built, plan: Plan, group: Group):
        assert isinstance(built.parts, Split)
        self.split, self.group = built.parts, group
        self.exchanges: Exchanges = self.split.exchanges
        super().__init__(built, plan, TensorRanks(self.split, built.device))
        self.driver.cross_entropy = self.split.loss
        self._embed: list[Sizes] = []
        self._tail: list[Sizes] = []  # the loss, then what goes back from the head
        self._layers = [_Layer() for _ in built.layers]
        self._try_each_layer()

    # -- what a pass exchanges ----------------------------------------------------------------------------------------

    def _try_each_layer(self) -> None:
        """Find out what every part of a pass exchanges, on a few tokens. From then on it is known which product of a
        layer that runs again is left out, and so is its exchange."""
        device, context = self.built.device, self.built.context
        ids = torch.zeros(1, _TRIED_TOKENS, dtype=torch.long, device=device)
        positions = torch.arange(_TRIED_TOKENS, device=device)[None]
        batch = Batch(ids, ids, positions, None, None, None, None, _TRIED_TOKENS, _TRIED_TOKENS)
        batch.enter(context)
        with _per_token(self.exchanges, self._embed), torch.no_grad():
            hidden, calls = self.driver.record(ids, positions)
        for index, (call, layer) in enumerate(zip(calls, self._layers, strict=True)):
            inputs = hidden.detach().requires_grad_(index > 0 or self.trains_embedding)
            with _per_token(self.exchanges, layer.forward), torch.no_grad():
                hidden = self.driver.run_layer(index, inputs, call)
            context.mlp_tiles = self.plan.mlp_tiles
            with torch.enable_grad():
                self.driver.run_layer_again(index, inputs, call)
                with _per_token(self.exchanges, layer.again):
                    outputs = self.driver.run_layer_again(index, inputs, call)
            with _per_token(self.exchanges, layer.backward):
                if outputs.requires_grad:
                    backward(outputs, torch.zeros_like(outputs))
            context.mlp_tiles = 1
            _forget(self.built.layers[index])
        with _per_token(self.exchanges, self._tail):
            tail_loss(self.driver, hidden, batch, _TRIED_TOKENS, 0.0)
        _forget(self.built.model)

    def _sums(self, group: Sequence[tuple[int, int]], *, backward: bool = True) -> list[Sizes]:
        """A pass' exchanges in their order (see `engine.step.forward_backward`).

        Args:
            group: (tokens with padding, target tokens) of its micro-batches.
        """
        found: list[Sizes] = []
        tokens = [count for count, _ in group]
        for count in tokens:
            found += _times(self._embed, count)
        for layer in self._layers:
            for count in tokens:
                found += _times(layer.forward, count)
        chunk = self.plan.loss_chunk
        for _, num_targets in group:
            for start in range(0, num_targets, chunk):
                found += _times(self._tail if backward else self._tail[:1], min(chunk, num_targets - start))
        for index in reversed(range(len(self._layers) if backward else 0)):
            layer = self._layers[index]
            again = layer.again if index < self.plan.recompute_layers else []
            for count in tokens:
                found += _times(again + layer.backward, count)
        return found

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(
        self, host_batches: Sequence[HostBatch], *, step: int, lr: float, observe: Observer = ignore
    ) -> StepResult:
        """As of one process. A rank that fails while it copies the records to its device owes the step's sums too."""
        counts = _counts(host_batches)
        in_one = self.plan.accumulation_order == "layer-major"
        self._begin_passes([counts] if in_one else [[each] for each in counts])
        return super().step(host_batches, step=step, lr=lr, observe=observe)

    def _accumulate(self, groups: list[list[Batch]], grad_scale: float, observe: Observer) -> torch.Tensor:
        self._begin_passes([[(batch.input_ids.numel(), batch.num_targets) for batch in group] for group in groups])
        return super()._accumulate(groups, grad_scale, observe)

    def _begin_passes(self, groups: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.exchanges.begin([sizes for group in groups for sizes in self._sums(group)])

    def evaluate(self, host_batches: Sequence[HostBatch]) -> tuple[float, int]:
        """The whole sums, on every rank."""
        self._begin_evaluation(host_batches)
        return super().evaluate(host_batches)

    def pass_by(self, host_batches: Sequence[HostBatch]) -> None:
        self._begin_evaluation(host_batches)
        self.ranks.drain()

    def _begin_evaluation(self, host_batches: Sequence[HostBatch]) -> None:
        counts = _counts(host_batches)
        self.exchanges.begin([sizes for each in counts for sizes in self._sums([each], backward=False)])

    # -- state --------------------------------------------------------------------------------------------------------

    def _whole(self, name: str, own: torch.Tensor) -> torch.Tensor | None:
        """On the first rank, in host memory, the tensor of which `own` is this rank's part; None on the others, who
        take part."""
        cut, part = self.split.cuts.get(name), own.detach().to("cpu", copy=True).contiguous()
        if not self.group.is_leader:
            if cut is not None:
                send(part, 0)
            return None
        if cut is None:
            return part
        whole = torch.empty(cut.whole_shape(part.shape), dtype=part.dtype)
        cut.put(whole, part, 0)
        for rank in range(1, self.group.size):
            other = torch.empty(cut.shape(whole.shape, rank), dtype=part.dtype)
            receive(other, rank)
            cut.put(whole, other, rank)
        return whole

    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """On the first rank, in host memory; the others take part and get nothing."""
        return self._gathered(lambda name, tensor: tensor)

    def _gathered(self, form: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is trained, tensor by tensor, each in its `form` as soon as it is there."""
        found: dict[str, torch.Tensor] = {}
        for name, (_, master) in self.masters.pairs.items():
            whole = self._whole(name, master)
            if whole is not None:
                found[name] = form(name, whole)
        return found

    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """On the first rank, in the formats of the model's own parameters, with the buffers that are saved."""
        model = self.built.model
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
        own = model.state_dict()
        saved = {name: own[name].cpu() for name, _ in model.named_buffers() if name in own}
        return self._gathered(lambda name, tensor: tensor.to(dtypes[name])) | saved

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors = {f"parameter|{name}": tensor for name, tensor in self.trained_tensors().items()}
        own, numbers = flatten_state(self.optimizer, self.names)
        for full, tensor in own.items():
            name, _, key = full.rpartition("|")
            is_part = tensor.shape == self.masters.pairs[name][1].shape  # and not a number that all ranks have
            whole = self._whole(name if is_part else "", tensor)
            if whole is not None:
                tensors[f"optimizer|{full}"] = whole
        values = {"optimizer": numbers, "scale": self.scaler.scale, "good_steps": self.scaler.good_steps}
        return Gathered(tensors), values

    def load_state(self, tensors: Mapping[str, torch.Tensor], values: dict[str, Any]) -> None:
        form = lambda full, whole: self._part(full.split("|")[1], whole)  # noqa: E731
        super().load_state(Picked(tensors, {full: full for full in tensors}, form), values)

    def _part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a saved tensor; one that is no whole of it as it is."""
        cut = self.split.cuts.get(name)
        fits = cut is not None and whole.dim() > cut.axis and whole.shape[cut.axis] == cut.length
        return cut.take(whole, self.split.rank) if cut is not None and fits else whole


def _counts(host_batches: Sequence[HostBatch]) -> list[tuple[int, int]]:
    """(tokens with padding, target tokens) of each micro-batch."""
    return [(int(host.input_ids.size), int((host.targets != IGNORED).sum())) for host in host_batches]


def _forget(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = None


def _times(per_token: list[Sizes], num_tokens: int) -> list[Sizes]:
    return [(count * num_tokens, dtype) for count, dtype in per_token]


@contextmanager
def _per_token(exchanges: Exchanges, found: list[Sizes]) -> Iterator[None]:
    """Adds what is exchanged inside to `found`, per token of the few that are tried."""
    with exchanges.noting() as noted:
        yield
    assert all(count % _TRIED_TOKENS == 0 for count, _ in noted)
    found += [(count // _TRIED_TOKENS, dtype) for count, dtype in noted]
