"""What is trained, its gradients and its optimizer's state in flat parts, one for each rank; see `sharded`.

A unit is the trained tensors of one layer (or of the model's ends) in one flat row of elements, cut into N equal parts.
Every rank holds an fp32 master of its own part; what the layers compute with is gathered from the parts: by the ring
for a layer's own weights (`FromRing`), after each update for adapters and ends (`Whole`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fitune.engine.engine import Engine
from fitune.engine.optimizers import Masters, restore_state
from fitune.engine.parts import ENDS, part_of
from fitune.engine.ranks import Several
from fitune.engine.step import Observer
from fitune.errors import UserError
from fitune.model.build import Built
from fitune.parallel.exchange import all_gather, all_reduce, broadcast, reduce_scatter, total_norm
from fitune.parallel.group import Group
from fitune.parallel.sharded import ShardBacking, ShardedRing
from fitune.parallel.slices import Parts, Saved, Slice
from fitune.plan import Plan

_PARAMETER, _OPTIMIZER = "parameter|{}", "optimizer|{}|"  # keys of the state, as `Engine.state` has them
Layer = int | None
"""A layer's index, None for what is outside the layers."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in its unit's row of elements."""

    name: str
    start: int
    shape: torch.Size

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def of(self, row: torch.Tensor) -> torch.Tensor:
        return row[self.start : self.start + self.count].view(self.shape)


class Unit:
    """Trained tensors in one row of `size * part` elements; this rank's `master` [part] in fp32, and its part [part] of
    what the layers compute with (the same memory, where that is fp32 too)."""

    def __init__(self, layer: Layer, places: list[Place], part: int, group: Group, device: torch.device):
        self.layer, self.places, self.part, self.group, self.device = layer, places, part, group, device
        self.master: nn.Parameter
        self.compute: torch.Tensor

    def hold(self, compute: torch.Tensor) -> None:
        """Begin with this rank's part of what the layers compute with."""
        self.compute = compute
        self.master = nn.Parameter(compute if compute.dtype == torch.float32 else compute.float())

    @property
    def count(self) -> int:
        return self.part * self.group.size

    def mine(self, row: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole row."""
        return row[self.group.rank * self.part : (self.group.rank + 1) * self.part]

    def round(self) -> torch.Tensor | None:
        """Round the master into this rank's part of what the layers compute with; what of it `publish` is to send."""
        if self.compute.data_ptr() != self.master.data_ptr():
            self.compute.copy_(self.master.detach())
        return None

    def publish(self, sent: torch.Tensor | None) -> None:
        """Hand what `round` gave to the other ranks; all of them call it together."""

    def to_host(self, part: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every rank's part of a row put together in the first rank's host memory, by name; nothing on the others."""
        mine = part.detach().reshape(-1).cpu().contiguous()
        rows = [torch.empty_like(mine) for _ in range(self.group.size)] if self.group.is_leader else None
        dist.gather(mine, rows, dst=0, group=self.group.control)
        if rows is None:
            return {}
        row = torch.cat(rows)
        return {place.name: place.of(row).clone() for place in self.places}

    def overlaps(self) -> Iterator[tuple[Place, int, slice]]:
        """(a tensor, the first of its elements that is in this rank's part, where in the part its elements lie)."""
        first = self.group.rank * self.part
        for place in self.places:
            start, end = max(place.start, first), min(place.start + place.count, first + self.part)
            if start < end:
                yield place, start - place.start, slice(start - first, end - first)

    def cut(self, part: torch.Tensor, label: str) -> dict[str, Slice]:
        """This rank's part of a row (in fp32) by tensor, in the same memory; `label` makes the keys of the tensors'
        names."""
        mine = part.detach().view(-1)
        return {
            label.format(place.name): Slice(mine[where], start, tuple(place.shape))
            for place, start, where in self.overlaps()
        }

    def read(self, tensors: Saved, label: str) -> torch.Tensor:
        """Inverse of `cut`, from whole tensors, of which no more than this rank's part is read; on the device. A tensor
        that is not there is zeros: state of a parameter that has had no update."""
        part = torch.zeros(self.part, dtype=torch.float32)
        for place, start, where in self.overlaps():
            if (name := label.format(place.name)) in tensors:
                part[where] = tensors.elements(name, start, where.stop - where.start)
        return part.to(self.device)


class Whole(Unit):
    """Every rank has all of it in the compute format, in one row that the parameters are views of."""

    def __init__(self, layer: Layer, parameters: dict[str, nn.Parameter], group: Group):
        places, end = [], 0
        for name, p in parameters.items():
            places.append(Place(name, end, p.shape))
            end += p.numel()
        part = -(-end // (group.size * 8)) * 8
        first = next(iter(parameters.values()))
        super().__init__(layer, places, part, group, first.device)
        self.row = torch.zeros(self.count, dtype=first.dtype, device=first.device)
        for place in places:
            view = place.of(self.row)
            view.copy_(parameters[place.name].detach())
            parameters[place.name].data = view
        broadcast(self.row)
        self.hold(self.mine(self.row))

    def round(self) -> torch.Tensor:
        super().round()
        return self.compute.clone()

    def publish(self, sent: torch.Tensor | None) -> None:
        assert sent is not None
        all_gather(self.row, sent)


class FromRing(Unit):
    """A layer's own weights: gathered into the ring from this rank's part of the layer's bytes."""

    def __init__(self, layer: int, backing: ShardBacking, built: Built, group: Group):
        assert built.streamed is not None
        pieces = built.streamed.layouts[layer].pieces
        dtypes = {piece.dtype for piece in pieces}
        if len(dtypes) > 1:
            raise UserError(
                "this model cannot be trained in full with --parallel fsdp2",
                f"layer {layer} computes in several formats ({', '.join(sorted(map(str, dtypes)))})",
                "use --parallel ddp, or train an adapter",
            )
        width = dtypes.pop().itemsize
        places = [Place(piece.name, piece.offset // width, torch.Size(piece.shape)) for piece in pieces]
        own = backing.parts[layer].view(pieces[0].dtype)
        super().__init__(layer, places, own.numel(), group, built.device)
        self.hold(own)


class ShardedMasters(Masters):
    """Units instead of pairs of parameters; the optimizer updates each unit's part.

    Attributes:
        is_dropped: the step in work has failed on this rank, which only takes part in what is left of it.
    """

    def __init__(self, built: Built, trainable: dict[str, nn.Parameter], group: Group, ring: ShardedRing):
        self.pairs = {}
        self._trainable, self._ring, self._group = trainable, ring, group
        self.units = list(_units(built, trainable, group))
        self._place = {place.name: (unit, place) for unit in self.units for place in unit.places}
        # Where gradients of all elements are added up: two rows for the units of layers in turn (one fills while the
        # other is being exchanged), one for each unit outside.
        largest = max((unit.count for unit in self.units if unit.layer is not None), default=0)
        self._spare = [torch.zeros(largest, dtype=torch.float32, device=built.device) for _ in range(2)]
        self._rows: dict[int, torch.Tensor] = {}
        self._exchanged: list[tuple[Any, int, torch.Tensor, torch.Tensor]] = []
        self.is_dropped = False

    def parameters(self) -> list[nn.Parameter]:
        return [unit.master for unit in self.units]

    def collect(self, names: Iterable[str]) -> None:
        for name in names:
            p = self._trainable[name]
            if p.grad is None:
                continue
            unit, place = self._place[name]
            place.of(self._row(unit)).add_(p.grad)
            p.grad = None

    def _row(self, unit: Unit) -> torch.Tensor:
        """Where a unit's gradients of all its elements are added up on this rank; zeros at first."""
        key = self.units.index(unit)
        if key not in self._rows:
            if unit.layer is None:
                self._rows[key] = torch.zeros(unit.count, dtype=torch.float32, device=unit.device)
            else:
                if not self._spare:
                    self._settle(1)
                self._rows[key] = self._spare.pop()
        return self._rows[key][: unit.count]

    def prepare(self) -> list[torch.Tensor]:
        """Makes the rows of everything outside the layers, and where this rank's parts of their sums come to."""
        outside = [unit for unit in self.units if unit.layer is None]
        for unit in outside:
            self._row(unit)
        return [self._part(unit) for unit in outside]

    def _part(self, unit: Unit) -> torch.Tensor:
        return torch.empty(unit.part, dtype=torch.float32, device=unit.device)

    def reduce(self, layer: Layer, made: Sequence[torch.Tensor] | None = None) -> None:
        """Begin to add up what the ranks have collected for a layer (None: for everything outside the layers).

        Args:
            made: parts that `prepare` gave.

        Raises:
            RuntimeError: no memory for a part. The exchange was begun all the same, since the others are in it.
        """
        failure: Exception | None = None
        for number, (key, unit) in enumerate((k, u) for k, u in enumerate(self.units) if u.layer == layer):
            row = self._row(unit)
            part = unit.mine(row)  # where nothing comes of it
            if made is not None:
                part = made[number]
            elif not self.is_dropped and failure is None:
                try:
                    part = self._part(unit)
                except (RuntimeError, MemoryError) as problem:
                    failure = problem.with_traceback(None)
            self._exchanged.append((reduce_scatter(part, row), key, part, self._rows.pop(key)))
            if layer is None:
                self._settle(len(self._exchanged))
        if failure is not None:
            raise failure

    def settle(self) -> None:
        """Until everything that was begun is in the masters' gradients."""
        self._settle(len(self._exchanged))

    def _settle(self, count: int) -> None:
        for _ in range(count):
            work, key, part, row = self._exchanged.pop(0)
            work.wait()
            master = self.units[key].master
            if master.grad is None:
                master.grad = part
            else:
                master.grad += part
            if self.units[key].layer is not None:
                self._spare.append(row.zero_())

    def forget(self) -> None:
        self.settle()
        self.is_dropped = False
        for p in self._trainable.values():
            p.grad = None
        for unit in self.units:
            unit.master.grad = None
        self._spare += [row.zero_() for key, row in self._rows.items() if self.units[key].layer is not None]
        self._rows.clear()

    @torch.no_grad()
    def round(self) -> list[torch.Tensor | None]:
        """What every unit is to send (`Unit.round`)."""
        return [unit.round() for unit in self.units]

    def send(self, rounded: list[torch.Tensor | None]) -> None:
        """Hand what `round` gave to the other ranks; all of them call it together. The list is used up."""
        for unit in self.units:
            unit.publish(rounded.pop(0))
        self._ring.forget_all()

    def publish(self) -> None:
        self.send(self.round())


def _units(built: Built, trainable: dict[str, nn.Parameter], group: Group) -> Iterator[Unit]:
    """The trained tensors by layer and format; a layer's own weights as they lie in its bytes."""
    assert built.streamed is not None and isinstance(built.streamed.backing, ShardBacking)
    rest = dict(trainable)
    for layer, layout in built.streamed.layouts.items():
        if all(not piece.key and piece.name in rest for piece in layout.pieces):
            yield FromRing(layer, built.streamed.backing, built, group)
            for piece in layout.pieces:
                del rest[piece.name]
    groups: dict[tuple[Layer, torch.dtype], dict[str, nn.Parameter]] = {}
    for name, p in rest.items():
        index = part_of(name, built.layers_prefix)
        groups.setdefault((None if index == ENDS else index, p.dtype), {})[name] = p
    for (place, _), parameters in groups.items():
        yield Whole(place, parameters, group)


class Sharded(Several):
    """The engine's view of the other ranks: every pass is made by all of them, with or without rows of their own."""

    def __init__(self, group: Group, ring: ShardedRing):
        self.group, self.ring = group, ring
        self._left = 0
        self._backward = False
        self._masters: ShardedMasters | None = None
        self._begin = ring.begin
        ring.begin = self._begin_pass  # type: ignore[method-assign]

    def _begin_pass(self, schedule: Any) -> None:
        self._left -= 1
        self._begin(schedule)

    def masters(self, built: Built, trainable: dict[str, nn.Parameter]) -> Masters:
        self._masters = ShardedMasters(built, trainable, self.group, self.ring)
        self.ring.after_backward = self._masters.reduce
        return self._masters

    def totals(self, num_tokens: int, num_targets: int, num_passes: int) -> tuple[int, int, int]:
        told = self.group.gather((num_tokens, num_targets, num_passes))
        passes = max(passes for _, _, passes in told)
        self._left, self._backward = passes, True
        return sum(tokens for tokens, _, _ in told), sum(targets for _, targets, _ in told), passes

    def begin(self, num_passes: int) -> None:
        self._left = num_passes

    def evaluations(self, num_passes: int) -> int:
        self._left, self._backward = int(self.group.largest([num_passes])[0]), False
        return self._left

    def prepare(self, loss: torch.Tensor, masters: Masters) -> list[torch.Tensor]:
        assert self._masters is not None
        return self._masters.prepare()

    def add_up(self, loss: torch.Tensor, masters: Masters, made: list[torch.Tensor]) -> torch.Tensor:
        assert self._masters is not None
        self._masters.reduce(None, made)
        self._masters.settle()
        total = loss.detach().float()
        all_reduce(total)
        return total.to(loss.dtype)

    def norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return total_norm(grads)

    def publish(self, masters: Masters, observe: Observer) -> None:
        assert self._masters is not None
        rounded = self._masters.round()
        observe("publish", 0)
        with self.together():
            self._masters.send(rounded)

    def drain(self) -> None:
        super().drain()
        if self._masters is not None:
            self._masters.is_dropped = True  # until its gradients are forgotten
        self.ring.finish()
        there: list[tuple[str, int]] = [("layer", index) for index in range(self.ring.num_layers)]
        while self._left > 0:
            self.ring.begin(there + there[::-1] if self._backward else there)
            self.ring.finish()


def as_saved(engine: Engine, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Trained weights in the formats of the model's own parameters, and the buffers that are saved with them."""
    dtypes = {name: p.dtype for name, p in engine.built.model.named_parameters()}
    found = {name: tensor.to(dtypes[name]) for name, tensor in tensors.items()}
    own = engine.built.model.state_dict()
    return found | {name: own[name].cpu() for name, _ in engine.built.model.named_buffers() if name in own}


class ShardedEngine(Engine):
    """An engine whose state is in parts: each rank saves its own, and reads its own from what any layout has saved."""

    def __init__(self, built: Built, plan: Plan, group: Group):
        ring = ShardedRing(built, group)
        built.source = ring
        if plan.method == "full":
            for layer in built.layers:
                layer.requires_grad_(True)
        super().__init__(built, plan, Sharded(group, ring))

    @property
    def _units(self) -> list[Unit]:
        assert isinstance(self.masters, ShardedMasters)
        return self.masters.units

    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """On the first rank, in host memory; the others take part and get nothing."""
        return self._gathered({})

    def _gathered(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """As `trained_tensors`, unit by unit, each in the format that `dtypes` gives it as soon as it is there."""
        found: dict[str, torch.Tensor] = {}
        for unit in self._units:
            for name, tensor in unit.to_host(unit.master).items():
                found[name] = tensor.to(dtypes.get(name, tensor.dtype))
        return {name: found[name] for name in self.names if name in found}

    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """On the first rank, in the formats in which the model computes."""
        dtypes = {name: p.dtype for name, p in self.built.model.named_parameters()}
        return as_saved(self, self._gathered(dtypes))

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's share (`slices.Parts`)."""
        tensors, numbers = Parts(), dict[str, Any]()
        for unit in self._units:
            tensors |= unit.cut(unit.master, _PARAMETER)
            for key, value in self.optimizer.state.get(unit.master, {}).items():
                if isinstance(value, torch.Tensor) and value.numel() == unit.part:
                    tensors |= unit.cut(value, _OPTIMIZER + key)
                elif not isinstance(value, torch.Tensor):
                    numbers |= {f"{place.name}|{key}": value for place in unit.places}
                elif unit.group.is_leader:  # a number that all ranks have
                    tensors |= {_OPTIMIZER.format(place.name) + key: value.detach() for place in unit.places}
        values = {"optimizer": numbers, "scale": self.scaler.scale, "good_steps": self.scaler.good_steps}
        return tensors, values  # type: ignore[return-value]

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor], values: dict[str, Any]) -> None:
        """From tensors that are read in part (`slices.Saved`)."""
        assert isinstance(tensors, Saved)
        state: dict[str, torch.Tensor] = {}
        numbers: dict[str, Any] = {}
        for index, unit in enumerate(self._units):
            for place in unit.places:
                name = _PARAMETER.format(place.name)
                if name not in tensors or tensors.shape(name) != tuple(place.shape):
                    raise UserError(
                        "the checkpoint does not fit this run",
                        f"{place.name} is missing or has another shape",
                        "resume with the settings the run was started with",
                    )
            unit.master.copy_(unit.read(tensors, _PARAMETER))
            self._load_optimizer(str(index), unit, tensors, values["optimizer"], state, numbers)
        names = [str(index) for index in range(len(self._units))]
        restore_state(self.optimizer, names, state, numbers)
        self.scaler.scale, self.scaler.good_steps = values["scale"], values["good_steps"]
        self.masters.publish()

    def _load_optimizer(
        self, name: str, unit: Unit, tensors: Saved, saved_numbers: dict[str, Any], state: dict[str, torch.Tensor],
        numbers: dict[str, Any],
    ) -> None:  # fmt: skip
        """A unit's state out of that of its tensors, which need not all have one. What they have in common (how many
        updates there were) is that of the one with most of them."""
        for place in unit.places:
            prefix = _OPTIMIZER.format(place.name)
            for full in [full for full in tensors if full.startswith(prefix)]:
                key = full.removeprefix(prefix)
                before = state.get(f"{name}|{key}")
                if tensors.shape(full) != tuple(place.shape):
                    found = tensors[full]
                    state[f"{name}|{key}"] = found if before is None else torch.maximum(before, found)
                elif before is None:
                    state[f"{name}|{key}"] = unit.read(tensors, _OPTIMIZER + key)
            for full, value in saved_numbers.items():
                owner, _, key = full.rpartition("|")
                if owner == place.name:
                    numbers[f"{name}|{key}"] = max(value, numbers.get(f"{name}|{key}", value))
