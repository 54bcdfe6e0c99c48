"""What a step is made of: repeated segments of products, bytes, kernels and copies, for the roofline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gemm:
    """`count` products [m, k] x [k, n]."""

    m: float
    n: float
    k: float
    count: int = 1
    grouped: bool = False  # experts, each with its own tokens; a block's heads
    narrow: bool = False  # an adapter's: memory traffic, counted as such

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Segment:
    """A part of the step that repeats. All figures are for one repetition.

    Attributes:
        phase: forward | tail | backward | optimizer. Host, device and link overlap within a phase.
        attention_flops: of fused attention kernels; `attention_backward` says which.
        scores: attention scores that plain torch holds in memory (blockwise and native kernels).
        skinny_bytes: read and written by adapters' narrow products.
        memory_bytes: of elementwise kernels and norms; unpack_bytes: of unpacking the base.
        dropout_elements: elements that counter dropout hashes; wide_rotated: of queries and keys rotated in fp32.
        kernels: launches; calls: modules and autograd functions entered from Python; unpacks: 4-bit weights unpacked,
            whose host cost is bitsandbytes' own; transfers: copies that Python orders on a stream beside the
            computation's and waits for (a streamed layer or head tile, a saved input).
        link_in_bytes, link_out_bytes: from host to device and back; the two ways do not hinder each other.
        cpu_s: seconds of an update on the CPU, which runs beside all else, as a desktop's RAM allows; code_s: of one
            that its code bounds, whatever the RAM.
    """

    phase: str
    name: str
    times: int
    gemms: tuple[Gemm, ...] = ()
    attention_flops: float = 0.0
    attention_backward: bool = False
    scores: float = 0.0
    skinny_bytes: float = 0.0
    memory_bytes: float = 0.0
    unpack_bytes: float = 0.0
    dropout_elements: float = 0.0
    wide_rotated: float = 0.0
    kernels: float = 0.0
    calls: float = 0.0
    unpacks: int = 0
    transfers: float = 0.0
    link_in_bytes: float = 0.0
    link_out_bytes: float = 0.0
    cpu_s: float = 0.0
    code_s: float = 0.0

    @property
    def flops(self) -> float:
        return sum(g.flops for g in self.gemms) + self.attention_flops


@dataclass(frozen=True)
class Workload:
    """What the data says of a step. `target_share`: tokens with a loss, of all; `doc_tokens`: mean length of the
    documents in packed rows (None: rows are one document each)."""

    row_tokens: float
    target_share: float = 1.0
    doc_tokens: float | None = None


@dataclass(frozen=True)
class StepWork:
    """One optimizer step. `tokens` are those of all its rows; `source` is where streamed weights come from."""

    segments: tuple[Segment, ...]
    tokens: float
    micro_batch_tokens: float
    precision: str
    device: str
    source: str
    attention: str  # the plan's kernel
    rough: bool  # a part is only estimated: unknown family, plain-torch recurrences

    @property
    def flops(self) -> float:
        return sum(s.flops * s.times for s in self.segments)

    @property
    def link_bytes(self) -> float:
        """Both ways together."""
        return sum((s.link_in_bytes + s.link_out_bytes) * s.times for s in self.segments)

    @property
    def kernels(self) -> float:
        return sum(s.kernels * s.times for s in self.segments)
