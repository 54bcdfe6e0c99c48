"""Seconds of an optimizer step from its work and a device's rates.

Per phase (forward, loss tail, backward, update), host, device and link work beside each other: the phase takes the
longest of them. The device's time is a sum over its kernels: products at a share of the dense rate that grows with
their size, attention, memory traffic at a share of the bandwidth, and a fixed time per kernel. What is left out: waits
between phases, power limits that change with the mix of kernels, copies and kernels that contend for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fitune.speed import constants
from fitune.speed.cards import CardRates
from fitune.speed.constants import Fitted
from fitune.speed.layer_work import TILE
from fitune.speed.segments import Gemm, Segment, StepWork

DEVICE_PARTS = ("matmul", "attention", "memory", "unpack", "adapters", "kernels")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, with the interval that the true time is expected in.

    Attributes:
        parts: seconds by cause, which add up to `step_s`: matmul, attention, memory (elementwise, norms, loss), unpack,
            adapters, kernels (fixed device time of each), update, host (the device waits for launches), stall
            (the device waits for the link).
        forward_s: of one forward pass with its loss over the same tokens, as an evaluation runs it (the loss tail's
            forward is taken as a third of forward and backward).
        bound: compute | memory | launch | link: the largest of them.
        basis: measured (records of this card), calibrated (this machine), kin, catalog, doubtful, unknown, cpu: the
            last five are unverified.
    """

    step_s: float
    low_s: float
    high_s: float
    forward_s: float
    tokens: float
    parts: dict[str, float] = field(hash=False)
    bound: str
    basis: str

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def verified(self) -> bool:
        return self.basis in ("measured", "calibrated")


@dataclass(frozen=True)
class Phase:
    """What the devices have to do in one phase, in seconds."""

    name: str
    host_s: float
    device: dict[str, float]
    link_s: float

    @property
    def device_s(self) -> float:
        return sum(self.device.values())

    def seconds(self, device: float = 1.0, host: float = 1.0, link: float = 1.0) -> float:
        """With factors on the three times."""
        return max(_together(self.host_s * host, self.device_s * device), self.link_s * link)


def _together(a: float, b: float) -> float:
    """Two activities beside each other: a maximum with a rounded corner."""
    top, low = max(a, b), min(a, b)
    return top * (1 + (low / top) ** constants.OVERLAP_POWER) ** (1 / constants.OVERLAP_POWER) if top > 0 else 0.0


def predict_step(work: StepWork, card: CardRates, fitted: Fitted | None = None) -> StepTime:
    """The step's time on a device. On an H200 see `docs/speed.md` for measured errors; elsewhere the interval says how
    much is known."""
    fitted = fitted or constants.FITTED
    phases = phases_of(work, card, fitted)
    step = sum(p.seconds() for p in phases)
    errors = zip(_device_error(work, card), card.host_error, card.link_error, strict=True)
    low, high = (sum(p.seconds(*factors) for p in phases) for factors in errors)
    parts = _parts(phases)
    forward = sum(p.seconds() * {"forward": 1.0, "tail": 1 / 3}.get(p.name, 0.0) for p in phases)
    return StepTime(step, min(low, step), max(high, step), forward, work.tokens, parts, _bound(parts), card.basis)


def _device_error(work: StepWork, card: CardRates) -> tuple[float, float]:
    if not work.rough:
        return card.error
    return card.error[0] * constants.ROUGH_ERROR[0], card.error[1] * constants.ROUGH_ERROR[1]


def phases_of(work: StepWork, card: CardRates, fitted: Fitted) -> list[Phase]:
    """Seconds of host, device and link in each phase, in the order of the step."""
    made = []
    if card.kind == "cpu":
        card = replace(card, link_bytes_per_s=card.memory_bytes_per_s)
    distinct = {id(s.gemms): s.gemms for s in work.segments}  # layers that differ in their copies share products
    products = {key: _products(gemms, card.flops[work.precision], card, fitted) for key, gemms in distinct.items()}
    for name in dict.fromkeys(s.phase for s in work.segments):
        segments = [s for s in work.segments if s.phase == name]
        device: dict[str, float] = {}
        for segment in segments:
            for part, seconds in _device(segment, products[id(segment.gemms)], work, card, fitted).items():
                device[part] = device.get(part, 0.0) + seconds * segment.times
        host = sum(_host(s, card, fitted) * s.times for s in segments)
        ways = (sum(s.link_in_bytes * s.times for s in segments), sum(s.link_out_bytes * s.times for s in segments))
        link = max(ways) / card.copy_bytes_per_s(work.source)
        in_host = sum((s.cpu_s / card.host_memory + s.code_s) * s.times for s in segments)
        link = max(link, in_host)  # an update in host memory is waited for as copies
        made.append(Phase(name, host, device, link))
    return made


