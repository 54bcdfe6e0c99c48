"""Pipeline parallel: each rank holds a range of layers, micro-batches pass from rank to rank.

The schedule is GPipe's (https://arxiv.org/abs/1811.06965): all micro-batches forward, then all backward, so that a rank
works on one while the next rank works on the one before. The first rank embeds, the last one has norm, head and loss.
`torch.distributed.pipelining` is not used: it wants modules with a forward of their own; here a stage is a range of the
layers that the driver runs anyway, with the same activation policy and gradients as on one GPU.

A stage that fails must not leave its neighbours in an exchange. Before a pass all ranks tell that they have come with
what they need to see its exchanges through (`meeting`); one that fails later takes what comes and hands on zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fitune.engine.batch import Batch, HostBatch, to_device
from fitune.engine.engine import Engine
from fitune.engine.optimizers import Masters, Picked, flatten_state
from fitune.engine.parts import ENDS, part_of
from fitune.engine.step import Observer, Running, backward_layer, forward_layer, ignore, start, tail, tail_loss
from fitune.errors import UserError
from fitune.model.backward import backward
from fitune.model.build import Built, wanted_weights
from fitune.parallel.exchange import all_reduce, receive, send, total_norm
from fitune.parallel.group import Group
from fitune.parallel.meeting import Meeting, PeerAway
from fitune.parallel.slices import Parts
from fitune.parallel.world import Single
from fitune.plan import Plan, layers_of

T = TypeVar("T")


class _NoEmbedding(nn.Module):
    """Stands where another stage's embedding would be: zeros of the right shape."""

    def __init__(self, embedding: nn.Module, built: Built):
        super().__init__()
        width = int(embedding.weight.shape[-1])  # type: ignore[arg-type]
        self.weight: torch.Tensor
        self.register_buffer("weight", torch.empty(1, width, device="meta"), persistent=False)
        self.dtype, self.device = built.compute_dtype, built.device

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*input_ids.shape, self.weight.shape[-1], dtype=self.dtype, device=self.device)


def open_stage(built: Built, plan: Plan, group: Single) -> None:
    """Before the first weight is read: leave out those of other stages.

    Raises:
        UserError: something that a stage cannot have.
    """
    tied = bool(built.model.config.tie_word_embeddings)
    why = None
    if plan.stream_from != "none" or built.host_head is not None:
        why = "the plan streams weights"
    elif plan.adapter is not None and plan.adapter.dora:
        why = "DoRA's start needs the weights of every layer"
    elif plan.method == "full" and tied:
        why = "the head is the embedding: the first and the last GPU would train the same weights"
    elif len(built.layers) < group.size:
        why = f"the model has {len(built.layers)} layers for {group.size} GPUs"
    if why is not None:
        raise UserError("this job cannot be cut into stages (--parallel pp)", why, "use --parallel ddp or fsdp2")
    own = layers_of(len(built.layers), group.rank, group.size, plan.stages)
    others = tuple(f"{built.layers_prefix}.{i}." for i in range(len(built.layers)) if i not in own)
    names = {module: name for name, module in built.model.named_modules()}
    embedding = f"{names[built.model.get_input_embeddings()]}.weight"
    head = f"{names[built.model.get_output_embeddings()]}.weight"
    first, last = group.rank == 0, group.rank == group.size - 1
    foreign = {name for name in wanted_weights(built) if name.startswith(others)}
    if not first and not (last and tied):
        foreign.add(embedding)
    if not last and not tied:
        foreign.add(head)
    built.provided = frozenset(foreign & wanted_weights(built).keys())


class Pipelined(Meeting):
    """The engine's view of the other ranks: the same micro-batches on all, other layers on each."""

    def __init__(self, group: Group):
        self.group = group

    def totals(self, num_tokens: int, num_targets: int, num_passes: int) -> tuple[int, int, int]:
        self.is_open = True
        return num_tokens, num_targets, num_passes

    def begin(self, num_passes: int) -> None:
        self.is_open = True  # again, where a step that overflowed is replayed

    def prepare(self, loss: torch.Tensor, masters: Masters) -> torch.Tensor:
        return loss.detach().float().clone()

    def add_up(self, loss: torch.Tensor, masters: Masters, made: torch.Tensor) -> torch.Tensor:
        all_reduce(made)
        return made.to(loss.dtype)

    def norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return total_norm(grads)


class _Kept:
    """Inputs of this stage's recomputed layers, of every micro-batch (see `fitune.engine.step`)."""

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        self._saved: dict[tuple[int, int], torch.Tensor] = {}

    def put(self, index: int, state: Running) -> None:
        self._saved[id(state), index] = state.hidden

    def take(self, index: int, state: Running) -> torch.Tensor:
        return self._saved.pop((id(state), index))


