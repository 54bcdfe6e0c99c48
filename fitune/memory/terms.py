"""A script's parts as terms that `memory.replay` adds up: each part's peak and what it leaves. Plain Python.

A planner asks for the terms of hundreds of shapes. What is born and dies in a part is the same at all of them but for
the sizes, so it is spliced once per number of loss chunks (one, two, more), and then only added up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from fitune.memory.events import rounded
from fitune.memory.pieces import STREAMED, Held, Tensor, symbols
from fitune.memory.replay import LayerParts, LayerTerms, Part, PassParts, StepTerms
from fitune.memory.splice import GROUP, TURN, Splicer, embedding_scratch, play_evaluation, scratch_bytes, table_gradient

if TYPE_CHECKING:
    from fitune.memory.script import Script

PartKey = tuple[str, str, int]
_MOST_CHUNKS = 3  # further ones repeat the one in the middle


Sums = dict[PartKey, tuple[int, ...]]
"""Parts of passes over representative layers, as indices of sizes with signs: +i + 1 a birth, -(i + 1) a death. Sizes
are those of all templates, first with a full loss chunk, then with the last one."""


def representatives(script: Script) -> tuple[str, ...]:
    """The first layer, which stands for itself, and one of each kind behind it."""
    return (script.kinds[0], *dict.fromkeys(script.kinds[1:]))


def _played(script: Script) -> tuple[tuple[str, ...], dict[str, int]]:
    """(layers that are played for the sums, kind of layer to the one that stands for it). Where gradients leave it is
    one that is neither the second nor the last: these find other blocks to let go."""
    kinds = representatives(script)
    if not script.in_host or len(kinds) == 1:
        return kinds, {kind: max(i for i, k in enumerate(kinds) if k == kind) for kind in kinds}
    others = kinds[1:]
    at = {kinds[0]: 0} | {kind: 1 + len(others) + i for i, kind in enumerate(others)}
    return (kinds[0], *others, *others, others[-1]), at


def step_terms(script: Script, num_rows: int, num_columns: int, loss_chunk: int) -> StepTerms:
    """See `Script.terms`."""
    at = _played(script)[1]
    offloads = _offloads(script)
    sizes, num_chunks = _sizes(script, num_rows, num_columns, loss_chunk)
    again, keep, evaluation = (_measured(sums, sizes) for sums in _sums(script, num_chunks))
    scratch = scratch_bytes(script, loss_chunk)
    outside = _held_bytes((script.before, script.after, script.ring), script.granule)
    shared = sum(rounded(t.num_bytes, script.granule) for t in script.shared_state)
    layers = {}
    for layer, name in enumerate(names := _names(script)):
        if name not in layers:
            held = _held_bytes((script.held_by(layer),), script.granule)
            layers[name] = LayerTerms(*held, eval_forward=evaluation["e", "forward", at[script.kinds[layer]]])
    for kind in script.kinds:  # what a streamed layer would hold, too: how much of it waits elsewhere
        if kind not in layers:
            held = _held_bytes((script.layers[kind],), script.granule)
            layers[kind] = LayerTerms(*held, eval_forward=evaluation["e", "forward", at[kind]])
    at |= {name: at[script.kinds[layer]] for layer, name in enumerate(names)}
    first = _pass_parts("0", again, keep, at)
    later = first if script.whole else _pass_parts("1", again, keep, at)
    table_scratch = embedding_scratch(script, num_rows * num_columns)
    if table_scratch:
        first, later = (
            replace(parts, embed_backward=_with_scratch(parts.embed_backward, sizes, script, table_scratch))
            for parts in (first, later)
        )
    if script.together > 1:
        first = later = together(first, later, script.placement.together)
    if script.together == script.group > 1:
        first = later = replace(
            first, tail_after_recompute=_group_tail(script, "r", sizes), tail_after_keep=_group_tail(script, "k", sizes)
        )
    if script.in_host:
        first, later = (_with_gradients(parts, script, sizes) for parts in (first, later))
        if len(names) > 2 and offloads:  # the second layer lets go of less than those behind it
            spare = again["0", "forward", 1].delta_bytes - again["0", "forward", at[names[1]]].delta_bytes
            first, later = (_with_spare(parts, spare) for parts in (first, later))
    if offloads:
        buffers = [sizes[number] for _, number, group in script.segments[offloads] if group == "b"]
        first, later = _with_buffers(first, sum(buffers[1:])), _with_buffers(later, sum(buffers[1:]))
    return StepTerms(
        kinds=names,
        layers=layers,
        other_weight_bytes=outside[0] + (rounded(scratch, script.granule) if scratch is not None else 0),
        other_trained_bytes=outside[1],
        other_state_bytes=outside[2] + shared,
        first_pass=first,
        later_pass=later,
        optimizer_peak_bytes=script.update_bytes,
        eval_embed=_both(evaluation["e", "start", 0], evaluation["e", "embed", 0]),
        eval_tail=evaluation["e", "tail", 0],
        largest_weight_bytes=script.largest_weight_bytes,
    )


def _names(script: Script) -> tuple[str, ...]:
    """Kind of every layer, those apart whose weights are streamed."""
    streamed = frozenset(script.placement.streamed)
    return tuple(kind + STREAMED if i in streamed else kind for i, kind in enumerate(script.kinds))


def _sizes(script: Script, num_rows: int, num_columns: int, loss_chunk: int) -> tuple[list[int], int]:
    """Bytes of all templates with a full loss chunk and with the last one, and how many chunks there are."""
    num_targets = num_rows * (num_columns - 1)
    num_chunks = max(1, -(-num_targets // loss_chunk))
    last = num_targets - (num_chunks - 1) * loss_chunk
    found = []
    for tokens in (loss_chunk, last):
        values = symbols(num_rows, num_columns, loss_chunk, tokens)
        found += [rounded(template.bytes_at(values), script.granule) for template in script.templates]
    return found, num_chunks


def _sums(script: Script, num_chunks: int) -> tuple[Sums, Sums, Sums]:
    """Everything recomputed, everything kept, evaluation. Cached in the script."""
    count = min(num_chunks, _MOST_CHUNKS)
    key = ("sums", count)
    if key not in script._cache:
        kinds = _played(script)[0]
        # any shape with that many chunks, the last one partial; a script of one shape is asked at it, whose chunks in
        # the middle are told once where they leave nothing
        rows, columns, chunk = script.at or (2, 2 + count, {1: 6, 2: 4, 3: 3}[count])
        made: list[Sums] = []
        # an extra layer that sends its input to host memory last: the others stand for all that are not the last
        longer = (*kinds, kinds[-1]) if _offloads(script) and not script.in_host else kinds
        runs = ("0",) if script.whole else ("0", "1")
        knows_kept = "0|forward|first|k" in script.segments
        for some, recompute in ((longer, len(longer)), (kinds, 0)):
            if recompute == 0 and not knows_kept:
                made.append(made[0])  # not asked for
                continue
            splicer = Splicer(script, (rows, columns, chunk), _MOST_CHUNKS)
            splicer.start(1)
            for run in runs:
                splicer.forward_backward((run,), some, recompute)
            made.append(_signed(splicer, chunk))
        splicer = Splicer(script, (rows, columns, chunk), _MOST_CHUNKS)
        play_evaluation(splicer, kinds)
        script._cache[key] = (made[0], made[1], _signed(splicer, chunk))
    return script._cache[key]


def _signed(splicer: Splicer, chunk: int) -> Sums:
    total = len(splicer.script.templates)
    place = [n + (total if tokens is not None and tokens != chunk else 0) + 1 for n, tokens in splicer.templates]
    return {
        key: tuple(place[e.block] if e.num_bytes > 0 else -place[e.block] for e in splicer.events[start:stop])
        for key, (start, stop) in splicer.parts.items()
    }


def _measured(sums: Sums, sizes: list[int]) -> dict[PartKey, Part]:
    signed = [0, *sizes, *(-size for size in reversed(sizes))]  # indexed by +i + 1 and, from the end, by -(i + 1)
    found = {}
    for key, codes in sums.items():
        live = list(accumulate((signed[code] for code in codes), initial=0))
        found[key] = Part(max(live), live[-1])
    return found


def _pass_parts(run: str, again: dict[PartKey, Part], keep: dict[PartKey, Part], at: dict[str, int]) -> PassParts:
    def layer(i: int) -> LayerParts:
        return LayerParts(
            again.get((run, "stash", i), Part(0, 0)),
            (again[run, "forward", i], again[run, "backward", i]),
            (keep[run, "forward", i], keep[run, "backward", i]),
        )

    start = again["0", "start", 0]  # all micro-batches are on the device: two, as far as this goes
    inputs = start if run == "0" else Part(2 * start.delta_bytes, 2 * start.delta_bytes)
    return PassParts(
        embed=_both(inputs, again[run, "embed", 0]),
        first=layer(0),
        kinds={kind: layer(i) for kind, i in at.items()},
        tail_after_recompute=again[run, "tail", 0],
        tail_after_keep=keep[run, "tail", 0],
        embed_backward=again.get((run, "backward", -1), Part(0, 0)),
    )


def _with_scratch(part: Part, sizes: list[int], script: Script, scratch: int) -> Part:
    """The embedding's backward pass with what its kernel needs beside the gradient that it makes."""
    table = table_gradient(script)
    assert table is not None
    return Part(max(part.peak_bytes, sizes[table] + scratch), part.delta_bytes)


