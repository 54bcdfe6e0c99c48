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
from fitune.memory.events import Event
from fitune.memory.moments import Moment, moments_of, owner_of
from fitune.plan import Plan

GRANULE = 512
MOST_STEPS = 4  # steady steps replayed before what is reserved is taken as settled


class Script(Protocol):
    """What `memory.script.Script` offers here."""

    def step_events(
        self, num_rows: int, num_columns: int, loss_chunk: int, *, recompute_layers: int, accumulates: bool,
        first_step: bool,
    ) -> list[Event]: ...  # fmt: skip

    def eval_events(self, num_rows: int, num_columns: int, loss_chunk: int) -> list[Event]: ...


@dataclass(frozen=True)
class Replayed:
    """A phase: its moments, and the most that was reserved in it; None where that is not computed."""

    moments: tuple[Moment, ...]
    reserved_bytes: int | None


@dataclass(frozen=True)
class Arrival:
    """How weights come to the card: `width` bytes a value as they are stored; before the others `table_bytes`, an
    embedding that is made there on its way to the host (seeded weights; those of files are read in RAM)."""

    width: int = 2
    table_bytes: int = 0


def replay_run(
    script: Script, plan: Plan, width: int, *, on_card: bool, workspace_bytes: int, arrival: Arrival, expandable: bool,
    briefly: bool = False,
) -> dict[str, Replayed]:  # fmt: skip
    """Phase to what it holds: `load`, `eval`, `first_step`, `step`, `save` and `resume`.

    Args:
        width: tokens of the widest row.
        on_card: whether torch's CUDA allocator is asked; on the CPU blocks have no granule and nothing is reserved.
        workspace_bytes: allocated by the libraries at their first use, and kept.
        expandable: whether torch's allocator uses expandable segments.
        briefly: only `load`, `first_step` and `step`, where the highest peak of a job nearly always is, and only sums.
    """
    shape = (plan.micro_batch, width, plan.loss_chunk)
    accumulates = plan.micro_batch < plan.batch

    def step(first_step: bool) -> list[Event]:
        return script.step_events(
            *shape, recompute_layers=plan.recompute_layers, accumulates=accumulates, first_step=first_step
        )

    first, steady = step(True), step(False)
    kept = [Event(-1, workspace_bytes, "workspace", "workspaces of libraries", "load", -1)] * bool(workspace_bytes)
    loading = _loading(first, plan, arrival)
    if briefly:
        told = {"load": loading, "first_step": first, "step": steady}
        if not on_card:
            return {name: Replayed(tuple(moments_of(events)), None) for name, events in told.items()}
        reserved = _reserved(loading, kept, first, steady, [], [], expandable)
        return {name: Replayed((_sum(name, events, workspace_bytes),), reserved[name]) for name, events in told.items()}
    evaluation, resuming = script.eval_events(*shape), _loading(steady, plan, arrival)
    resident = [event for event in steady if event.part == "load"]
    told = {"load": loading, "first_step": kept + first, "step": kept + steady, "eval": kept + evaluation,
            "save": kept + resident, "resume": resuming}  # fmt: skip
    moments = {name: tuple(moments_of(events, GRANULE if on_card else 1)) for name, events in told.items()}
    reserved = _reserved(loading, kept, first, steady, evaluation, resuming, expandable) if on_card else {}
    return {name: Replayed(found, reserved.get(name)) for name, found in moments.items()}


def _sum(phase: str, events: Iterable[Event], workspace_bytes: int) -> Moment:
    """The highest moment of a list without a word on whose the bytes are (nor on rounding: 0.1 % at most)."""
    peak = max(itertools.accumulate(event.num_bytes for event in events))
    peak += workspace_bytes if phase != "load" else 0
    return Moment(phase, -1, {"temporary": peak})


def _reserved(
    loading: list[Event], kept: list[Event], first: list[Event], steady: list[Event], evaluation: list[Event],
    resuming: list[Event], expandable: bool,
) -> dict[str, int]:  # fmt: skip
    """Phase to the most bytes that the allocator holds in it."""
    allocator = CachingAllocator(expandable=expandable)
    found = {"load": allocator.run(loading).peak_reserved_bytes}
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
    found["resume"] = CachingAllocator(expandable=expandable).run(resuming).peak_reserved_bytes
    return found


def _without_load(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event.part != "load"]


def _loading(events: Iterable[Event], plan: Plan, arrival: Arrival) -> list[Event]:
    """What is there before a step, in the order in which it comes: weights (a packed one beside its wide form, which
    goes again), adapters, masters, buffers, optimizer state."""
    births = sorted((event for event in events if event.part == "load"), key=_order)
    values_per_byte = {"nf4": 2, "fp4": 2, "int8": 1}.get(plan.base_format, 0)
    made: list[Event] = []
    wide = _Wide(made)
    if arrival.table_bytes:
        wide.born("the embedding's table, on its way to the host", arrival.table_bytes, -1)
    for event in births:
        name, _, leaf = event.label.rpartition(".")
        if wide.name != name:
            wide.gone()
        if leaf == "codes" and values_per_byte:
            wide.born(name, event.num_bytes * values_per_byte * arrival.width, event.layer)
        made.append(event)
    wide.gone()
    return made


def _order(event: Event) -> int:
    return ("weights", "adapters", "masters", "workspace", "optimizer").index(owner_of(event))


class _Wide:
    """The one weight that is on the card in its own width."""

    def __init__(self, made: list[Event]):
        self.made, self.name, self.number = made, "", -2
        self._born: Event | None = None

    def born(self, name: str, num_bytes: int, layer: int) -> None:
        self.gone()
        self.name, self.number = name, self.number - 1
        self._born = Event(self.number, num_bytes, "temporary", f"{name} as it arrives", "load", layer)
        self.made.append(self._born)

    def gone(self) -> None:
        if self._born is not None:
            self.made.append(replace(self._born, num_bytes=-self._born.num_bytes))
        self._born, self.name = None, ""
