"""Peaks of a step for every number of recomputed layers at once, in time linear in the layers. Plain Python.

The same sums as `memory.replay.peaks`, which a test compares for random terms; running maxima replace its walk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add

from fitune.memory.replay import Part, PassParts, StepTerms

_NONE = -(1 << 62)  # the maximum of nothing


def highest_peaks(terms: StepTerms, accumulates: bool = False) -> list[int]:
    """The highest of all phases' peaks in bytes, for 0, 1, ... all layers recomputed."""
    weights, gradients = terms.weight_bytes, terms.trained_bytes
    resident = weights + terms.state_bytes
    update = gradients + terms.optimizer_peak_bytes
    rest = max(weights + terms.largest_weight_bytes, resident + max(_eval_peak(terms), update))  # whatever the policy
    dynamic = _pass_peaks(terms, terms.first_pass, 0)
    if accumulates:
        dynamic = list(map(max, dynamic, _pass_peaks(terms, terms.later_pass, gradients)))
    return [max(rest, resident + peak) for peak in dynamic]


def _eval_peak(terms: StepTerms) -> int:
    """Above weights and optimizer state."""
    live, top = _onward([terms.layers[kind].eval_forward for kind in terms.kinds])
    start = terms.eval_embed.delta_bytes
    return max(terms.eval_embed.peak_bytes, start + top[-1], start + live[-1] + terms.eval_tail.peak_bytes)


def _pass_peaks(terms: StepTerms, parts: PassParts, live: int) -> list[int]:
    """Peaks of one forward and backward pass from `live` bytes on, as `replay._walk` finds them one by one."""
    layers = [parts.first, *(parts.kinds[kind] for kind in terms.kinds[1:])]
    count = len(layers)
    stashed, stash_top = _onward([layer.stash for layer in layers])
    again, again_top = _onward([layer.recompute[0] for layer in layers])
    keep = [layer.keep[0] for layer in layers]
    kept = _sums(keep)
    kept_top = _maxima([*map(add, kept, _peaks(keep))][::-1])[::-1]  # of the layers from the nth on
    back, back_top = (sums[::-1] for sums in _onward([layer.keep[1] for layer in reversed(layers)]))
    again_backward = [layer.recompute[1] for layer in layers]
    again_back = _sums(again_backward)
    again_back_top = _maxima([part.peak_bytes - end for part, end in zip(again_backward, again_back[1:], strict=True)])
    # the first kept layer's input is no other layer's output that is kept: it goes with its layer
    leaving = [0, *(layer.stash.delta_bytes for layer in layers[:-1]), 0]
    start, bottom = live + parts.embed.delta_bytes, max(live, live + parts.embed.peak_bytes)
    found = []
    for n in range(count + 1):
        tail = parts.tail_after_keep if n < count else parts.tail_after_recompute
        rooms = start + stashed[n]
        border = rooms + again[n] - kept[n]
        turn = border + kept[count]
        after = turn + tail.delta_bytes
        end = after + back[n] - leaving[n] + again_back[n]
        found.append(max(
            bottom, start + stash_top[n], rooms + again_top[n], border + kept_top[n], turn + tail.peak_bytes,
            after + back_top[n], end + again_back_top[n], end + parts.embed_backward.peak_bytes,
        ))  # fmt: skip
    return found


def _onward(parts: Sequence[Part]) -> tuple[list[int], list[int]]:
    """(live bytes after the first n parts, the highest peak among them), both from zero, for n = 0, 1, ..."""
    sums = _sums(parts)
    return sums, _maxima(map(add, sums, _peaks(parts)))


def _sums(parts: Sequence[Part]) -> list[int]:
    return list(accumulate([part.delta_bytes for part in parts], initial=0))


def _peaks(parts: Sequence[Part]) -> list[int]:
    return [part.peak_bytes for part in parts]


def _maxima(values: Iterable[int]) -> list[int]:
    """The maximum of the first n values, for n = 0, 1, ..."""
    return list(accumulate(values, max, initial=_NONE))
