"""Candidates, and the choice among those that fit: the fastest; among those within 5 % of it the lowest rung.

A `Search` looks at one draft: a plan whose base format and places (of weights, of layer inputs) are decided. It varies
the micro-batch, how many layers recompute, and the loss chunk. Which drafts there are is `planner.placement`'s and
`planner.choose`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from fitune.memory.policies import highest_peaks
from fitune.memory.replay import Peaks, StepTerms, peaks
from fitune.plan import Plan
from fitune.recipe import QUANTISED_FORMATS

TermsOf = Callable[[int, int, int], StepTerms]
"""Terms of a model at (rows, columns, loss chunk)."""
SecondsOf = Callable[[Plan], float]
"""Predicted seconds of an optimizer step under a plan."""

LOSS_CHUNK_BYTES = 256 * 1024**2
BYTES_PER_LOGIT = 8  # 16-bit logits and gradient, one fp32 copy (fitune.model.loss)
MOST_BYTES_PER_LOGIT = 32  # in fp32 logits, gradient and copy take 12; some models cap logits, which takes more
SMALLEST_CHUNK = 64
_ENDLESS_BYTES = 1 << 50
AS_FAST = 1.05
"""A plan within 5 % of the fastest's time counts as being as fast: the lower rung is taken then."""
LESS = 0.97
"""An alternative needs at most so much of what the next faster plan needs: one that saves 1 % is no other choice."""


@dataclass(frozen=True)
class Candidate:
    """One way to run the step.

    Attributes:
        draft: the plan it belongs to, without what is decided here.
        terms: of its step; `accumulates`: whether gradients of earlier micro-batches are there.
        peak_bytes: of tensors, the highest of all phases.
        cost: predicted seconds of an optimizer step.
    """

    draft: Plan
    micro_batch: int
    recompute_layers: int
    loss_chunk: int
    terms: StepTerms
    accumulates: bool
    peak_bytes: int
    cost: float

    @property
    def peaks(self) -> Peaks:
        """Bytes of tensors in each phase."""
        return peaks(self.terms, self.recompute_layers, self.accumulates)

    @property
    def plan(self) -> Plan:
        return self.draft.with_(
            micro_batch=self.micro_batch, recompute_layers=self.recompute_layers, loss_chunk=self.loss_chunk
        )


def rungs(plan: Plan) -> tuple[int, ...]:
    """The rungs of the ladder that a plan stands on, the highest first; () is the simplest plan. Compared as tuples
    they say which of two plans is the lower one."""
    used = {
        0: plan.world_size > 1,
        1: plan.micro_batch < plan.batch,
        2: plan.recompute_layers > 0,
        3: plan.offload_inputs,
        4: plan.mlp_tiles > 1,
        5: plan.stream_from not in ("none", "shards"),
        6: plan.head_place == "host",
        7: plan.base_format == "int8",
        8: plan.base_format in QUANTISED_FORMATS and plan.base_format != "int8",
        9: plan.optimizer_place != "device",
        10: plan.parallel in ("fsdp2", "zero1", "zero2", "zero3"),
        11: plan.parallel in ("tp", "pp"),
    }
    return tuple(number for number in sorted(used, reverse=True) if used[number])


