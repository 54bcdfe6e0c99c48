"""The engine's own step on the `meta` device, followed: nothing is computed, what it would allocate is noted.

The model, the engine and its step are the ones that run on a GPU. Two things stand in for what `meta` cannot do: values
that the program reads back are ones (`memory.follow`), and optimizers, which refuse `meta`, are their state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fitune.engine.batch import to_device
from fitune.engine.engine import Engine
from fitune.engine.host_masters import HostMasters
from fitune.engine.optimizers import update_peak_bytes
from fitune.engine.ranks import Alone
from fitune.engine.step import evaluate
from fitune.memory.follow import Follower
from fitune.memory.held import device_tensors, ring_of, state_of
from fitune.memory.update import norm_pieces
from fitune.model.build import add_adapter, build, fill, make_scratch, meta_weights
from fitune.model.loss import IGNORED
from fitune.plan import Plan


@dataclass(frozen=True)
class Rows:
    """Full rows of one document each, as the data floor hands them over; the last token of a row has no target.
    `limit`: only so many targets, the first ones."""

    num_rows: int
    num_columns: int
    limit: int | None = None

    @property
    def input_ids(self) -> np.ndarray:
        return np.zeros((self.num_rows, self.num_columns), np.int64)

    @property
    def targets(self) -> np.ndarray:
        made = self.input_ids
        made[:, -1] = IGNORED
        if self.limit is not None:
            flat = made.reshape(-1)
            flat[np.flatnonzero(flat != IGNORED)[self.limit :]] = IGNORED
        return made

    @property
    def position_ids(self) -> np.ndarray:
        return np.broadcast_to(np.arange(self.num_columns), (self.num_rows, self.num_columns)).copy()

    @property
    def record_ids(self) -> np.ndarray:
        return self.input_ids

    @property
    def doc_lengths(self) -> tuple[tuple[int, ...], ...]:
        return ((self.num_columns,),) * self.num_rows


class _OnCuda(Alone):
    """One process whose device is a GPU, where the norm of all gradients is taken by a kernel over all of them."""

    def norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """As torch's `_foreach_norm` on CUDA (2.11): a sum per piece of a tensor, then one of each tensor."""
        pieces = torch.empty(norm_pieces([grad.numel() for grad in grads]), dtype=torch.float32, device="meta")
        norms = [torch.linalg.vector_norm(grad) for grad in grads]
        del pieces
        return torch.linalg.vector_norm(torch.stack(norms))