class _Pass:
    """A pass whose exchanges are made to the end, whatever fails in it.

    Args:
        sizes: elements of the hidden states of each micro-batch. Room for the largest is made here.

    Attributes:
        failure: the first one, also a step that is given up; it is raised when the pass is over.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device):
        self.failure: Exception | None = None
        self._dtype, self._device = dtype, device
        self._spare = torch.empty(max(sizes, default=0), dtype=dtype, device=device)

    def tried(self, work: Callable[[], T]) -> T | None:
        """The result, or None once anything has failed."""
        if self.failure is not None:
            return None
        try:
            return work()
        except Exception as problem:  # noqa: BLE001 not silenced: raised when the pass is over
            self.failure = problem.with_traceback(None)
            return None

    def receive(self, shape: tuple[int, ...], peer: int) -> torch.Tensor:
        made = self.tried(lambda: torch.empty(shape, dtype=self._dtype, device=self._device))
        tensor = made if made is not None else self._in_spare(shape)
        receive(tensor, peer)
        return tensor

    def send(self, tensor: torch.Tensor | None, shape: tuple[int, ...], peer: int) -> None:
        """Zeros, where there is nothing."""
        made = self.tried(tensor.contiguous) if tensor is not None else None
        send(made if made is not None else self._in_spare(shape).zero_(), peer)

    def _in_spare(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._spare[: math.prod(shape)].view(shape)

    def end(self) -> None:
        """Raises what has failed."""
        if self.failure is not None:
            raise self.failure


class PipelineEngine(Engine):
    """The engine of one stage, which saves its own state."""

    ranks: Pipelined

    def __init__(self, built: Built, plan: Plan, group: Group):
        self.group = group
        self.own = layers_of(len(built.layers), group.rank, group.size, plan.stages)
        self.is_first, self.is_last = group.rank == 0, group.rank == group.size - 1
        _prune(built, self.own, self.is_first, self.is_last)
        super().__init__(built, plan, Pipelined(group))

    # -- the step -----------------------------------------------------------------------------------------------------

    def _accumulate(self, groups: list[list[Batch]], grad_scale: float, observe: Observer) -> torch.Tensor:
        self.ranks.begin(len(groups))
        batches = [batch for group in groups for batch in group]
        loss = torch.zeros((), dtype=torch.float32, device=self.built.device)
        try:
            passing = self._open([batch.input_ids for batch in batches])
        except PeerAway:  # who observes the update tells what has happened
            return loss
        running: list[Running | None] = []
        kept = _Kept(self.plan.recompute_layers)
        for batch in batches:
            shape = self._shape(batch.input_ids)
            arrived = passing.receive(shape, self.group.rank - 1) if not self.is_first else None
            state = passing.tried(lambda b=batch, a=arrived: self._forward(b, a, kept, observe))  # type: ignore[misc]
            running.append(state)
            if not self.is_last:
                passing.send(state.hidden if state is not None else None, shape, self.group.rank + 1)
        passing.tried(lambda: observe("tail", 0))
        if self.is_last:
            there = [state for state in running if state is not None]
            part = passing.tried(lambda: self._loss(there, grad_scale))
            loss = loss if part is None else part
        for batch, state in zip(batches, running, strict=True):
            shape = self._shape(batch.input_ids)
            if not self.is_last:
                grad = passing.receive(shape, self.group.rank + 1)
                if state is not None:
                    state.grad = grad
            passing.tried(lambda s=state: self._backward(s, kept, observe))  # type: ignore[misc]
            if not self.is_first:
                passing.send(state.grad if state is not None else None, shape, self.group.rank - 1)
        passing.end()
        return loss

    def _shape(self, input_ids: Any) -> tuple[int, ...]:
        """Of a micro-batch's hidden states."""
        return (*input_ids.shape, self.width)

    def _open(self, each_input_ids: Sequence[Any]) -> _Pass:
        """A pass over these, begun by all ranks. Raises PeerAway where another one has failed before it."""
        sizes = [math.prod(self._shape(input_ids)) for input_ids in each_input_ids]
        passing = _Pass(sizes, self.built.compute_dtype, self.built.device)
        self.ranks.close()
        return passing

    def _forward(self, batch: Batch, arrived: torch.Tensor | None, kept: _Kept, observe: Observer) -> Running:
        state = start(self.driver, batch, self.trains_embedding)
        if arrived is not None:
            state.hidden = arrived
        for index in self.own:
            observe("forward", index)
            forward_layer(self.driver, state, index, stash=kept, trains_embedding=self.trains_embedding)
        return state

    def _loss(self, running: Sequence[Running], grad_scale: float) -> torch.Tensor:
        collect = lambda: self.masters.collect(self._parts["tail", 0])  # noqa: E731
        return tail(self.driver, list(running), self.plan.loss_chunk, grad_scale, collect)

    def _backward(self, state: Running | None, kept: _Kept, observe: Observer) -> None:
        if state is None:
            return
        for index in reversed(self.own):
            observe("backward", index)
            needs = index > 0 or self.trains_embedding
            backward_layer(self.driver, state, index, stash=kept, needs_input_grad=needs)
            self.masters.collect(self._parts.get(("layer", index), ()))
        if state.embedded is not None:
            assert state.grad is not None
            backward(state.embedded, state.grad)
            self.masters.collect(self._parts["embed", 0])

    @property
    def width(self) -> int:
        return int(self.built.model.get_input_embeddings().weight.shape[-1])

    @torch.no_grad()
    def evaluate(self, host_batches: Sequence[HostBatch]) -> tuple[float, int]:
        """The last rank's sums; (0, 0) on the others."""
        total, count = 0.0, 0
        self.ranks.evaluations(len(host_batches))
        try:
            passing = self._open([host.input_ids for host in host_batches])
        except PeerAway:
            return total, count
        for host in host_batches:
            shape = self._shape(host.input_ids)
            batch = passing.tried(lambda h=host: to_device(h, self.built.device, dropout_seed=None))  # type: ignore[misc]
            arrived = passing.receive(shape, self.group.rank - 1) if not self.is_first else None
            found = passing.tried(lambda b=batch, a=arrived: self._evaluated(b, a))  # type: ignore[misc]
            if not self.is_last:
                passing.send(found, shape, self.group.rank + 1)
            elif found is not None and batch is not None:
                total, count = total + found, count + batch.num_targets
        passing.end()
        return total, count

    def _evaluated(self, batch: Batch, arrived: torch.Tensor | None) -> Any:
        """What this stage hands on: the hidden states, the last one the sum of losses."""
        state = self._forward(batch, arrived, _Kept(len(self.built.layers)), ignore)
        if not self.is_last:
            return state.hidden
        loss, _ = tail_loss(self.driver, state.hidden, batch, self.plan.loss_chunk, None)
        return loss.item()

    def pass_by(self, host_batches: Sequence[HostBatch]) -> None:
        self.ranks.evaluations(len(host_batches))
        self.ranks.drain()

    # -- state --------------------------------------------------------------------------------------------------------

    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """Of all stages, on the first rank; the others take part and get nothing."""
        return self._gathered(lambda tensor: tensor)[0]

    def _gathered(
        self, form: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(what all stages train, each tensor in its `form`; buffers that are saved with a model), gathered layer by
        layer in the first rank's host memory."""
        own, buffers = super().trained_tensors(), self._own_buffers()
        found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = {}, {}
        for layer in (*range(len(self.built.layers)), ENDS):
            mine = [{n: t for n, t in some.items() if part_of(n, self.built.layers_prefix) == layer}
                    for some in (own, buffers)]  # fmt: skip
            told: list[Any] | None = [None] * self.group.size if self.group.is_leader else None
            dist.gather_object(mine, told, dst=0, group=self.group.control)
            for trained, saved in told or ():
                found[0].update({name: form(tensor) for name, tensor in trained.items()})
                found[1].update(saved)
        return found

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        """Saved buffers of this stage's layers, and those outside the layers, which every stage has read."""
        model, prefix = self.built.model, self.built.layers_prefix
        saved = model.state_dict().keys()
        return {name: buffer.cpu() for name, buffer in model.named_buffers()
                if name in saved and part_of(name, prefix) in (*self.own, ENDS)}  # fmt: skip

    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        trained, buffers = self._gathered(lambda tensor: tensor.to(self.built.compute_dtype))
        return trained | buffers

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This stage's own (`slices.Parts`)."""
        tensors, numbers = flatten_state(self.optimizer, self.names)
        mine = Parts({f"optimizer|{name}": tensor for name, tensor in tensors.items()})
        mine |= {f"parameter|{name}": master.detach() for name, (_, master) in self.masters.pairs.items()}
        values = {"optimizer": numbers, "scale": self.scaler.scale, "good_steps": self.scaler.good_steps}
        return mine, values  # type: ignore[return-value]

    def load_state(self, tensors: Mapping[str, torch.Tensor], values: dict[str, Any]) -> None:
        mine = set(self.names)
        own = Picked(tensors, {name: name for name in tensors if name.split("|")[1] in mine})
        numbers = {name: value for name, value in values["optimizer"].items() if name.rpartition("|")[0] in mine}
        super().load_state(own, values | {"optimizer": numbers})


def _prune(built: Built, own: range, is_first: bool, is_last: bool) -> None:
    """Nothing of other stages is trained, or held."""
    for index, layer in enumerate(built.layers):
        if index not in own:
            layer.requires_grad_(False)
            for name, linear in built.linears.items():
                if name.startswith(f"{built.layers_prefix}.{index}."):
                    linear.lora_A = linear.lora_B = linear.packed = None
    embedding = built.model.get_input_embeddings()
    outside = [p for name, p in built.model.named_parameters() if not name.startswith(f"{built.layers_prefix}.")]
    for parameter in outside:
        is_embedding = any(parameter is p for p in embedding.parameters())
        if not (is_first if is_embedding else is_last):
            parameter.requires_grad_(False)
    if not is_first:
        built.host_embedding = None
        built.model.set_input_embeddings(_NoEmbedding(embedding, built))
