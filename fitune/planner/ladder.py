"""Candidates, easiest first, and the choice among those that fit.

First version of the ladder: base format, micro-batch, how many layers recompute, loss chunk. The order of formats is
the person's (`method`); within a format the cheapest candidate by `relative_cost` wins. Streaming, offload and several
GPUs are rungs to come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def fewest_recomputed(terms: StepTerms, limit_bytes: int) -> int | None:
    """Fewest layers that must recompute for every phase to stay within the limit; None when even all do not do it."""
    count = len(terms.kinds)

    def fits(recompute_layers: int) -> bool:
        p = peaks(terms, recompute_layers)
        return max(p.load, p.first_step, p.step, p.eval, p.save) <= limit_bytes

    if not fits(count):
        return None
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def candidates(
    terms_of: TermsOf,
    *,
    num_rows: int,
    width: int,
    limit_bytes: int,
    chunk: int,
    fixed_chunk: bool,
    micro_batch: int | None,
    recompute: int | None,
) -> Iterator[Candidate]:
    """Every candidate that fits, for one base format. `recompute` and `micro_batch` are fixed when not None."""
    for rows in [micro_batch] if micro_batch is not None else micro_batches(num_rows):
        for tokens in chunks(chunk, fixed_chunk):
            terms = terms_of(rows, width, tokens)
            layers = recompute if recompute is not None else fewest_recomputed(terms, limit_bytes)
            if layers is None:
                continue
            made = Candidate(
                rows, layers, tokens, peaks(terms, layers), relative_cost(rows, width, layers, len(terms.kinds))
            )
            if made.peak_bytes <= limit_bytes:
                yield made
                break  # a smaller chunk saves memory only


def smallest(
    terms_of: TermsOf, *, width: int, chunk: int, fixed_chunk: bool, micro_batch: int | None, recompute: int | None
) -> Candidate:
    """The candidate with the lowest peak, whether it fits or not."""
    rows = micro_batch or 1
    options = []
    for tokens in chunks(chunk, fixed_chunk):
        terms = terms_of(rows, width, tokens)
        layers = len(terms.kinds) if recompute is None else recompute
        options.append(
            Candidate(rows, layers, tokens, peaks(terms, layers), relative_cost(rows, width, layers, len(terms.kinds)))
        )
    return min(options, key=lambda c: c.peak_bytes)


def chunks(chunk: int, fixed: bool) -> list[int]:
    return [chunk] if fixed or chunk <= SMALLEST_CHUNK else [chunk, SMALLEST_CHUNK]
