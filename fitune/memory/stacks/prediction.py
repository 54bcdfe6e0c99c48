"""Terms add up to phases, phases to a peak."""

from __future__ import annotations

from dataclasses import dataclass, field

from fitune.memory.stacks import constants
from fitune.memory.stacks.settings import StackSettings
from fitune.units import GIB

COMPONENTS = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "workspace", "context")


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

    def pool_bytes(self, pool: str) -> float:
        """Bytes of the terms of one pool."""
        return sum(term.num_bytes for term in self.terms if term.pool == pool)


@dataclass(frozen=True)
class StackPrediction:
    """What another tool would use on one GPU.

    ``peaks`` has the peak bytes per metric (allocated, reserved, nvidia-smi), ``peak_bytes`` the one asked for,
    ``phases`` the allocated bytes of every phase, ``phase`` the highest of them, ``components`` its bytes (they add up
    to the allocated peak; ``context`` is outside the allocator and only part of nvidia-smi). ``low_bytes`` and
    ``high_bytes`` bound ``peak_bytes`` by the stack's own scatter over published runs (docs/stacks.md).
    """

    stack: str
    metric: str
    phase: str
    phases: dict[str, int]
    components: dict[str, int]
    peaks: dict[str, int]
    low_bytes: int
    high_bytes: int
    notes: tuple[str, ...] = field(default=())

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the metric that was asked for."""
        return self.peaks[self.metric]

    def as_dict(self) -> dict:
        """Ready for JSON."""
        return {
            "stack": self.stack, "metric": self.metric, "peak_bytes": self.peak_bytes, "low_bytes": self.low_bytes,
            "high_bytes": self.high_bytes, "phase": self.phase, "phases": dict(self.phases),
            "components": dict(self.components), "peaks": dict(self.peaks), "notes": list(self.notes),
        }  # fmt: skip


def settle(stack: str, s: StackSettings, phases: list[Phase], notes: list[str]) -> StackPrediction:
    """The prediction from a stack's phases: the highest phase, then what the allocator and the driver add."""
    highest = max(phases, key=lambda phase: phase.num_bytes)
    allocated = highest.num_bytes
    reserved = reserved_bytes(s, phases, allocated)
    context = context_bytes(s)
    components = dict.fromkeys(COMPONENTS, 0.0)
    for term in highest.terms:
        components[term.component] += term.num_bytes
    components["context"] = context
    peaks = {"allocated": allocated, "reserved": reserved, "nvidia-smi": reserved + context}
    low, high = scatter(stack, s)
    peak = peaks[s.metric]
    return StackPrediction(
        stack, s.metric, highest.name, {phase.name: phase.num_bytes for phase in phases},
        {name: int(value) for name, value in components.items()}, peaks, int(peak * low), int(peak * high),
        tuple(notes),
    )  # fmt: skip


def scatter(stack: str, s: StackSettings) -> tuple[float, float]:
    """Lowest and highest ratio of measured to predicted bytes that was published for such a run."""
    known = "hf-trainer" if stack in constants.MEASURED_LIKE_TRAINER else stack
    if s.n_gpus > 1:
        return constants.SEVERAL_GPUS[s.metric] if known == "hf-trainer" else (0.7, 1.5)
    return constants.SCATTER.get(known, {}).get(s.metric, constants.UNCONFIRMED)


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
