"""Terms add up to phases, phases to a peak."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from fitune.memory.stacks import constants
from fitune.memory.stacks.settings import StackSettings
from fitune.units import GIB

COMPONENTS = (
    "weights", "adapters", "gradients", "optimizer", "activations", "logits", "temporary", "workspace", "context",
)  # fmt: skip


@dataclass(frozen=True)
class Term:
    """Bytes with a name. ``pool`` is how the caching allocator meets them: ``static`` for blocks that stay for the
    whole run, ``kept`` for activations kept from forward to backward, ``passing`` for what comes and goes."""

    component: str
    name: str
    num_bytes: float
    pool: str = "static"


@dataclass(frozen=True)
class Phase:
    """What is allocated at one moment of a step. Moments of one ``group`` (``loss``, ``layer`` for the backward pass
    through the layers, ``step``) use the same cached blocks."""

    name: str
    terms: tuple[Term, ...]
    group: str = "loss"
    cached_bytes: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of all terms."""
        return int(sum(term.num_bytes for term in self.terms))

    @property
    def components(self) -> dict[str, int]:
        """Bytes by component."""
        sums = dict.fromkeys(COMPONENTS, 0.0)
        for term in self.terms:
            sums[term.component] += term.num_bytes
        return {name: int(value) for name, value in sums.items()}

    def pool_bytes(self, pool: str) -> float:
        """Bytes of the terms of one pool."""
        return sum(term.num_bytes for term in self.terms if term.pool == pool)


@dataclass(frozen=True)
class StackPrediction:
    """What another tool would use on one GPU.

    ``peaks`` has the peak bytes per metric (allocated, reserved, nvidia-smi), ``peak_bytes`` the one asked for,
    ``phases`` the allocated bytes of every phase, ``phase`` the highest of them, ``components`` its bytes (they add up
    to the allocated peak; ``context`` is outside the allocator and only part of nvidia-smi), ``parts`` the components
    of every phase, without the context. ``low_bytes`` and ``high_bytes`` bound ``peak_bytes``: by the scatter of
    published runs around such predictions (docs/stacks.md), or by an assumption; ``interval_source`` says which.
    """

    stack: str
    metric: str
    phase: str
    phases: dict[str, int]
    components: dict[str, int]
    parts: dict[str, dict[str, int]]
    peaks: dict[str, int]
    low_bytes: int
    high_bytes: int
    interval_source: str
    notes: tuple[str, ...] = field(default=())

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the metric that was asked for."""
        return self.peaks[self.metric]

    def as_dict(self) -> dict:
        """Ready for JSON."""
        return dataclasses.asdict(self) | {"peak_bytes": self.peak_bytes, "notes": list(self.notes)}


def settle(stack: str, s: StackSettings, phases: list[Phase], notes: list[str]) -> StackPrediction:
    """The prediction from a stack's phases: the highest phase, then what the allocator and the driver add."""
    highest = max(phases, key=lambda phase: phase.num_bytes)
    allocated = highest.num_bytes
    reserved = reserved_bytes(s, phases, allocated)
    context = context_bytes(s)
    parts = {phase.name: {k: v for k, v in phase.components.items() if v} for phase in phases}
    peaks = {"allocated": allocated, "reserved": reserved, "nvidia-smi": reserved + context}
    low, high, source = scatter(stack, s)
    peak = peaks[s.metric]
    return StackPrediction(
        stack, s.metric, highest.name, {phase.name: phase.num_bytes for phase in phases},
        highest.components | {"context": context}, parts, peaks, int(peak * low), int(peak * high),
        source, tuple(notes),
    )  # fmt: skip


def scatter(stack: str, s: StackSettings) -> tuple[float, float, str]:
    """Lowest and highest ratio of measured to predicted bytes, and where they are from: published runs of such a kind,
    or, where there are none with complete settings, an assumption."""
    known = "hf-trainer" if stack in constants.MEASURED_LIKE_TRAINER else stack
    if s.n_gpus > 1:
        measured = constants.SEVERAL_GPUS[s.metric] if known == "hf-trainer" else None
        low, high = measured or constants.UNCONFIRMED_SEVERAL_GPUS
    else:
        measured = constants.SCATTER.get(known, {}).get(s.metric)
        low, high = measured or constants.UNCONFIRMED
    like = stack if known == stack else f"{known}, which {stack} is like,"
    source = (
        f"the scatter of published runs of {like} around this prediction (docs/stacks.md)" if measured
        else f"assumed: no published run of {stack} has complete settings and this counter (docs/stacks.md)"
    )  # fmt: skip
    return low, high, source


def reserved_bytes(s: StackSettings, phases: list[Phase], allocated: int) -> int:
    """Bytes that the caching allocator holds at the end of a step.

    A freed block serves a request that it fits; logits are few blocks of GiB, a layer's activations many of tens to
    hundreds of MiB, and what is left of a split block is too small for its next user. So the bytes that come and go in
    the head and loss lie beside those of a layer's backward; the optimizer's temporaries, one a parameter, go where the
    layers' activations were. Where the sum is more than the card has, the
    allocator gives its cached blocks back and starts over, and ends somewhere between the allocated peak and the card.
    """
    static = max(phase.pool_bytes("static") for phase in phases)
    kept = max(phase.pool_bytes("kept") for phase in phases)
    passing = dict.fromkeys(("loss", "layer", "step"), 0.0)
    for phase in phases:
        group = phase.group
        passing[group] = max(passing[group], phase.pool_bytes("passing") + phase.cached_bytes)
    others = max(kept + passing["layer"], passing["step"])
    total = max(static + passing["loss"] + others, allocated * constants.ROUNDING)
    if s.card_gib:
        usable = s.card_gib * GIB * constants.USABLE_SHARE - context_bytes(s)
        if total > usable > allocated:
            total = (allocated + usable) / 2
    return int(total)


def context_bytes(s: StackSettings) -> int:
    """What the driver counts outside the allocator: CUDA context and loaded kernels, and NCCL's buffers."""
    return constants.CUDA_CONTEXT_BYTES + (constants.NCCL_BYTES if s.n_gpus > 1 else 0)