def _group_tail(script: Script, policy: str, sizes: list[int]) -> Part:
    """The tail of micro-batches that pass a head in host memory together."""
    segment = script.segments[f"{GROUP}|tail|{policy}"]
    births = [number for source, number, _ in segment if not source]
    hidden = next(sizes[number] for _, number, group in segment if group == "c")  # as large as its gradient
    live = list(accumulate((
        sizes[number] if not source else -hidden if source == "<" else -sizes[births[number]]
        for source, number, _ in segment
    ), initial=0))  # fmt: skip
    return Part(max(live), live[-1])


def _offloads(script: Script) -> str:
    """Key of a part that makes the buffers for inputs in host memory; empty where they wait on the device."""
    return next((key for key in script.segments if key.startswith("0|") and key.endswith(TURN)), "")


def _with_buffers(parts: PassParts, num_bytes: int) -> PassParts:
    """The last recomputed layer's backward pass makes two buffers, which go with the first layer's. Here one of them is
    there all the time, and so is the input that leaves last, in place of the other: it goes before they are made."""
    return replace(parts, first=replace(parts.first, stash=Part(num_bytes, num_bytes)))


def _with_gradients(parts: PassParts, script: Script, sizes: list[int]) -> PassParts:
    """With gradients that go to host memory: a layer's leave at the end of the backward pass of the one below it. Here
    the last layer finds as many as it leaves behind, as every other one does."""
    where = script.kinds[-1] if len(script.kinds) > 1 else "first"
    segment = next(script.segments[key] for key in script.segments if key.startswith(f"0|backward|{where}|"))
    left = sum(sizes[number] for source, number, group in segment if not source and group == "g")

    def later(tail: Part) -> Part:
        return Part(tail.peak_bytes, tail.delta_bytes + left)

    return replace(parts, tail_after_recompute=later(parts.tail_after_recompute),
                   tail_after_keep=later(parts.tail_after_keep))  # fmt: skip


