"""DeepSpeed's ZeRO (https://arxiv.org/abs/1910.02054): optimizer state (stage 1), gradients (2) and parameters (3) in
parts, one for each rank.

DeepSpeed shards, exchanges gradients, clips and updates. What makes a run fitune's own stays here: the loss is weighted
by the whole step's target tokens (DeepSpeed takes the mean over ranks, so it is multiplied by their number), steps of
accumulation are told to DeepSpeed one by one, the learning rate and the loss scale are set before each use, and an
update whose gradients are not finite is dropped by DeepSpeed and told of by fitune. A rank that has no rows in a pass
makes it with a row that counts nothing, since all ranks exchange the same things in the same order.

Checkpoints hold whole tensors by name, read and written through `deepspeed.utils`' access to fp32 masters and optimizer
state (of stage 3 through `zero_groups`), one tensor after the other, kept in the first rank's host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from fitune.engine.batch import HostBatch, to_device
from fitune.engine.engine import Engine, StepResult, _counts, _finite
from fitune.engine.optimizers import _BNB_TABLES, Masters, build_optimizer
from fitune.engine.ranks import Several
from fitune.engine.step import Observer, ignore
from fitune.errors import EXIT_FAILED, NotFinite, UserError
from fitune.model.backward import on_this_thread
from fitune.model.build import Built
from fitune.model.formats import DENSE
from fitune.model.loss import IGNORED
from fitune.parallel.exchange import all_reduce
from fitune.parallel.group import Group
from fitune.parallel.slices import Gathered, Saved
from fitune.parallel.zero_config import config_of, low_precision, stage_of
from fitune.parallel.zero_disk import Scratch, check_room
from fitune.parallel.zero_groups import WHOLE, Groups, described
from fitune.parallel.zero_library import card_of_this_rank, load_deepspeed
from fitune.parallel.zero_model import Work
from fitune.plan import Plan


class ZeroMasters(Masters):
    """DeepSpeed holds them; here only shapes, on `meta`."""

    def __init__(self, shapes: Iterable[torch.Size]):
        self.pairs = {}
        self._shown = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]

    def parameters(self) -> list[nn.Parameter]:
        return self._shown


class Ranks(Several):
    """The engine's view of the other ranks: every pass is made by all of them. Inside `together` DeepSpeed's hooks make
    ranks meet."""

    def __init__(self, group: Group):
        self.group = group

    def totals(self, num_tokens: int, num_targets: int, num_passes: int) -> tuple[int, int, int]:
        told = self.group.gather((num_tokens, num_targets, num_passes))
        return sum(t for t, _, _ in told), sum(t for _, t, _ in told), max(passes for _, _, passes in told)

    def evaluations(self, num_passes: int) -> int:
        return int(self.group.largest([num_passes])[0])


class ZeroEngine(Engine):
    """An engine whose state DeepSpeed holds in parts."""

    def __init__(self, built: Built, plan: Plan, group: Group):
        self.group, self.stage = group, stage_of(plan)
        self.zero: Any = None
        super().__init__(built, plan, Ranks(group))

    def _masters_and_optimizer(self, trainable: dict[str, Any]) -> tuple[Masters, torch.optim.Optimizer]:
        plan, built = self.plan, self.built
        deepspeed = load_deepspeed(built.device.type)
        self._utils = deepspeed.utils
        work = Work(self.driver, sharded=self.stage == 3, trains_embedding=self._trains_embedding())
        starts: dict[str, torch.Tensor] = {}
        if plan.method == "lora" and self.stage == 3:  # adapters are in the base's format, their masters are not
            for name, p in trainable.items():
                starts[name] = p.detach().cpu()
                p.data = p.data.to(built.compute_dtype, copy=True)
        check_formats(work, plan)
        self.parameters = dict(trainable)
        self.shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in trainable.items()}
        inner = build_optimizer(plan.optimizer, list(trainable.values()), lr=plan.lr, weight_decay=plan.weight_decay)
        config = config_of(plan)
        if plan.offload_optimizer == "nvme":
            check_room(plan, [shape.numel() for shape in self.shapes.values()], self.group)
            self.scratch = Scratch(Path(plan.offload_folder or ""), self.group)
            config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(self.scratch.path)
        with card_of_this_rank(built.device):
            self.zero, optimizer, _, _ = deepspeed.initialize(
                model=work, optimizer=inner, config=config, dist_init_required=False
            )
        self.work = work
        if self.stage == 3:
            self.groups = Groups(optimizer, {id(p): name for name, p in self.parameters.items()})
        if starts:
            self._set_masters(starts.get)
        self.parts = _parts_of(optimizer)
        return ZeroMasters(self.shapes.values()), optimizer

    def _trains_embedding(self) -> bool:
        return self._trains(self.built.model.get_input_embeddings())

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(
        self, host_batches: Sequence[HostBatch], *, step: int, lr: float, observe: Observer = ignore
    ) -> StepResult:
        """See `Engine.step`. DeepSpeed's part of it is all or nothing."""
        started = time.perf_counter()
        uses_dropout = self.plan.adapter is not None and self.plan.adapter.dropout > 0
        seed = (self.plan.seed, step) if uses_dropout else None
        num_tokens, num_targets, num_passes = self.ranks.totals(*_counts(host_batches), len(host_batches))
        while True:
            loss = self._passes(host_batches, num_passes, seed, num_targets, observe)
            observe("optimizer", 0)
            if not _finite(loss):
                raise NotFinite(
                    f"the loss is not finite at step {step + 1}", f"it is {loss}",
                    "use a lower --lr, or --precision bf16 or fp32; look for broken records in the data", EXIT_FAILED,
                )  # fmt: skip
            self.updating = True
            for group in self.zero.optimizer.param_groups:
                group["lr"] = lr
            self.zero.optimizer.clip_grad = self.plan.clip
            with self.ranks.together():
                self.zero.step()
            self.updating = False
            if self.zero.was_step_applied():
                break
            if not self.scaler.enabled:
                raise NotFinite(f"the gradients are not finite at step {step + 1}", "their norm is not a number",
                                "use a lower --lr, or --precision fp32", EXIT_FAILED)  # fmt: skip
            self.scaler.shrink()
        self.updates += 1
        self.scaler.grew()
        scale = self.scaler.scale if self.scaler.enabled else None
        norm = float(self.zero.get_global_grad_norm())
        return StepResult(loss, norm, num_tokens, num_targets, time.perf_counter() - started, scale, None)

    def _passes(
        self, host_batches: Sequence[HostBatch], num_passes: int, seed: tuple[int, int] | None, num_targets: int,
        observe: Observer,
    ) -> float:  # fmt: skip
        """Forward and backward of every micro-batch; the step's loss. What an observer raises waits for the end."""
        failure: list[Exception] = []
        weight = self.group.size / max(num_targets, 1)
        loss = torch.zeros((), dtype=torch.float32, device=self.built.device)
        if self.scaler.enabled:
            self.zero.optimizer.override_loss_scale(self.scaler.scale)
        with self.ranks.together():
            for number in range(num_passes):
                self._observed(failure, observe, "forward", number)
                host = host_batches[number] if number < len(host_batches) else _nothing()
                batch = to_device(host, self.built.device, dropout_seed=seed)
                self.zero.set_gradient_accumulation_boundary(number == num_passes - 1)
                weighted, part = self.zero(
                    batch, self.plan.recompute_layers, self.plan.loss_chunk, self.scaler.scale, weight
                )
                loss += part
                self._observed(failure, observe, "backward", number)
                with on_this_thread():
                    self.zero.backward(weighted, scale_wrt_gas=False)
                del weighted
            all_reduce(loss)
        if failure:
            raise failure[0]
        return float(loss) / max(num_targets, 1)

    def _observed(self, failure: list[Exception], observe: Observer, part: str, index: int) -> None:
        if failure:
            return
        try:
            observe(part, index)
        except Exception as problem:  # noqa: BLE001 not silenced: raised when the passes are over
            failure.append(problem.with_traceback(None))

    def abandon(self) -> None:
        """Drop the gradients of a step whose passes are over, as DeepSpeed's `step` does with an update that overflows.
        (A step that broke in the middle is not gone on from.)"""
        optimizer = self.zero.optimizer
        for p in self.parameters.values():
            p.grad = None
        optimizer.zero_grad(set_to_none=True)
        optimizer.averaged_gradients = {}
        if self.stage != 3:
            optimizer.all_grad_tensors = {}
            optimizer.micro_step_id = -1  # before a step's first micro-batch: offloaded gradients are not added to
        if self.plan.offload_optimizer != "none":
            optimizer.reset_cpu_buffers()

    @torch.no_grad()
    def evaluate(self, host_batches: Sequence[HostBatch]) -> tuple[float, int]:
        """Of stage 3 all ranks make every pass, also after a failure, which is raised at the end."""
        total, count = 0.0, 0
        failure: Exception | None = None
        assert isinstance(self.ranks, Ranks)
        passes = self.ranks.evaluations(len(host_batches)) if self.stage == 3 else len(host_batches)
        self.ranks.is_exchanging = self.stage == 3  # the others have begun their passes
        nothing = to_device(_nothing(), self.built.device, dropout_seed=None)
        self.ranks.is_exchanging = False
        for number in range(passes):
            has_rows, batch = number < len(host_batches) and failure is None, nothing
            try:
                if has_rows:
                    batch = to_device(host_batches[number], self.built.device, dropout_seed=None)
            except (RuntimeError, MemoryError) as problem:
                failure, has_rows = problem.with_traceback(None), False
            self.ranks.is_exchanging = self.stage == 3
            loss = self.zero(batch, self.plan.recompute_layers, self.plan.loss_chunk, 1.0, 1.0)
            self.ranks.is_exchanging = False
            if self.work.failures:
                failure = failure or self.work.failures[0]
            elif has_rows:
                total, count = total + loss.item(), count + batch.num_targets
        if failure is not None:
            raise failure
        return total, count

    # -- state --------------------------------------------------------------------------------------------------------

    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """On the first rank, in host memory; the others take part and get nothing."""
        return self._to_host()

    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """On the first rank, in the formats of the model's own parameters, with the buffers that are saved."""
        model = self.built.model
        found = self._to_host(dtypes={n: p.dtype for n, p in self.parameters.items()})
        own = model.state_dict()
        return found | {name: own[name].cpu() for name, _ in model.named_buffers() if name in own}

    def _read(self, key: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        """The master of each trained parameter, or its state of that name, which all ranks read together."""
        if self.stage == 3:
            yield from self.groups.read(key)
            return
        for name, p in self.parameters.items():
            whole = self._utils.safe_get_full_fp32_param(p) if key is None else (
                self._utils.safe_get_full_optimizer_state(p, key))  # fmt: skip
            yield name, whole

    def _to_host(
        self, key: str | None = None, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """What `_read` gives, in the first rank's host memory."""
        found = {}
        for name, tensor in self._read(key):
            if self.group.is_leader:
                found[name] = tensor.detach().to("cpu", (dtypes or {}).get(name, torch.float32), copy=True).contiguous()
            del tensor
        return found

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors = {f"parameter|{name}": tensor for name, tensor in self.trained_tensors().items()}
        numbers: dict[str, Any] = {}
        for key, value in self._described().items():
            if value is WHOLE:
                tensors |= {f"optimizer|{name}|{key}": tensor for name, tensor in self._to_host(key).items()}
            elif isinstance(value, torch.Tensor):
                if self.group.is_leader:
                    tensors |= {f"optimizer|{name}|{key}": value.clone() for name in self.names}
            else:
                numbers |= {f"{name}|{key}": value for name in self.names}
        values = {"optimizer": numbers, "scale": self.scaler.scale, "good_steps": self.scaler.good_steps}
        return Gathered(tensors), values

    def _described(self) -> dict[str, Any]:
        """See `zero_groups.described`."""
        if self.stage == 3:
            return self.groups.described(_BNB_TABLES)
        return described(self._inner().state.get(self.parts[0], {}), self.parts[0].numel(), _BNB_TABLES)

    def _inner(self) -> Any:
        return self.zero.optimizer.optimizer

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor], values: dict[str, Any]) -> None:
        def saved(name: str) -> torch.Tensor:
            found = tensors.get(f"parameter|{name}")
            if found is None or found.shape != self.shapes[name]:
                raise UserError(
                    "the checkpoint does not fit this run",
                    f"{name} is missing or has another shape",
                    "resume with the settings the run was started with",
                )
            return found

        self._set_masters(saved)
        self._load_optimizer(tensors, values["optimizer"])
        self.scaler.scale, self.scaler.good_steps = values["scale"], values["good_steps"]

    def _set_masters(self, find: Callable[[str], torch.Tensor | None]) -> None:
        """This rank's parts of the fp32 masters, from whole tensors by name that every rank has, and, rounded, of what
        the layers compute with."""
        if self.stage == 3:
            self.groups.write(find)
            return
        for name, p in self.parameters.items():
            whole = find(name)
            if whole is not None:
                self._utils.safe_set_full_fp32_param(p, whole.to(self.built.device, torch.float32))
        self.zero.optimizer.update_lp_params()

    def _load_optimizer(self, tensors: Mapping[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        """State made anew on every part, then filled from whole tensors."""
        assert isinstance(tensors, Saved)
        whole: set[str] = set()
        common: dict[str, torch.Tensor] = {}
        plain: dict[str, Any] = {}
        for full in tensors:
            kind, _, rest = full.partition("|")
            name, _, key = rest.rpartition("|")
            if kind != "optimizer" or name not in self.shapes:
                continue
            if tensors.shape(full) == tuple(self.shapes[name]):
                whole.add(key)
            else:  # how many updates there were: of the parameter with most of them
                common[key] = torch.maximum(tensors[full], common.get(key, tensors[full]))
        for full, value in numbers.items():
            key = full.rpartition("|")[2]
            plain[key] = max(value, plain.get(key, value))
        if not whole and not common and not plain:
            return
        if self.stage == 3:  # where there was no update of a parameter: zeros
            find = lambda name, key: tensors.get(f"optimizer|{name}|{key}")  # noqa: E731
            self.groups.write_state(sorted(whole), common | plain, find)
            return
        for part in self.parts:
            state: dict[str, Any] = {key: torch.zeros_like(part) for key in sorted(whole)}
            state |= {key: value.to(part.device, copy=True) for key, value in common.items()}
            self._inner().state[part] = state | plain
        self.zero.optimizer._lazy_init_hp_params_optimizer_state()
        for key in sorted(whole):
            for name, p in self.parameters.items():
                if (full := f"optimizer|{name}|{key}") in tensors:  # else there was no update of it: zeros
                    value = tensors[full].to(self.built.device, torch.float32)
                    self._utils.safe_set_full_optimizer_state(p, value, key)


def check_formats(work: Work, plan: Plan) -> None:
    """Raises UserError where what DeepSpeed is to hold is not all in one format: it would be brought to one."""
    wanted = DENSE[low_precision(plan) or "fp32"]
    others = sorted({str(p.dtype).removeprefix("torch.") for p in work.parameters() if p.dtype != wanted})
    if others:
        raise UserError(
            f"this model cannot be trained with --parallel {plan.parallel}",
            f"DeepSpeed holds parameters in one format, {str(wanted).removeprefix('torch.')} here, and some are in "
            f"{', '.join(others)}",
            "use --parallel fsdp2 or ddp, or --precision fp32",
        )


def _parts_of(optimizer: Any) -> list[torch.Tensor]:
    """This rank's flat fp32 parts of what is trained: of stage 3, of stages 1 and 2, of stage 1 with bf16."""
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    return next(list(getattr(optimizer, name)) for name in names if hasattr(optimizer, name))


def _nothing() -> Any:
    """A micro-batch of one row in which nothing counts."""
    ids: Any = np.zeros((1, 2), dtype=np.int64)
    return SimpleNamespace(
        input_ids=ids, targets=np.full_like(ids, IGNORED), position_ids=np.array([[0, 1]]), record_ids=ids,
        doc_lengths=((2,),),
    )  # fmt: skip
