"""One training engine for cpu and cuda: optimizer steps, evaluation, state. It obeys a plan and decides nothing."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from fitune.engine.batch import Batch, HostBatch, to_device
from fitune.engine.driver import Driver
from fitune.engine.host_masters import HostMasters
from fitune.engine.inputs import OffloadedInputs
from fitune.engine.link import LinkStats
from fitune.engine.optimizers import Masters, Picked, build_optimizer, flatten_state, restore_state
from fitune.engine.parts import ENDS, PartedOptimizer, part_of
from fitune.engine.place import host_masters
from fitune.engine.ranks import Alone
from fitune.engine.ring import Ring
from fitune.engine.step import Observer, evaluate, forward_backward, ignore, pass_idly
from fitune.errors import EXIT_FAILED, NotFinite, UserError
from fitune.model.build import Built, make_scratch
from fitune.model.loss import IGNORED
from fitune.plan import Plan

_FIRST_SCALE = 2.0**16  # as torch.amp.GradScaler
_GROWTH_STEPS = 2000
_SMALLEST_SCALE = 2.0**-10


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave. `loss` is the mean over target tokens of the whole step. `link` is what crossed
    from host to device and what it cost, None where all weights are on the device."""

    loss: float
    grad_norm: float
    num_tokens: int
    num_targets: int
    seconds: float
    loss_scale: float | None
    link: LinkStats | None = None