def _with_spare(parts: PassParts, num_bytes: int) -> PassParts:
    """The first layer's forward pass leaves so much more."""
    forward, backward = parts.first.recompute
    recompute = Part(forward.peak_bytes, forward.delta_bytes + num_bytes), backward
    return replace(parts, first=replace(parts.first, recompute=recompute))


def together(first: PassParts, later: PassParts, count: int) -> PassParts:
    """Parts of `count` micro-batches that pass each layer before the next: what one leaves behind is there as often,
    and only the first of them meets no gradients."""

    def layer(a: LayerParts, b: LayerParts) -> LayerParts:
        recompute, keep = (
            (_repeated(x[0], y[0], count), _repeated(x[1], y[1], count))
            for x, y in ((a.recompute, b.recompute), (a.keep, b.keep))
        )
        return LayerParts(_repeated(a.stash, b.stash, count), recompute, keep)

    return PassParts(
        embed=_repeated(first.embed, first.embed, count),
        first=layer(first.first, later.first),
        kinds={kind: layer(parts, later.kinds[kind]) for kind, parts in first.kinds.items()},
        tail_after_recompute=_repeated(first.tail_after_recompute, later.tail_after_recompute, count),
        tail_after_keep=_repeated(first.tail_after_keep, later.tail_after_keep, count),
        embed_backward=_repeated(first.embed_backward, later.embed_backward, count),
    )


def _repeated(first: Part, later: Part, count: int) -> Part:
    """A part of one micro-batch, then of `count - 1` others."""
    further = later.peak_bytes + max(0, (count - 2) * later.delta_bytes)
    peak = max(first.peak_bytes, first.delta_bytes + further) if count > 1 else first.peak_bytes
    return Part(peak, first.delta_bytes + (count - 1) * later.delta_bytes)


def _both(first: Part, then: Part) -> Part:
    return Part(max(first.peak_bytes, first.delta_bytes + then.peak_bytes), first.delta_bytes + then.delta_bytes)


def _held_bytes(held: Iterable[Held], granule: int) -> tuple[int, int, int]:
    """(weights and masters, gradients, optimizer state) as allocated."""

    def total(tensors: Iterable[Tensor]) -> int:
        return sum(rounded(t.num_bytes, granule) for t in tensors)

    held = list(held)
    return (
        sum(total(h.tensors) for h in held),
        sum(rounded(4 * t.numel, granule) for h in held for t in h.trained),
        sum(total(t.state) for h in held for t in h.trained),
    )