class AbstractOptimizer:
    """An optimizer's memory: its state appears in the first update and stays."""

    def __init__(self, name: str, parameters: dict[str, torch.Tensor], follower: Follower):
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters.values()), "lr": 0.0}]
        self.parameters, self.follower = parameters, follower
        self.states = {key: state_of(name, p) for key, p in parameters.items()}
        self.update_bytes = update_peak_bytes(name, parameters.values())
        self.made: list[torch.Tensor] = []
        self.made_before = False

    def step(self) -> None:
        """The first update makes the state."""
        shared_made = False
        for name, p in self.parameters.items():
            states = self.states[name] if p.grad is not None and not self.made_before else []
            for state in states:
                if not (state.shared and shared_made):
                    tensor = torch.empty(state.numel, dtype=state.dtype, device="meta")
                    self.follower.claim(tensor, "optimizer", state.label if state.shared else f"{state.label} {name}")
                    self.made.append(tensor)
            shared_made |= any(state.shared for state in states)
        self.made_before = True
        if self.update_bytes:
            torch.empty(self.update_bytes, dtype=torch.uint8, device="meta")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients go."""
        for p in self.parameters.values():
            p.grad = None


class DryRun:
    """A model and its engine on `meta`. Every run starts from a state without gradients or optimizer state.

    The target is the plan's device. On `cuda` the list of events is what torch's caching allocator is asked for, but
    for what kernels allocate inside themselves. On `cpu` it is what the dispatcher sees, with two exceptions: a
    micro-batch is not copied (part "start"), and experts run in a loop that `meta` cannot follow (see
    `fitune.model.build`). A run is one of a program that has run before: a layer's very first recomputation, which
    finds out what later ones can leave out (`Driver.run_layer_again`), is over.
    """

    def __init__(self, config: Any, plan: Plan):
        self.plan = plan.with_(num_layers=config.num_hidden_layers)
        self.built = build(config, self.plan, "meta")
        fill(self.built, meta_weights(self.built), self.plan)
        add_adapter(self.built, self.plan)
        # torch's own fused optimizers refuse meta; any that does not holds the place until ours takes it
        self.engine = Engine(
            self.built, self.plan.with_(optimizer="adafactor"), _OnCuda() if plan.device == "cuda" else None
        )
        self.names = list(self.built.trainable())
        self.follower = Follower("meta")
        self._mark_chunks()
        for name, (p, _) in self.engine.masters.pairs.items():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self.follower.claim(p.grad, "gradients", name))
        if self.engine.in_host is not None:
            self._claim_sent(self.engine.in_host)
        # the first pass that recomputes a layer finds out what of it can be left out in later ones
        self.step([Rows(1, 8)], loss_chunk=8, recompute_layers=len(self.built.layers))

    def share_ring(self, layer_bytes: int) -> None:
        """The ring as it is when layers of this size pass through it too: a head's tiles are no larger than they are
        where that is large enough."""
        ring = ring_of(self.built)
        if ring is None or ring.head is None:
            return
        ring._choose_tiles(layer_bytes)
        for slot in ring.slots:
            slot.views.clear()

    def step(
        self, rows: list[Rows], *, loss_chunk: int, recompute_layers: int, first_step: bool = True,
        together: bool = False,
    ) -> Follower:  # fmt: skip
        """One optimizer step over micro-batches; the run's first makes the optimizer's state. `together`: all of them
        pass each layer before the next, whatever the plan says."""
        plan = self.plan.with_(recompute_layers=recompute_layers, loss_chunk=loss_chunk)
        if together:
            plan = plan.with_(accumulation_order="layer-major")
        self._prepare(plan)
        masters = dict(zip(self.names, self.engine.masters.parameters(), strict=True))
        self.engine.optimizer = optimizer = AbstractOptimizer(plan.optimizer, masters, self.follower)
        optimizer.made_before = not first_step
        with self.follower:
            self.engine.step(rows, step=0, lr=1.0, observe=self._observe)
        self._name_masters()
        optimizer.made.clear()
        self.engine.abandon()
        return self.follower

    def evaluation(self, rows: Rows, *, loss_chunk: int) -> Follower:
        """The evaluation of one micro-batch."""
        self._prepare(self.plan.with_(loss_chunk=loss_chunk))
        with self.follower:
            self._evaluate(rows, loss_chunk)
        return self.follower

    def _evaluate(self, rows: Rows, loss_chunk: int) -> None:
        batch = to_device(rows, self.built.device, dropout_seed=None)
        tiles = self.engine.plan.mlp_tiles
        loss = evaluate(self.engine.driver, batch, loss_chunk, observe=self._observe, mlp_tiles=tiles)
        self._observe("end", 0)
        loss.item()

    def _prepare(self, plan: Plan) -> None:
        self.engine.plan = plan
        self.built.context.scratch = make_scratch(self.built, plan.loss_chunk)
        self.follower = Follower("meta")
        self.follower.ignore(t for _, t in device_tensors(self.built))
        self.follower.ignore(self.engine.masters.parameters())
        ring = ring_of(self.built)
        if ring is not None:
            self.follower.ignore(buffer for _, buffer in ring.device_tensors())
        if self.built.host_head is not None:  # host memory, on meta here
            self.follower.ignore([self.built.host_head.weight])

    def _observe(self, part: str, index: int) -> None:
        self._chunk = 0
        if part == "optimizer":
            for name, (_, master) in self.engine.masters.pairs.items():
                if master.grad is not None:
                    self.follower.claim(master.grad, "gradients", name)
        self.follower.mark(part, index)

    def _claim_sent(self, masters: HostMasters) -> None:
        """What is sent to host memory are gradients, those too that were added up on the device before."""
        send = masters.send

        def claimed(part: int, *, last: bool) -> None:
            for name in masters.parts.get(part, ()):
                if name in masters._held:
                    self.follower.claim(masters._held[name], "gradients", name)
            send(part, last=last)

        masters.send = claimed  # type: ignore[method-assign]

    def _mark_chunks(self) -> None:
        """A part of its own for every chunk of the loss tail, from the first tensor that is made for it."""
        tail = self.engine.driver.tail
        self._chunk = 0
        if self.engine.in_host is not None and self.plan.method == "full":
            return  # gradients of the head are added up over chunks: the tail is one part

        def marked(hidden: torch.Tensor) -> torch.Tensor:
            self.follower.mark_before(hidden, "chunk", self._chunk)
            self._chunk += 1
            return tail(hidden)

        self.engine.driver.tail = marked  # type: ignore[method-assign, assignment]

    def _name_masters(self) -> None:
        """Blocks that nobody claimed: logits by their width, the others by what became of them."""
        vocab_size = self.built.model.config.vocab_size
        for block in self.follower.blocks:
            part = self.follower.marks[block.part].name
            if not block.owner and part in ("chunk", "tail") and block.shape and block.shape[-1] == vocab_size:
                block.owner, block.name = "logits", "logits" if block.op != "_to_copy" else "gradient of the logits"
