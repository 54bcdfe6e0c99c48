"""What every phase of a run needs of the card, of RAM and of the disk, with what each figure consists of.

Phases: `load` (weights arrive, adapters and masters are made), `first_step` (the optimizer's state appears), `step`
(at the longest rows), `eval`, `save` (a checkpoint), `merge` (`fitune export --merged`, a process of its own on the
CPU) and `resume`. Plain Python; host and disk terms are in `memory.host`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fitune.memory import additive, host
from fitune.memory.constants import Overheads
from fitune.memory.moments import Moment, highest
from fitune.memory.replay import StepTerms
from fitune.memory.sequence import Arrival, Replayed, Steps, replay_run
from fitune.plan import Plan

NAMES = ("load", "first_step", "step", "eval", "save", "merge", "resume")
FIELDS = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes", "pinned_bytes", "disk_bytes")
NOT_RESERVED = ("context",)  # owners outside torch's allocator
SLACK = "allocator"  # what the allocator holds beyond what is allocated


@dataclass(frozen=True)
class Phase:
    """One phase's peaks. A figure that is not computed is None.

    Attributes:
        device: owner to bytes on the card at the phase's peak: tensors, `workspace`, `allocator` (reserved and unused)
            and `context`; empty on the CPU, where tensors are host memory.
        host, pinned, disk: owner to bytes of RAM, of the part of it that is pinned, of the disk; None: not computed.
        place: where in the phase its peak is, in words.
        tensor_bytes: on the CPU: how much of RAM tensors are.
    """

    name: str
    device: dict[str, int]
    host: dict[str, int] | None
    pinned: dict[str, int] | None
    disk: dict[str, int] | None
    on_card: bool
    place: str = ""
    tensor_bytes: int | None = None

    @property
    def allocated_bytes(self) -> int | None:
        if not self.on_card:
            return self.tensor_bytes
        return sum(size for owner, size in self.device.items() if owner not in (*NOT_RESERVED, SLACK))

    @property
    def reserved_bytes(self) -> int | None:
        return sum(v for k, v in self.device.items() if k not in NOT_RESERVED) if self._has_slack else None

    @property
    def device_bytes(self) -> int | None:
        return sum(self.device.values()) if self._has_slack else None

    @property
    def _has_slack(self) -> bool:
        return self.on_card and (SLACK in self.device or not self.device)

    def as_dict(self) -> dict[str, Any]:
        """The fields of `predicted.phases`, and whose the bytes are."""

        def total(owners: dict[str, int] | None) -> int | None:
            return None if owners is None else sum(owners.values())

        values = (self.allocated_bytes, self.reserved_bytes, self.device_bytes, total(self.host), total(self.pinned),
                  total(self.disk))  # fmt: skip
        return dict(zip(FIELDS, values, strict=True)) | {
            "place": self.place, "device": self.device, "host": self.host, "disk": self.disk,
        }  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """All phases, and one steady step part by part (what torch's allocator holds, without the context)."""

    plan: Plan
    phases: tuple[Phase, ...]
    timeline: tuple[Moment, ...]
    notes: tuple[str, ...] = field(default=())

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def most(self) -> Phase:
        """The phase with the highest peak of what is limited: of the card, or of RAM on the CPU. What the allocator
        holds it holds on, so of phases with the same need that is the one with the most in use."""
        return max(self.phases, key=lambda phase: (needed_bytes(phase), phase.allocated_bytes or 0))

    def as_dict(self) -> dict[str, Any]:
        """The `predicted` object: the highest of each field over the phases, and the phases. (A merge runs in another
        process: it says nothing of a field that no other phase knows.)"""
        phases = {phase.name: phase.as_dict() for phase in self.phases}
        top: dict[str, Any] = {}
        for name in FIELDS:
            known = {key: values[name] for key, values in phases.items() if values[name] is not None}
            top[name] = max(known.values(), default=None) if set(known) - {"merge"} else None
        step = highest(self.timeline)
        return {**top, "step_s": None, "tokens_per_s": None, "peak_at": step.place, "phases": phases}


def needed_bytes(phase: Phase) -> int:
    """What a budget is compared with: driver-counted bytes where they are known, else allocated and context; on the
    CPU the process' RAM."""
    if phase.on_card:
        return sum(phase.device.values())
    return sum((phase.host or {}).values())


def predict(
    terms: StepTerms, plan: Plan, overheads: Overheads, facts: host.Facts, script: Steps | None = None,
    width: int | None = None, briefly: bool = False,
) -> Prediction:  # fmt: skip
    """Every phase of a plan.

    Args:
        terms: of the traced step at the plan's micro-batch, row width and loss chunk.
        overheads: context and workspaces of the card.
        facts: of the model's files and the data.
        script: the same step event for event; with it every block has a name, and what the allocator reserves is
            computed. Without it, or where its sizes are those of another shape, sums of `terms` are taken.
        width: tokens of the widest row; the plan's `seq_len` where it is not given.
        briefly: loading and steps of a run that is resumed, where a job's highest peak nearly always is.
    """
    replayed = _replayed(terms, plan, overheads, facts, script, width or plan.seq_len, briefly)
    step = highest(replayed["step"].moments).owners
    kept = step.get("saved", 0) + step.get("inputs", 0)
    phases = [_phase(name, replayed[name], plan, overheads, facts, kept) for name in NAMES if name in replayed]
    if not briefly:
        phases.insert(NAMES.index("merge"), _merge(plan, facts))
    timeline = tuple(moment for moment in replayed["step"].moments if moment.part != "load")
    return Prediction(plan, tuple(phases), timeline, host.notes(plan, facts))


def _replayed(
    terms: StepTerms, plan: Plan, overheads: Overheads, facts: host.Facts, script: Steps | None, width: int,
    briefly: bool,
) -> dict[str, Replayed]:  # fmt: skip
    """Phase to its moments, with library workspaces, and on a card what is reserved where that is computed."""
    if script is not None:
        return replay_run(
            script, plan, width, on_card=plan.device == "cuda", workspace_bytes=overheads.workspace_bytes,
            arrival=_arrival(plan, facts), expandable=facts.platform != "win32", briefly=briefly,
        )  # fmt: skip
    resident = Moment("save", -1, additive.resident(terms, plan))
    if plan.accumulation_order == "layer-major":  # its terms are the whole step's: no gradients are there before
        plan = plan.with_(batch=plan.micro_batch)
    moments = {
        "load": _load(terms, plan),
        "first_step": additive.step_moments(terms, plan, has_state=False),
        "step": additive.step_moments(terms, plan),
        "eval": additive.eval_moments(terms, plan),
        "save": [resident],
        "resume": [*_load(terms, plan), resident],
    }
    workspace = {"workspace": overheads.workspace_bytes} if overheads.workspace_bytes else {}
    return {
        name: Replayed(tuple(m if name == "load" else m.with_(workspace) for m in found), None)
        for name, found in moments.items()
    }


def _arrival(plan: Plan, facts: host.Facts) -> Arrival:
    """Seeded weights are all made on the card; those of files come through RAM, where a host embedding stays."""
    makes_table = facts.makes_weights and plan.embedding_place == "host"
    table = facts.vocab_size * facts.hidden_size * facts.stored_width if makes_table else 0
    wide = plan.base_format if plan.base_format in host.WIDTHS else plan.precision
    converts = facts.stored_format != wide if facts.stored_format else facts.stored_width != host.WIDTHS[wide]
    return Arrival(facts.stored_width, host.WIDTHS[wide], converts, facts.makes_weights, table)


def _load(terms: StepTerms, plan: Plan) -> list[Moment]:
    """Weights arrive one by one, each in its own width before it is packed; then masters and buffers are made."""
    owners = additive.resident(terms, plan)
    owners["optimizer"] = 0
    arriving = {name: size for name, size in owners.items() if name in ("weights", "adapters")}
    arriving["temporary"] = terms.largest_weight_bytes
    return [Moment("load", -1, arriving), Moment("prepare", -1, owners)]


def _phase(
    name: str, replayed: Replayed, plan: Plan, overheads: Overheads, facts: host.Facts, kept_bytes: int
) -> Phase:  # fmt: skip
    peak = highest(replayed.moments)
    tensors = {owner: size for owner, size in peak.owners.items() if size}
    if plan.device != "cuda":
        return Phase(name, {}, host.ram(name, plan, facts, tensors, kept_bytes), host.pinned(plan, facts, name),
                     host.disk(name, plan, facts), False, peak.place, sum(tensors.values()))  # fmt: skip
    pinned = host.pinned(plan, facts, name)
    device = {**tensors, "context": overheads.outside_bytes(sum(pinned.values()))}
    if replayed.reserved_bytes is not None:
        device[SLACK] = replayed.reserved_bytes - sum(tensors.values())
    return Phase(name, device, host.ram(name, plan, facts, {}), pinned,
                 host.disk(name, plan, facts), True, peak.place)  # fmt: skip


def _merge(plan: Plan, facts: host.Facts) -> Phase:
    """A merge runs on the CPU, in its own process; after full fine-tuning there is nothing to merge."""
    if plan.method == "full":
        return Phase("merge", {}, None, None, None, False, "nothing to merge")
    on_card = plan.device == "cuda"
    return Phase("merge", {}, host.merge_ram(facts), {}, host.disk("merge", plan, facts), on_card, "the merge")
