"""Candidates, easiest first, and the choice among those that fit.

First version of the ladder: base format, micro-batch, how many layers recompute, loss chunk. The order of formats is
the person's (`method`); within a format the cheapest candidate by `relative_cost` wins. Streaming, offload and several
GPUs are rungs to come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fitune.memory.replay import Peaks, StepTerms, peaks

TermsOf = Callable[[int, int, int], StepTerms]
"""Terms of a model at (rows, columns, loss chunk)."""

LOSS_CHUNK_BYTES = 256 * 1024**2
BYTES_PER_LOGIT = 8  # 16-bit logits and gradient, one fp32 copy (fitune.model.loss)
SMALLEST_CHUNK = 64
OVERHEAD_TOKENS = 256
"""Tokens whose compute time equals a pass's fixed cost (launches, unpacking of the base). A rule of thumb, to be
replaced by measured step times; it only ranks candidates."""


@dataclass(frozen=True)
class Candidate:
    """One way to run the step, with its peaks in bytes of tensors."""

    micro_batch: int
    recompute_layers: int
    loss_chunk: int
    peaks: Peaks
    cost: float

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks.load, self.peaks.first_step, self.peaks.step, self.peaks.eval, self.peaks.save)


def default_chunk(vocab_size: int) -> int:
    """Tokens whose logits take about 256 MiB, a multiple of 64."""
    return max(SMALLEST_CHUNK, min(1024, LOSS_CHUNK_BYTES // (BYTES_PER_LOGIT * vocab_size) // 64 * 64))


def relative_cost(micro_batch: int, width: int, recompute_layers: int, num_layers: int) -> float:
    """Time per token relative to a large micro-batch without recomputation: a forward is a third of forward plus
    backward, and a small micro-batch pays the fixed cost of a pass over fewer tokens."""
    return (3 + recompute_layers / num_layers) / 3 * (1 + OVERHEAD_TOKENS / (micro_batch * width))


def micro_batches(num_rows: int) -> list[int]:
    """Sizes worth trying: the whole step, then halves (rounded up), down to one row."""
    sizes = [num_rows]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


@dataclass(frozen=True)
class Search:
    """One base format's candidates.

    Attributes:
        terms_of: traces of the model at a micro-batch shape.
        num_rows: most rows of an optimizer step; more than a micro-batch holds are accumulated.
        width: tokens of the widest row.
        chunk: loss chunk to start with; a smaller one is tried unless `fixed_chunk`.
        micro_batch, recompute: fixed by the person when not None.
    """

    terms_of: TermsOf
    num_rows: int
    width: int
    chunk: int
    fixed_chunk: bool
    micro_batch: int | None
    recompute: int | None

    def fitting(self, limit_bytes: int) -> list[Candidate]:
        """Every micro-batch that fits, each with the fewest recomputed layers and the largest chunk."""
        if self.smallest().peak_bytes > limit_bytes:
            return []
        found = []
        for rows in [self.micro_batch] if self.micro_batch is not None else micro_batches(self.num_rows):
            fits = (self._fit(rows, tokens, limit_bytes) for tokens in self._chunks())
            best = next((candidate for candidate in fits if candidate is not None), None)
            if best is not None:
                found.append(best)
        return found

    def smallest(self) -> Candidate:
        """The candidate with the lowest peak, whether it fits or not."""
        rows = self.micro_batch or 1
        options = []
        for tokens in self._chunks():
            layers = self.recompute
            options.append(self._candidate(rows, len(self._kinds(rows, tokens)) if layers is None else layers, tokens))
        return min(options, key=lambda c: c.peak_bytes)

    def _fit(self, rows: int, tokens: int, limit_bytes: int) -> Candidate | None:
        """The fewest recomputed layers with which every phase stays within the limit."""
        if self.recompute is not None:
            made = self._candidate(rows, self.recompute, tokens)
            return made if made.peak_bytes <= limit_bytes else None
        low, high = 0, len(self._kinds(rows, tokens))
        if self._candidate(rows, high, tokens).peak_bytes > limit_bytes:
            return None
        while low < high:
            middle = (low + high) // 2
            fits = self._candidate(rows, middle, tokens).peak_bytes <= limit_bytes
            low, high = (low, middle) if fits else (middle + 1, high)
        return self._candidate(rows, low, tokens)

    def _candidate(self, rows: int, layers: int, tokens: int) -> Candidate:
        terms = self.terms_of(rows, self.width, tokens)
        reached = peaks(terms, layers, accumulates=rows < self.num_rows)
        return Candidate(rows, layers, tokens, reached, relative_cost(rows, self.width, layers, len(terms.kinds)))

    def _kinds(self, rows: int, tokens: int) -> tuple[str, ...]:
        return self.terms_of(rows, self.width, tokens).kinds

    def _chunks(self) -> list[int]:
        return [self.chunk] if self.fixed_chunk or self.chunk <= SMALLEST_CHUNK else [self.chunk, SMALLEST_CHUNK]