def ordered(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The chosen one first, then the others by their time."""

    found = sorted(candidates, key=lambda c: c.cost)
    if not found:
        return []
    fastest = found[0].cost

    def key(c: Candidate) -> tuple[tuple[int, ...], float, int, int]:
        """Of plans of one rung and one time (to a thousandth) the one that copies least is taken."""
        return rungs(c.plan), round(c.cost / fastest, 3), len(c.draft.streamed_layers()), -c.micro_batch

    best = min((c for c in found if c.cost <= AS_FAST * fastest), key=key)
    return [best, *(c for c in found if c is not best)]


def alternatives(chosen: Candidate, others: Iterable[Candidate]) -> list[Candidate]:
    """Up to three that trade speed for memory: each needs less than the chosen one and all that are faster, by enough
    to matter."""
    found: list[Candidate] = []
    least = chosen.peak_bytes
    for other in sorted(others, key=lambda c: (c.cost, c.peak_bytes)):
        if other.peak_bytes < LESS * least:
            found.append(other)
            least = other.peak_bytes
    return found if len(found) <= 3 else [found[0], found[len(found) // 2], found[-1]]


def default_chunk(vocab_size: int) -> int:
    """Tokens whose logits take about 256 MiB, a multiple of 64."""
    return max(SMALLEST_CHUNK, min(1024, LOSS_CHUNK_BYTES // (BYTES_PER_LOGIT * vocab_size) // 64 * 64))


def micro_batches(num_rows: int) -> list[int]:
    """Sizes worth trying: the whole step, then halves (rounded up), down to one row."""
    sizes = [num_rows]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


@dataclass(frozen=True)
class Search:
    """One draft's candidates.

    Attributes:
        draft: the plan as far as it is decided.
        terms_of: terms of its step at a micro-batch shape; where accumulation is layer-major, of the whole step.
        seconds_of: what a plan's step takes.
        num_rows: most rows of an optimizer step; more than a micro-batch holds are accumulated.
        width: tokens of the widest row.
        chunk: loss chunk to start with; a smaller one is tried unless `fixed_chunk`.
        micro_batch, recompute: fixed by the person when not None.
        chunk_token_bytes: the most that a token less in a loss chunk can take off a peak.
    """

    draft: Plan
    terms_of: TermsOf
    seconds_of: SecondsOf
    num_rows: int
    width: int
    chunk: int
    fixed_chunk: bool
    micro_batch: int | None
    recompute: int | None
    chunk_token_bytes: int = _ENDLESS_BYTES
    _needs: dict[tuple[int, int, bool], dict[int, int]] = field(default_factory=dict, init=False, repr=False)

    def fitting(self, limit_bytes: int) -> list[Candidate]:
        """Every micro-batch that fits, each with the chunk at which it recomputes the fewest layers."""
        found = []
        sizes = self.sizes()
        too_many = None
        for rows in sizes:
            # Memory grows with the rows: where fewer do not fit, more do not, unless accumulation ends with them.
            if too_many is not None and not (rows == sizes[-1] and self._alone_fits(too_many, limit_bytes)):
                continue
            best = self._cheapest(rows, limit_bytes)
            if best is not None:
                found.append(best)
            else:
                too_many = rows
        return found

    def smallest(self) -> Candidate:
        """The candidate with the lowest peak, whether it fits or not: the fewest rows, or, where the gradients of
        earlier micro-batches weigh more than activations, the whole step at once."""

        def least(rows: int, alone: bool) -> Candidate:
            return min((self._least(rows, c, alone=alone) for c in self.chunks()), key=lambda c: c.peak_bytes)

        sizes = self.sizes()
        best = least(sizes[0], alone=False)
        for rows in sizes:  # a step of a few rows alone needs no more than one of all rows: most often a proof
            whole = least(rows, alone=True)
            if whole.peak_bytes >= best.peak_bytes:
                return best
        return whole if whole.micro_batch >= self.num_rows else best

    def sizes(self) -> list[int]:
        """Micro-batches to try, the smallest first."""
        return [self.micro_batch] if self.micro_batch is not None else micro_batches(self.num_rows)[::-1]

    def _alone_fits(self, rows: int, limit_bytes: int) -> bool:
        """Whether a step of these rows only, with no gradients of others there, would fit."""
        return any(self._least(rows, c, alone=True).peak_bytes <= limit_bytes for c in self.chunks())

    def _cheapest(self, rows: int, limit_bytes: int) -> Candidate | None:
        """The chunk with the lowest cost; of equals the larger one."""
        options = []
        for tokens in self.chunks():
            option = self._fit(rows, tokens, limit_bytes)
            if option is not None:
                options.append(option)
                if option.recompute_layers == (self.recompute or 0) or not self._may_gain(option, limit_bytes):
                    break  # a smaller chunk cannot make it cheaper
        return min(options, key=lambda c: c.cost, default=None)

    def _may_gain(self, fits: Candidate, limit_bytes: int) -> bool:
        """Whether the smallest chunk of the loss may be faster by itself, or let fewer layers be recomputed: to find
        that out exactly may take a trace."""
        if self.seconds_of(fits.plan.with_(loss_chunk=SMALLEST_CHUNK)) < fits.cost:
            return True
        least = limit_bytes + self.chunk_token_bytes * max(0, fits.loss_chunk - SMALLEST_CHUNK)
        needs = self.needs(fits.micro_batch, fits.loss_chunk)
        return any(need <= least for layers, need in needs.items() if layers < fits.recompute_layers)

    def _fit(self, rows: int, tokens: int, limit_bytes: int) -> Candidate | None:
        """The fewest recomputed layers with which every phase stays within the limit."""
        needs = self.needs(rows, tokens)
        fewest = next((layers for layers, need in needs.items() if need <= limit_bytes), None)
        return None if fewest is None else self.candidate(rows, fewest, tokens)

    def _least(self, rows: int, tokens: int, *, alone: bool = False) -> Candidate:
        """With the lowest peak. Most often everything is recomputed then, but not always: to recompute the layer at
        whose backward pass the peak is saves nothing, and its input is held beside it."""
        needs = self.needs(rows, tokens, alone=alone)
        return self.candidate(rows, min(reversed(needs), key=needs.__getitem__), tokens, alone=alone)

    def needs(self, rows: int, tokens: int, *, alone: bool = False) -> dict[int, int]:
        """Numbers of recomputed layers to try, the cheapest first, to the highest of all phases' peaks."""
        key = rows, tokens, self._accumulates(rows, alone)
        if key not in self._needs:
            needs = highest_peaks(self.terms_of(rows, self.width, tokens), key[-1])
            wanted = range(len(needs)) if self.recompute is None else [self.recompute]
            self._needs[key] = {layers: needs[layers] for layers in wanted}
        return self._needs[key]

    def _accumulates(self, rows: int, alone: bool) -> bool:
        return rows < self.num_rows and not alone and self.draft.accumulation_order != "layer-major"

    def candidate(self, rows: int, layers: int, tokens: int, *, alone: bool = False) -> Candidate:
        """`alone`: as if these rows were the whole step, so that nothing accumulates."""
        need, accumulates = self.needs(rows, tokens, alone=alone)[layers], self._accumulates(rows, alone)
        terms = self.terms_of(rows, self.width, tokens)
        made = Candidate(self.draft, rows, layers, tokens, terms, accumulates, need, 0.0)
        return replace(made, cost=self.seconds_of(made.plan))

    def chunks(self) -> list[int]:
        return [self.chunk] if self.fixed_chunk or self.chunk <= SMALLEST_CHUNK else [self.chunk, SMALLEST_CHUNK]


def most_resident(
    streams: Sequence[Candidate], search: Callable[[Plan], Search], limit_bytes: int,
    settle: Callable[[Candidate], Candidate | None],
) -> list[Candidate]:  # fmt: skip
    """The best of streamed candidates with as many layers' weights on the card as fit: of plans that differ in nothing
    else the one that copies least. Empty where that is none.

    Args:
        search: of a draft.
        settle: the candidate where the host has room for it.
    """
    if not streams:
        return []
    first = ordered(streams)[0]
    low, high = first.draft.resident_layers or 0, first.draft.num_layers
    best = None
    while high - low > 1:
        middle = (low + high) // 2
        draft = first.draft.with_(resident_layers=middle)
        made = search(draft).candidate(first.micro_batch, first.recompute_layers, first.loss_chunk)
        if made.peak_bytes <= limit_bytes:
            low, best = middle, made
        else:
            high = middle
    settled = None if best is None else settle(best)
    return [] if settled is None else [settled]