def _host(segment: Segment, card: CardRates, fitted: Fitted) -> float:
    if card.kind == "cpu":
        return 0.0  # kernels run where they are launched: their fixed time is the device's
    python_s = segment.calls * fitted.host_call_s + segment.unpacks * fitted.host_unpack_s
    python_s += segment.transfers * fitted.host_transfer_s
    return card.host_factor * (segment.kernels * fitted.host_kernel_s + python_s)


def _device(
    segment: Segment, matmul_s: float, work: StepWork, card: CardRates, fitted: Fitted
) -> dict[str, float]:  # fmt: skip
    """Seconds of one repetition on the device, by part. `matmul_s`: of its products."""
    bandwidth = card.memory_bytes_per_s
    if segment.phase == "optimizer":
        kernel_s = constants.CPU_KERNEL_S if card.kind == "cpu" else fitted.kernel_s
        seconds = segment.memory_bytes / (bandwidth * fitted.update_share) + segment.kernels * kernel_s
        return {"update": seconds}
    share = card.attention_share
    if segment.attention_backward:
        share *= fitted.attention_backward_share / fitted.attention_forward_share
    if work.attention == "efficient":
        share *= constants.EFFICIENT_ATTENTION
    attention = segment.attention_flops / (card.dense_flops * share) if segment.attention_flops else 0.0
    memory = segment.memory_bytes + segment.scores * fitted.score_bytes
    dropout_bytes = constants.CPU_DROPOUT_BYTES if card.kind == "cpu" else fitted.dropout_bytes
    memory += segment.dropout_elements * dropout_bytes + segment.wide_rotated * fitted.wide_rotary_bytes
    kernel_s = constants.CPU_KERNEL_S if card.kind == "cpu" else fitted.kernel_s
    return {
        "matmul": matmul_s,
        "attention": attention,
        "memory": memory / (bandwidth * fitted.memory_share),
        "unpack": segment.unpack_bytes / (card.unpack_bytes_per_s or bandwidth * fitted.unpack_share),
        "adapters": segment.skinny_bytes / (bandwidth * fitted.skinny_share),
        "kernels": segment.kernels * kernel_s,
    }


def _products(gemms: Sequence[Gemm], rate: float, card: CardRates, fitted: Fitted) -> float:
    """Matrix products: the dense rate's share by number of tiles, or the weight's way through memory if that is
    longer. The processors of a smaller card are filled by fewer tiles, in proportion to its rate."""
    half = fitted.gemm_half_tiles * card.dense_flops / (constants.REFERENCE_TFLOPS * 1e12)
    total = 0.0
    for g in gemms:
        if g.narrow:
            continue
        tiles = max(1.0, g.m / TILE) * max(1.0, g.n / TILE)
        if g.grouped:
            tiles *= g.count
        reached = rate * tiles / (tiles + half) * (fitted.grouped_share if g.grouped else 1.0)
        moved = 2.0 * (g.n * g.k + g.m * g.k + g.m * g.n) * g.count / card.memory_bytes_per_s
        total += max(g.flops / reached, moved)
    return total


def _parts(phases: list[Phase]) -> dict[str, float]:
    parts: dict[str, float] = dict.fromkeys((*DEVICE_PARTS, "update", "host", "stall"), 0.0)
    for phase in phases:
        for name, seconds in phase.device.items():
            parts[name] += seconds
        beside = _together(phase.host_s, phase.device_s)
        parts["host"] += beside - phase.device_s
        parts["stall"] += max(0.0, phase.link_s - beside)
    return parts


def _bound(parts: dict[str, float]) -> str:
    groups = {
        "compute": parts["matmul"] + parts["attention"],
        "memory": parts["memory"] + parts["unpack"] + parts["adapters"] + parts["update"],
        "launch": parts["host"] + parts["kernels"],
        "link": parts["stall"],
    }
    return max(groups, key=lambda name: groups[name])