class LossScaler:
    """Loss scaling for fp16. A step that overflows is replayed at half the scale, so that no batch is skipped."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self.scale = _FIRST_SCALE if enabled else 1.0
        self.good_steps = 0

    def shrink(self) -> None:
        self.scale /= 2
        self.good_steps = 0
        if self.scale < _SMALLEST_SCALE:
            raise NotFinite(
                "gradients are not finite at any loss scale",
                "the loss or a gradient is inf or NaN in fp16",
                "use a lower --lr, or --precision bf16 or fp32",
                EXIT_FAILED,
            )

    def grew(self) -> None:
        self.good_steps += 1
        if self.enabled and self.good_steps >= _GROWTH_STEPS:
            self.scale, self.good_steps = self.scale * 2, 0


class Engine:
    """A filled model with its optimizer.

    Args:
        built: filled model with its adapters.
        plan: obeyed: activation policy, loss chunk, accumulation order, optimizer, precision, clipping.
        ranks: the other processes that train the same model.
    """

    def __init__(self, built: Built, plan: Plan, ranks: Alone | None = None):
        self.built, self.plan = built, plan
        self.ranks = ranks or Alone()
        self.driver = Driver(built)
        built.context.scratch = make_scratch(built, plan.loss_chunk)
        self.driver.check()
        self._inputs_in_host: OffloadedInputs | None = None
        trainable = built.trainable()
        if not trainable:
            raise UserError("nothing to train", "no parameter is trainable with these settings", "check --lora-targets")
        self.names = list(trainable)
        self.in_host: HostMasters | None = None
        self.masters, self.optimizer = self._masters_and_optimizer(trainable)
        self.scaler = LossScaler(plan.loss_scaling)
        self.updates = 0  # updates that were made
        self._updating = False
        self.trains_embedding = self._trains(self.built.model.get_input_embeddings())
        self._parts = self._parameters_by_part()

    def _masters_and_optimizer(self, trainable: dict[str, Any]) -> tuple[Masters, torch.optim.Optimizer]:
        plan = self.plan
        if plan.optimizer_place != "device":
            self.in_host = host_masters(self.built, plan, trainable, alone=isinstance(self.ranks, Alone))
            self.driver.ready = self.in_host.ready
            return self.in_host, cast(torch.optim.Optimizer, self.in_host.optimizer)
        masters = self.ranks.masters(self.built, trainable)
        parameters = list(masters.parameters())
        return masters, build_optimizer(plan.optimizer, parameters, lr=plan.lr, weight_decay=plan.weight_decay)

    @property
    def updating(self) -> bool:
        """An update has begun (or failed in the middle): the step cannot be replayed any more."""
        return self._updating or (self.in_host is not None and (self.in_host.touched or self.in_host.failed))

    @updating.setter
    def updating(self, value: bool) -> None:
        self._updating = value

    def _trains(self, module: Any) -> bool:
        return any(p.requires_grad for p in module.parameters())

    def _parameters_by_part(self) -> dict[tuple[str, int], list[str]]:
        parts: dict[tuple[str, int], list[str]] = {("tail", 0): [], ("embed", 0): []}
        for name in self.names:
            index = part_of(name, self.built.layers_prefix)
            if index == ENDS:
                parts["tail", 0].append(name)
                parts["embed", 0].append(name)
            else:
                parts.setdefault(("layer", index), []).append(name)
        return parts

    def step(
        self, host_batches: Sequence[HostBatch], *, step: int, lr: float, observe: Observer = ignore
    ) -> StepResult:
        """One optimizer step over the micro-batches of a batch; the loss is weighted by target tokens.

        Raises:
            NotFinite: the loss or the gradients are not finite (exit code 1).
            UserError: the same, and a part of the step has been applied already.
        """
        started = time.perf_counter()
        if isinstance(self.driver.weights, Ring):
            self.driver.weights.meter.take()  # what an evaluation has moved is not this step's
        uses_dropout = self.plan.adapter is not None and self.plan.adapter.dropout > 0
        seed = (self.plan.seed, step) if uses_dropout else None
        num_tokens, num_targets, num_passes = self.ranks.totals(*_counts(host_batches), self._num_passes(host_batches))
        batches = [to_device(h, self.built.device, dropout_seed=seed) for h in host_batches]
        groups = self._groups(batches)
        groups += [[]] * (num_passes - len(groups))
        if self.in_host is not None:
            self.in_host.begin(lr if self._updates_at_once() else None)
            observe = functools.partial(self._unless_updating, observe)
        while True:
            loss = self._accumulate(groups, self.scaler.scale / max(num_targets, 1), observe) / max(num_targets, 1)
            made = self.ranks.prepare(loss, self.masters)
            observe("optimizer", 0)
            with self.ranks.together():
                loss = self.ranks.add_up(loss, self.masters, made)
                del made
                norm = self._unscaled_norm()
                loss_value, norm_value = torch.stack([loss, norm.to(loss.device, loss.dtype)]).tolist()
            if not _finite(loss_value):
                raise NotFinite(
                    f"the loss is not finite at step {step + 1}",
                    f"it is {loss_value}",
                    "use a lower --lr, or --precision bf16 or fp32; look for broken records in the data",
                    EXIT_FAILED,
                )
            if _finite(norm_value):
                break
            if not self.scaler.enabled:
                if self.in_host is not None and self.in_host.touched:
                    raise _half_updated(step)
                raise NotFinite(
                    f"the gradients are not finite at step {step + 1}",
                    f"their norm is {norm_value}",
                    "use a lower --lr, or --precision fp32",
                    EXIT_FAILED,
                )
            self.scaler.shrink()
            if self.in_host is not None:
                self.in_host.forget()
            else:
                self.optimizer.zero_grad(set_to_none=True)
        self.updating = True
        self._update(lr, norm)
        if self.in_host is None:
            self.ranks.publish(self.masters, observe)
        self.updating = False
        self.updates += 1
        self.scaler.grew()
        return StepResult(
            loss_value,
            norm_value,
            num_tokens,
            num_targets,
            time.perf_counter() - started,
            self.scaler.scale if self.scaler.enabled else None,
            self.driver.weights.meter.take() if isinstance(self.driver.weights, Ring) else None,
        )

    def abandon(self) -> None:
        """Forget the gradients of a step that failed before its update."""
        self.masters.forget()

    def _num_passes(self, host_batches: Sequence[HostBatch]) -> int:
        return min(1, len(host_batches)) if self.plan.accumulation_order == "layer-major" else len(host_batches)

    def _groups(self, batches: list[Batch]) -> list[list[Batch]]:
        """Micro-batches that pass the layers together."""
        if self.plan.accumulation_order == "layer-major":
            return [batches] if batches else []
        return [[batch] for batch in batches]

    def _accumulate(self, groups: list[list[Batch]], grad_scale: float, observe: Observer) -> torch.Tensor:
        self.ranks.begin(len(groups))
        loss = torch.zeros((), dtype=torch.float32, device=self.built.device)
        for number, group in enumerate(groups):
            is_last = number == len(groups) - 1
            loss += forward_backward(
                self.driver,
                group,
                recompute_layers=self.plan.recompute_layers,
                loss_chunk=self.plan.loss_chunk,
                grad_scale=grad_scale,
                trains_embedding=self.trains_embedding,
                observe=observe,
                grads_ready=lambda part, index: self.masters.collect(self._parts.get((part, index), ())),
                part_done=functools.partial(self._part_done, is_last),
                offload=self._offload(),
                mlp_tiles=self.plan.mlp_tiles,
            )
        return loss

    def _offload(self) -> OffloadedInputs | None:
        """Where layer inputs wait, if not on the device. (A replan may turn it on in the middle of a run.)"""
        if not self.plan.offload_inputs:
            return None
        if self._inputs_in_host is None:
            self._inputs_in_host = OffloadedInputs(self.built.device)
        return self._inputs_in_host

    def _unless_updating(self, observe: Observer, part: str, index: int) -> None:
        """Observers may give a step up; one that has begun to update is finished."""
        if not self.updating:
            observe(part, index)

    def _updates_at_once(self) -> bool:
        """Whether a layer can be updated before all gradients are there."""
        return self.plan.clip <= 0 and not self.scaler.enabled

    def _part_done(self, is_last: bool, part: str, index: int) -> None:
        """Gradients of a part leave the device, where their masters are not there. What is around the layers is done
        after the embedding."""
        if self.in_host is not None:
            self.in_host.send(index if part == "layer" else ENDS, last=is_last and part != "tail")

    def _unscaled_norm(self) -> torch.Tensor:
        if self.in_host is not None:
            return self.in_host.norm(self.scaler.scale)
        grads = [p.grad for p in self.masters.parameters() if p.grad is not None]
        if self.scaler.enabled:
            torch._foreach_mul_(grads, 1 / self.scaler.scale)
        return self.ranks.norm(grads)

    def _update(self, lr: float, norm: torch.Tensor) -> None:
        if self.in_host is not None:
            factors = [1 / self.scaler.scale] if self.scaler.enabled else []
            if self.plan.clip > 0:  # as torch's clip_grads_with_norm_
                factors.append(torch.clamp(self.plan.clip / (norm + 1e-6), max=1.0).item())
            self.in_host.update(lr, factors)
            if self.updates == 0 or self.in_host.touched:  # the first one makes the state: it may fail for want of RAM
                self.in_host.settle()
            self.in_host.touched = False
            return
        parameters = self.masters.parameters()
        if self.plan.clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.plan.clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self, host_batches: Sequence[HostBatch]) -> tuple[float, int]:
        """(sum of token losses, number of target tokens) without gradients or dropout."""
        total, count = 0.0, 0
        self.settle()
        idle = self.ranks.evaluations(len(host_batches)) - len(host_batches)
        for host in host_batches:
            batch = to_device(host, self.built.device, dropout_seed=None)
            total += evaluate(self.driver, batch, self.plan.loss_chunk, mlp_tiles=self.plan.mlp_tiles).item()
            count += batch.num_targets
        for _ in range(idle):
            pass_idly(self.driver, self.plan.loss_chunk)
        return total, count

    def pass_by(self, host_batches: Sequence[HostBatch]) -> None:
        """Take part in an evaluation of which this rank can compute nothing any more, so that no other rank waits."""
        self.evaluate([])

    def settle(self) -> None:
        """Until updates that go on beside the next step are over."""
        if self.in_host is not None:
            self.in_host.settle()

    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """Masters of the trained parameters by name, on the CPU."""
        self.settle()
        return {name: master.detach().cpu().contiguous() for name, (_, master) in self.masters.pairs.items()}

    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """All weights of a model trained in full, in host memory, where the model itself does not hold them all; None
        where it does."""
        self.settle()
        if self.plan.method != "full" or self.in_host is None or not self.in_host.stores:
            return None
        named = dict(self.built.model.named_parameters())
        own = {name: p.detach().cpu() for name, p in named.items() if name not in self.in_host.stores}
        buffers = self.built.model.state_dict().keys() - named.keys()
        saved = {name: b.cpu() for name, b in self.built.model.named_buffers() if name in buffers}
        return own | self.in_host.stores | saved

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Everything needed to go on exactly: tensors and plain values, no pickle. The tensors are the engine's own,
        where they are, or were gathered from other ranks for this (`fitune.parallel.slices.Gathered`)."""
        self.settle()
        tensors = {f"parameter|{name}": master.detach() for name, (_, master) in self.masters.pairs.items()}
        names = self.names
        if self.in_host is not None:
            names = [name for part in self.in_host.parts.values() for name in part]
        optimizer_tensors, numbers = flatten_state(self.optimizer, names)
        tensors |= {f"optimizer|{name}": t for name, t in optimizer_tensors.items()}
        return tensors, {"optimizer": numbers, "scale": self.scaler.scale, "good_steps": self.scaler.good_steps}

    def load_state(self, tensors: Mapping[str, torch.Tensor], values: dict[str, Any]) -> None:
        """Inverse of `state`; tensors are asked for one by one, and each is put where it stays before the next.

        Raises:
            UserError: the state belongs to other settings.
        """
        self.settle()
        with torch.no_grad():
            for name, (_, master) in self.masters.pairs.items():
                saved = tensors.get(f"parameter|{name}")
                if saved is None or saved.shape != master.shape:
                    raise UserError(
                        "the checkpoint does not fit this run",
                        f"{name} is missing or has another shape",
                        "resume with the settings the run was started with",
                    )
                master.copy_(saved)
                del saved
        prefix = "optimizer|"
        state = Picked(tensors, {n.removeprefix(prefix): n for n in tensors if n.startswith(prefix)})
        if self.in_host is not None:
            cast(PartedOptimizer, self.optimizer).restore(self.in_host.parts, state, values["optimizer"])
        else:
            restore_state(self.optimizer, self.names, state, values["optimizer"])
        self.scaler.scale, self.scaler.good_steps = values["scale"], values["good_steps"]
        self.masters.publish()


def _half_updated(step: int) -> UserError:
    return UserError(
        f"gradients of step {step + 1} are inf or NaN, and some layers have been updated with the others",
        "without clipping a layer is updated as soon as its gradients are there",
        "resume from the last checkpoint with a lower --lr; with --clip 1 such a step can be left out",
        EXIT_FAILED,
    )


def _counts(host_batches: Sequence[HostBatch]) -> tuple[int, int]:
    """(tokens without padding, target tokens), counted on the host."""
    return (
        sum(sum(map(sum, h.doc_lengths)) for h in host_batches),
        sum(int((h.targets != IGNORED).sum()) for h in host_batches),
    )


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
