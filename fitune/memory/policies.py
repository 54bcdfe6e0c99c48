"""Peaks of a step for every number of recomputed layers at once, in time linear in the layers. Plain Python.

The same sums as `memory.replay.peaks`, which a test compares for random terms; running maxima replace its walk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fitune.memory.replay import LayerParts, Part, PassParts, StepTerms, peaks

_NONE = -(1 << 62)  # the maximum of nothing


def highest_peaks(terms: StepTerms, accumulates: bool = False) -> list[int]:
    """The highest of all phases' peaks in bytes, for 0, 1, ... all layers recomputed."""
    resident, gradients = terms.weight_bytes + terms.state_bytes, terms.trained_bytes
    fixed = peaks(terms, 0)  # load, eval and save do not depend on the policy
    rest = max(fixed.load, fixed.eval, fixed.save, resident + gradients + terms.optimizer_peak_bytes)
    dynamic = _pass_peaks(terms, terms.first_pass, 0)
    if accumulates:
        dynamic = list(map(max, dynamic, _pass_peaks(terms, terms.later_pass, gradients)))
    return [max(rest, resident + peak) for peak in dynamic]


def _pass_peaks(terms: StepTerms, parts: PassParts, live: int) -> list[int]:
    """Peaks of one forward and backward pass from `live` bytes on, as `replay._walk` finds them one by one."""
    layers = [parts.layer(index, kind) for index, kind in enumerate(terms.kinds)]
    count = len(layers)
    stashed, stash_top = _onward(layer.stash for layer in layers)
    again, again_top = _onward(layer.recompute[0] for layer in layers)
    kept, _ = _onward(layer.keep[0] for layer in layers)
    kept_top = _suffix_maxima(kept[i] + layers[i].keep[0].peak_bytes for i in range(count))
    back, back_top = (sums[::-1] for sums in _onward(layer.keep[1] for layer in reversed(layers)))
    again_back = _sums(layer.recompute[1].delta_bytes for layer in layers)
    again_back_top = _prefix_maxima(layers[i].recompute[1].peak_bytes - again_back[i + 1] for i in range(count))
    found = []
    start = live + parts.embed.delta_bytes
    for n in range(count + 1):
        highest = max(live, live + parts.embed.peak_bytes, start + stash_top[n])
        now = start + stashed[n]
        highest = max(highest, now + again_top[n], now + again[n] - kept[n] + kept_top[n])
        now += again[n] + kept[count] - kept[n]
        tail = parts.tail_after_keep if n < count else parts.tail_after_recompute
        highest = max(highest, now + tail.peak_bytes)
        now += tail.delta_bytes
        highest = max(highest, now + back_top[n])
        now += back[n] - _goes_with_its_layer(layers, n)
        now += again_back[n]
        found.append(max(highest, now + again_back_top[n], now + parts.embed_backward.peak_bytes))
    return found


def _goes_with_its_layer(layers: list[LayerParts], n: int) -> int:
    """Bytes of the first kept layer's input: no other layer's output that is kept."""
    return layers[n - 1].stash.delta_bytes if 0 < n < len(layers) else 0


def _onward(parts: Iterable[Part]) -> tuple[list[int], list[int]]:
    """(live bytes after the first n parts, the highest peak among them), both from zero, for n = 0, 1, ..."""
    live, highest, sums, tops = 0, _NONE, [0], [_NONE]
    for part in parts:
        highest = max(highest, live + part.peak_bytes)
        live += part.delta_bytes
        sums.append(live)
        tops.append(highest)
    return sums, tops


def _sums(values: Iterable[int]) -> list[int]:
    found = [0]
    for value in values:
        found.append(found[-1] + value)
    return found


def _prefix_maxima(values: Iterable[int]) -> list[int]:
    """The maximum of the first n values, for n = 0, 1, ..."""
    found = [_NONE]
    for value in values:
        found.append(max(found[-1], value))
    return found


def _suffix_maxima(values: Iterator[int]) -> list[int]:
    """The maximum of the values from the nth on, for n = 0, 1, ..."""
    return _prefix_maxima(reversed(list(values)))[::-1]
