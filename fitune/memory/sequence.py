"""A run's events in their order on the allocator's model: what each phase makes torch reserve. Plain Python.

A run loads, evaluates, makes its first step (the optimizer's state appears between activations), then steps, evaluates
and saves. What the allocator has cached in one phase it still holds in the next, so the phases are replayed on one
allocator in this order, until a step no longer makes it grow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from fitune.memory.allocator import CachingAllocator
from fitune.memory.constants import NUM_CUBLAS_THREADS
from fitune.memory.events import GRANULE, Event
from fitune.memory.moments import Moment, moments_of, owner_of
from fitune.plan import Plan

MOST_STEPS = 4  # steady steps replayed before what is reserved is taken as settled


class Steps(Protocol):
    """What `memory.script.Script` offers here."""

    def step_events(
        self, num_rows: int, num_columns: int, loss_chunk: int, *, recompute_layers: int, accumulates: bool,
        first_step: bool,
    ) -> list[Event]: ...  # fmt: skip

    def eval_events(self, num_rows: int, num_columns: int, loss_chunk: int) -> list[Event]: ...


Script = Steps  # the name by which `planner.placement` still asks for it


_Loading = tuple[list[Event], list[Event]]  # weights on their way to the card, and what is made once they are there


@dataclass(frozen=True)
class Replayed:
    """A phase: its moments, and the most that was reserved in it; None where that is not computed."""

    moments: tuple[Moment, ...]
    reserved_bytes: int | None


@dataclass(frozen=True)
class Arrival:
    """How weights come to the card.

    Attributes:
        width: bytes of a value as it is stored.
        compute_width: bytes of a value as it is computed with.
        converts: the stored format is another than that of the computation.
        made_there: seeded weights are made on the card, a module at a time; those of files are read in RAM.
        table_bytes: an embedding, as stored, that is made there on its way to the host, before the others.
    """

    width: int = 2
    compute_width: int = 2
    converts: bool = False
    made_there: bool = False
    table_bytes: int = 0


def replay_run(
    script: Steps, plan: Plan, width: int, *, on_card: bool, workspace_bytes: int, arrival: Arrival, expandable: bool,
    briefly: bool = False,
) -> dict[str, Replayed]:  # fmt: skip
    """Phase to what it holds: `load`, `eval`, `first_step`, `step`, `save` and `resume`.

    Args:
        width: tokens of the widest row.
        on_card: whether torch's CUDA allocator is asked; on the CPU blocks have no granule and nothing is reserved.
        workspace_bytes: allocated by the libraries at their first use, and kept.
        expandable: whether torch's allocator uses expandable segments.
        briefly: only `load` and `step` of a run that is resumed, where the highest peak of a job nearly always is
            (`tests/planner/test_predict.py` compares them), and only sums.
    """
    shape = (plan.micro_batch, width, plan.loss_chunk)
    accumulates = plan.micro_batch < plan.batch

    def step(first_step: bool) -> list[Event]:
        return script.step_events(
            *shape, recompute_layers=plan.recompute_layers, accumulates=accumulates, first_step=first_step
        )

    # the first of them comes when the engine tries the model, the others with the first step
    sizes = (workspace_bytes // NUM_CUBLAS_THREADS, workspace_bytes - workspace_bytes // NUM_CUBLAS_THREADS)
    kept = [
        Event(-1 - i, size, "workspace", "a library's workspace", "load", -1) for i, size in enumerate(sizes) if size
    ]
    steady = step(False)
    resuming = _loading(steady, plan, arrival, kept[:1])
    if briefly:
        told = {"load": resuming[0] + resuming[1], "step": steady}
        if not on_card:
            return {name: Replayed(tuple(moments_of(events)), None) for name, events in told.items()}
        reserved = _resumed(resuming, kept[1:], steady, expandable)
        return {name: Replayed((_sum(name, events, workspace_bytes),), reserved[name]) for name, events in told.items()}
    first = step(True)
    arriving, there = _loading(first, plan, arrival, kept[:1])
    loading = arriving + there
    evaluation = script.eval_events(*shape)
    reserved = (
        _reserved((arriving, there), kept[1:], first, steady, evaluation, resuming, expandable) if on_card else {}
    )
    resident = [event for event in steady if event.part == "load"]
    told = {"load": loading, "first_step": kept + first, "step": kept + steady, "eval": kept + evaluation,
            "save": kept + resident, "resume": resuming[0] + resuming[1]}  # fmt: skip
    moments = {name: tuple(moments_of(events, GRANULE if on_card else 1)) for name, events in told.items()}
    return {name: Replayed(found, reserved.get(name)) for name, found in moments.items()}


def _sum(phase: str, events: Iterable[Event], workspace_bytes: int) -> Moment:
    """The highest moment of a list without a word on whose the bytes are (nor on rounding: 0.1 % at most)."""
    peak = max(itertools.accumulate(event.num_bytes for event in events))
    peak += workspace_bytes if phase != "load" else 0
    return Moment(phase, -1, {"temporary": peak})


def _reserved(
    loading: _Loading, kept: list[Event], first: list[Event], steady: list[Event], evaluation: list[Event],
    resuming: _Loading, expandable: bool,
) -> dict[str, int]:  # fmt: skip
    """Phase to the most bytes that the allocator holds in it."""
    allocator = CachingAllocator(expandable=expandable)
    found = {"load": _loaded(allocator, loading)}
    allocator.run(kept)
    allocator.run(_without_load(evaluation))  # before the first step, without the optimizer's state
    found["first_step"] = allocator.run(_without_load(first)).peak_reserved_bytes
    for _ in range(MOST_STEPS):
        before = allocator.reserved_bytes
        found["step"] = allocator.run(_without_load(steady)).peak_reserved_bytes
        if allocator.reserved_bytes == before:
            break
    found["eval"] = allocator.run(_without_load(evaluation)).peak_reserved_bytes
    found["save"] = allocator.reserved_bytes
    found["resume"] = _loaded(CachingAllocator(expandable=expandable), resuming)
    return found


def _resumed(loading: _Loading, kept: list[Event], steady: list[Event], expandable: bool) -> dict[str, int]:
    """`_reserved` of the first step of a run that has loaded with its optimizer's state."""
    allocator = CachingAllocator(expandable=expandable)
    found = {"load": _loaded(allocator, loading)}
    allocator.run(kept)
    return found | {"step": allocator.run(_without_load(steady)).peak_reserved_bytes}


def _loaded(allocator: CachingAllocator, loading: _Loading) -> int:
    """The most bytes that are held while loading; what the weights came through goes back to the driver after them."""
    arriving, there = loading
    highest = allocator.run(arriving).peak_reserved_bytes
    allocator.release_cached()
    return max(highest, allocator.run(there).peak_reserved_bytes)


def _without_load(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event.part != "load"]


def _loading(events: Iterable[Event], plan: Plan, arrival: Arrival, warm: Iterable[Event] = ()) -> _Loading:
    """What is there before a step, in the order in which it comes: weights (and beside them what they are made from);
    then adapters, masters, buffers, the first workspace (`warm`: the engine tries the model once), optimizer state."""
    births = sorted((event for event in events if event.part == "load"), key=_order)
    weights = [event for event in births if owner_of(event) == "weights"]
    rest = [event for event in births if owner_of(event) not in ("weights", "optimizer")]
    state = [event for event in births if owner_of(event) == "optimizer"]
    return _Coming(plan, arrival).all(weights), [*rest, *warm, *state]


def _order(event: Event) -> int:
    return ("weights", "adapters", "stream", "masters", "workspace", "optimizer").index(owner_of(event))


class _Coming:
    """Weights on their way to the card, as `fitune.model.build.fill` takes them.

    Those of files come one at a time: what is packed or converted on the card is there as it is stored until its own
    form is made (the embedding and the head are converted in RAM). Seeded ones are made on the card, all of a module at
    once, as they are stored, and each is held until the next one is asked for; where stored and own form are the same
    they are one block.
    """

    def __init__(self, plan: Plan, arrival: Arrival):
        self.plan, self.arrival = plan, arrival
        self.made: list[Event] = []
        self.number = -2
        self.held: list[Event] = []  # the one before, which goes when the next one has come

    def all(self, weights: list[Event]) -> list[Event]:
        if self.arrival.table_bytes:
            name = "the embedding's table, on its way to the host"
            self.held = [self._born(name, self.arrival.table_bytes, -1)]
        for _, module in itertools.groupby(weights, key=_module_of):
            forms = [list(form) for _, form in itertools.groupby(module, key=_weight_of)]
            if self.arrival.made_there:
                self._made(forms)
            else:
                for form in forms:
                    self._read(form)
        self._go(self.held)
        return self.made

    def _made(self, forms: list[list[Event]]) -> None:
        """A module of seeded weights."""
        sources = [self._source(form) for form in forms]
        for form, source in zip(forms, sources, strict=True):
            self._go(self.held)
            self._form(form)
            self.held = source

    def _read(self, form: list[Event]) -> None:
        """A weight of a file."""
        self._go(self.held)
        self.held = []
        source = self._source(form) if form[0].layer >= 0 else []
        self._form(form)
        self._go(source)

    def _source(self, form: list[Event]) -> list[Event]:
        """The weight as it is stored, unless its own form is that."""
        values = self._values(form)
        packed = self.plan.base_format in _VALUES_PER_BYTE and form[0].label.endswith(_CODES)
        if not packed and not self.arrival.converts:
            return []
        return [self._born(f"{_weight_of(form[0])} as it arrives", values * self.arrival.width, form[0].layer)]

    def _form(self, form: list[Event]) -> None:
        """The weight as it stays, and what packing it takes for a moment."""
        packing = _packing_bytes(self.plan) if form[0].label.endswith(_CODES) else ()
        taken = [int(self._values(form) * per_value) for per_value in packing]
        passing = [self._born("what packing takes", taken[0], form[0].layer)] if taken else []
        if self.plan.base_format == "int8":  # the quotient, and its rounded copy, which the codes are made from
            passing += [self._born("what packing takes", size, form[0].layer) for size in taken[1:]]
            self._go(passing[:-1])
            self.made += form
            self._go(passing[-1:])
            return
        self.made += form[:1]
        passing += [self._born("what packing takes", size, form[0].layer) for size in taken[1:]]
        self.made += form[1:]
        self._go(passing)

    def _values(self, form: list[Event]) -> int:
        if form[0].label.endswith(_CODES):
            return form[0].num_bytes * _VALUES_PER_BYTE.get(self.plan.base_format, 1)
        return form[0].num_bytes // self.arrival.compute_width

    def _born(self, label: str, num_bytes: int, layer: int) -> Event:
        self.number -= 1
        event = Event(self.number, num_bytes, "temporary", label, "load", layer)
        self.made.append(event)
        return event

    def _go(self, events: Iterable[Event]) -> None:
        self.made += [replace(event, num_bytes=-event.num_bytes) for event in events]


_CODES = ".codes"
_VALUES_PER_BYTE = {"nf4": 2, "fp4": 2, "int8": 1}


def _packing_bytes(plan: Plan) -> tuple[float, ...]:
    """Bytes per value of what `fitune.model.formats.pack` makes on its way to the packed form: for int8 the fp32
    quotient and its rounded copy; for 4 bits doubly quantised the fp32 scales of 64 values before and after their mean
    is taken off (bitsandbytes 0.50, `quantize_4bit`)."""
    if plan.base_format == "int8":
        return 4.0, 4.0
    return (4 / 64, 4 / 64) if plan.double_quant else ()


def _weight_of(event: Event) -> str:
    """Name of the weight that a block is, or is a part of."""
    name, _, leaf = event.label.rpartition(".")
    return name if leaf in ("codes", "scale", "absmax", "absmax2", "offset", "code2", "weight") else event.label


def _module_of(event: Event) -> str:
    """Name of the module whose weights are made together. Fused experts are tensors of one module."""
    parent = _weight_of(event).rpartition(".")[0]
    return parent if parent.endswith("experts") else _weight_of(event)
