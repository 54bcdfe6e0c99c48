"""One rank's terms of a step that several GPUs share, from the terms of the step on one. Plain Python.

Each layout (`Plan.parallel`) is a function of terms that gives terms: everything that adds terms up (`memory.replay`,
`memory.policies`, `memory.additive`) works on a rank's as on one card's. A test holds ddp, streamed, fsdp2, tp, cp and
pp to traces of a rank's own step (`memory.ranks.trace_rank`) at 2, 4 and 8 ranks, within 3 % (tp with kept activations
5 %; full fine-tuning in fp32 under pp was seen 4.6 % below). What NCCL holds is outside the allocator:
`NCCL`. Closed forms, with P elements trained in what the terms belong to and N ranks:

| layout | weights | gradients, state | besides |
| --- | --- | --- | --- |
| ddp, streamed | as alone | as alone | one bucket of gradients while they are added up |
| fsdp2 | base of layers / N, adapters and ends whole | / N | gathered layers, fp32 rows of two layers and of the ends |
| zero1, zero2, zero3 | as `memory.zero` says | | |
| tp | layers' and head's / N | about (1 + 1/N) / 2 | hidden states whole, what is between column and row split / N |
| cp | as alone | as alone | activations of 1 / N of each row's tokens |
| pp | those of the stage's layers | of these | activations of all micro-batches of a step (GPipe) |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fitune.memory.constants import Figure, Overheads
from fitune.memory.events import rounded
from fitune.memory.replay import LayerParts, LayerTerms, Part, PassParts, StepTerms
from fitune.memory.terms import together
from fitune.memory.zero import zero_bytes
from fitune.plan import Plan, layers_of
from fitune.units import MIB

BUCKET_BYTES = 32 * MIB  # of fitune.parallel.replicated, which imports torch (a test holds them equal)
REPLICATED = ("ddp", "streamed")  # every rank computes with all of the weights and updates all that is trained
DATA_PARALLEL = (*REPLICATED, "fsdp2", "zero1", "zero2", "zero3")  # each rank works on its share of a step's records

# Not measured here. NCCL's buffers are 4 MiB per channel and connection by default (NVIDIA/nccl#391), a ring has two
# connections per channel: 2 to 4 channels over PCIe, 8 to 24 over NVLink; 1.6 GB was reported on one machine
# (NVIDIA/nccl#864), which the interval leaves out: it had several communicators.
NCCL = Figure(192 * MIB, "assumed", "4 MiB per channel and connection, not measured", 32 * MIB, 512 * MIB)

_NOTHING = Part(0, 0)
_NO_PARTS = LayerParts(_NOTHING, (_NOTHING, _NOTHING), (_NOTHING, _NOTHING))
_ABSENT = "absent"  # kind of a layer that another stage has


@dataclass(frozen=True)
class Ends:
    """What is around the layers on the device, in bytes of the compute format.

    Attributes:
        embedding: 0 where the table is in host memory; head: 0 where it is the embedding.
        adapters_whole: share of the adapters' elements that tensor parallel does not cut: the input side of what is
            cut by outputs, the output side of what is cut by inputs.
    """

    embedding: int
    head: int
    adapters_whole: float = 0.5


def with_nccl(extra: Overheads) -> Overheads:
    """A process' overheads where it belongs to a group of GPUs."""
    a, b = extra.context, NCCL
    basis = a.basis if a.basis in ("none", "assumed") else b.basis
    source = f"{a.source} + NCCL's buffers, assumed"
    low, high = a.low_bytes + b.low_bytes, a.high_bytes + b.high_bytes
    figure = Figure(a.num_bytes + b.num_bytes, basis, source, low, high)
    return extra if a.basis == "none" else replace(extra, context=figure)


def rank_terms(terms: StepTerms, plan: Plan, ends: Ends, *, micro_batches: int = 1, stage: int = 0) -> StepTerms:
    """Terms of one rank under `plan.parallel` on `plan.world_size` ranks.

    Args:
        terms: of the whole model at the rank's own micro-batch shape, everything on the device.
        micro_batches: of an optimizer step (pp holds all of them at once).
        stage: which of the ranks (pp; elsewhere all are alike).
    """
    way = plan.parallel
    if plan.world_size == 1 or way == "none":
        return terms
    if way in (*REPLICATED, "cp"):  # cp: of terms at a slice of the rows
        return _bucketed(terms, min(BUCKET_BYTES, terms.trained_bytes))
    if way == "fsdp2":
        return _sharded(terms, plan, micro_batches)
    if way == "pp":
        return _stage(terms, plan, ends, micro_batches, stage)
    if way == "tp":
        return _split(terms, plan, ends)
    assert way in ("zero1", "zero2", "zero3"), way
    return _partitioned(terms, plan)


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _with_end(parts: PassParts, end: Callable[[Part], Part]) -> PassParts:
    """Something that happens when the last backward pass is over."""
    return replace(parts, embed_backward=end(parts.embed_backward))


def _beside(part: Part, peak_bytes: int, delta_bytes: int = 0) -> Part:
    """A part after which so many bytes more are needed for a moment, and `delta_bytes` more stay."""
    after = part.delta_bytes
    return Part(max(part.peak_bytes, after + peak_bytes, after + delta_bytes), after + delta_bytes)


def _raised(part: Part, num_bytes: int) -> Part:
    """A part during which so many bytes more are there, from its begin on."""
    return Part(part.peak_bytes + num_bytes, part.delta_bytes + num_bytes)


def _backward(layer: LayerParts, change: Callable[[Part], Part]) -> LayerParts:
    (again, again_back), (keep, keep_back) = layer.recompute, layer.keep
    return LayerParts(layer.stash, (again, change(again_back)), (keep, change(keep_back)))


def _bucketed(terms: StepTerms, num_bytes: int) -> StepTerms:
    """All gradients are there, and a bucket of copies of some of them."""
    end: Callable[[Part], Part] = lambda part: _beside(part, num_bytes)  # noqa: E731
    return replace(terms, first_pass=_with_end(terms.first_pass, end), later_pass=_with_end(terms.later_pass, end))


# ---- fsdp2 -----------------------------------------------------------------------------------------------------------


def _sharded(terms: StepTerms, plan: Plan, micro_batches: int) -> StepTerms:
    """Of `fitune.parallel.sharded`: every rank's part of the layers, what is gathered, and rows of gradients.

    A step's later micro-batches meet gradients in one process too, and make none of their own that last: their parts
    are those of a backward pass here, with this rank's part of the gradients after it.
    """
    ranks, full = plan.world_size, plan.method == "full"
    units = {kind: -(-layer.trained_bytes // ranks) for kind, layer in terms.layers.items()}
    base = {kind: layer.weight_bytes - layer.trained_bytes for kind, layer in terms.layers.items()}
    carried = {kind: base[kind] or terms.layers[kind].trained_bytes for kind in terms.layers}  # fp32: its own master
    layers = {
        kind: replace(
            layer,
            weight_bytes=-(-base[kind] // ranks) + (units[kind] if full else layer.trained_bytes),
            trained_bytes=units[kind],
            state_bytes=-(-layer.state_bytes // ranks),
        )
        for kind, layer in terms.layers.items()
    }
    ends, ends_unit = terms.other_trained_bytes, -(-terms.other_trained_bytes // ranks)
    masters = ends if plan.precision == "fp32" else ends_unit  # in fp32 the whole row is the masters' memory
    ring = plan.ring_buffers * rounded(max(carried.values()))
    largest = max(layer.trained_bytes for layer in terms.layers.values())
    later = terms.later_pass
    grouped = plan.accumulation_order == "layer-major"
    return replace(
        terms,
        layers=layers,
        other_weight_bytes=terms.other_weight_bytes - ends + masters + ring + 2 * rounded(largest),
        other_trained_bytes=ends_unit,
        other_state_bytes=-(-terms.other_state_bytes // ranks),
        first_pass=_sharded_pass(later, terms, units, ends, ends_unit),
        later_pass=later if grouped else _later_sharded(later, 2 * max(units.values()), ends, ends_unit, micro_batches),
        optimizer_peak_bytes=-(-terms.optimizer_peak_bytes // ranks),
    )


def _sharded_pass(
    parts: PassParts, terms: StepTerms, units: dict[str, int], ends: int, ends_unit: int
) -> PassParts:  # fmt: skip
    """A step's first micro-batch: a layer's part of the gradients stays; those outside the layers are added up in rows
    until the step's end, from the loss tail's on."""

    def layer(found: LayerParts, kind: str) -> LayerParts:
        return _backward(found, lambda part: _beside(part, units[kind], units[kind]))

    return PassParts(
        embed=parts.embed,
        first=layer(parts.first, terms.kinds[0]),
        kinds={kind: layer(found, kind) for kind, found in parts.kinds.items()},
        tail_after_recompute=_raised(parts.tail_after_recompute, ends),
        tail_after_keep=_raised(parts.tail_after_keep, ends),
        embed_backward=_beside(parts.embed_backward, ends_unit),
    )


def _later_sharded(parts: PassParts, on_way: int, ends: int, ends_unit: int, micro_batches: int) -> PassParts:
    """A further micro-batch: rows outside the layers instead of parts, and two layers' parts on their way: from the
    one before, where that was not the first, which keeps what it made."""
    if micro_batches > 2:
        raised = replace(parts, embed=_raised(parts.embed, ends - ends_unit + on_way))
    else:
        change: Callable[[Part], Part] = lambda part: replace(part, peak_bytes=part.peak_bytes + on_way)  # noqa: E731
        kinds = {kind: _backward(layer, change) for kind, layer in parts.kinds.items()}
        raised = replace(parts, embed=_raised(parts.embed, ends - ends_unit), kinds=kinds,
                         first=_backward(parts.first, change))  # fmt: skip
    return _with_end(raised, lambda part: _beside(part, ends_unit))


# ---- pp --------------------------------------------------------------------------------------------------------------


def _stage(terms: StepTerms, plan: Plan, ends: Ends, micro_batches: int, stage: int) -> StepTerms:
    """Of `fitune.parallel.pipeline`: the layers of one stage. All micro-batches go forward, then one after the other
    backward: the first pass is that of the first, beside what the others have left; the later one that of the second,
    which meets the first one's gradients. Layers of other stages are kinds without any bytes, so that a policy counts
    layers as it does elsewhere."""
    own = layers_of(len(terms.kinds), stage, plan.world_size, plan.stages)
    is_first, is_last = stage == 0, stage == plan.world_size - 1
    kinds = tuple(kind if index in own else _ABSENT for index, kind in enumerate(terms.kinds))
    layers = {kind: terms.layers[kind] for kind in dict.fromkeys(kinds) if kind != _ABSENT}
    layers[_ABSENT] = LayerTerms(0, 0, 0, _NOTHING)
    frozen, trained = _of_stage(terms, plan, ends, is_first=is_first, is_last=is_last)
    share = trained / terms.other_trained_bytes if terms.other_trained_bytes else 0.0

    hidden = terms.first_pass.first.stash.delta_bytes
    received = Part(hidden, hidden)  # another one's room is kept for exchanges after a failure: `_raised` below
    both = together(terms.first_pass, terms.later_pass, micro_batches)

    def passed(parts: PassParts, count: int, *, tail: bool) -> PassParts:
        """`count` micro-batches forward, one of them backward."""

        def layer(found: LayerParts) -> LayerParts:
            (again, again_back), (keep, keep_back) = found.recompute, found.keep
            return LayerParts(_times(found.stash, count), (_times(again, count), again_back),
                              (_times(keep, count), keep_back))  # fmt: skip

        ends_of = parts.tail_after_recompute, parts.tail_after_keep
        if not is_last:  # what is sent stays until its gradient comes
            ends_of = Part(2 * hidden, 2 * hidden), Part(2 * hidden, 2 * hidden)
        elif tail:
            ends_of = both.tail_after_recompute, both.tail_after_keep
        else:
            ends_of = _kept(ends_of[0], count), _kept(ends_of[1], count)
        kinds = {kind: layer(parts.kinds[kind]) for kind in layers if kind in parts.kinds}
        return PassParts(
            embed=_raised(_times(parts.embed if is_first else received, count), hidden),
            first=layer(parts.first) if is_first else _NO_PARTS,
            kinds=kinds | {_ABSENT: _NO_PARTS},
            tail_after_recompute=ends_of[0],
            tail_after_keep=ends_of[1],
            embed_backward=parts.embed_backward if is_first else _NOTHING,
        )

    evaluated = {kind: _kept_input(found, hidden) for kind, found in layers.items() if kind != _ABSENT}
    return replace(
        terms,
        kinds=kinds,
        layers=layers | evaluated,
        other_weight_bytes=frozen + trained,
        other_trained_bytes=trained,
        other_state_bytes=int(terms.other_state_bytes * share),
        first_pass=passed(terms.first_pass, micro_batches, tail=True),
        later_pass=passed(terms.later_pass, max(1, micro_batches - 1), tail=False),
        eval_embed=_raised(terms.eval_embed if is_first else received, hidden),
        eval_tail=terms.eval_tail if is_last else _NOTHING,
    )


def _times(part: Part, count: int) -> Part:
    """A part of `count` micro-batches, one after the other."""
    return Part(max(part.peak_bytes, part.peak_bytes + (count - 1) * part.delta_bytes), count * part.delta_bytes)


def _kept(part: Part, count: int) -> Part:
    """What a part that is over has left."""
    return Part(max(0, count * part.delta_bytes), count * part.delta_bytes)


def _kept_input(layer: LayerTerms, hidden: int) -> LayerTerms:
    """An evaluation keeps the input of every layer of a stage until its micro-batch is through."""
    part = layer.eval_forward
    return replace(layer, eval_forward=Part(part.peak_bytes, part.delta_bytes + hidden))


def _of_stage(terms: StepTerms, plan: Plan, ends: Ends, *, is_first: bool, is_last: bool) -> tuple[int, int]:
    """(frozen, trained) bytes of a stage outside its layers: the first one's embedding, the last one's head and norm.
    A tied head is there on both."""
    tied = not ends.head
    head = ends.embedding if tied else ends.head
    there = (ends.embedding if is_first else 0) + (head if is_last and not (tied and is_first) else 0)
    frozen = terms.other_weight_bytes - terms.other_trained_bytes - ends.embedding - ends.head + there
    if not terms.other_trained_bytes:
        return frozen, 0
    width = 1 if plan.precision == "fp32" else 2  # masters are fp32
    trained = width * there
    if plan.precision == "fp32":  # the weights are the masters
        frozen = terms.other_weight_bytes - terms.other_trained_bytes
    rest = terms.other_trained_bytes - width * (ends.embedding + ends.head)  # the final norm's
    return frozen, trained + (rest if is_last else 0)


# ---- tp --------------------------------------------------------------------------------------------------------------

WHOLE_STATES = 4  # hidden states of a layer that every rank holds whole: two inputs of norms, two normalised ones


def _split(terms: StepTerms, plan: Plan, ends: Ends) -> StepTerms:
    """Layers, embedding, head and logits cut over ranks. Of a layer's activations up to `WHOLE_STATES` hidden states
    are whole, the rest is cut. What a part makes of gradients is what its first pass leaves more than a later one."""
    ranks = plan.world_size
    hidden = terms.first_pass.first.stash.delta_bytes

    def cut(num_bytes: int, whole: int = 0) -> int:
        rest = max(0, num_bytes - whole)
        return num_bytes - rest + -(-rest // ranks)

    def trained(num_bytes: int) -> int:
        return cut(num_bytes, 0 if plan.method == "full" else int(ends.adapters_whole * num_bytes))

    def part(found: Part, gradients: int = 0) -> Part:
        """`gradients`: of what it leaves, cut as what is trained is."""
        whole = WHOLE_STATES * hidden
        kept = found.delta_bytes - gradients
        delta = (cut(kept, whole) if kept > 0 else -cut(-kept, whole)) + trained(gradients)
        beside = max(0, found.peak_bytes - gradients)
        return Part(max(cut(beside, whole) + trained(gradients), delta, 0), delta)

    def layer(found: LayerParts, made: int) -> LayerParts:
        (again, back), (keep, keep_back) = found.recompute, found.keep
        return LayerParts(found.stash, (part(again), part(back, made)), (part(keep), part(keep_back, made)))

    def around_layers(found: Part, later: Part) -> Part:
        made = found.delta_bytes - later.delta_bytes
        delta = later.delta_bytes + cut(made)
        return Part(max(cut(found.peak_bytes, 2 * hidden), delta), delta)

    def passed(parts: PassParts, made: Callable[[str], int]) -> PassParts:
        again = around_layers(parts.tail_after_recompute, terms.later_pass.tail_after_recompute)
        keep = around_layers(parts.tail_after_keep, terms.later_pass.tail_after_keep)
        kinds = {kind: layer(found, made(kind)) for kind, found in parts.kinds.items()}
        return PassParts(parts.embed, layer(parts.first, made(terms.kinds[0])), kinds, again, keep,
                         around_layers(parts.embed_backward, terms.later_pass.embed_backward))  # fmt: skip

    layers = {
        kind: replace(
            found,
            weight_bytes=cut(found.weight_bytes - found.trained_bytes) + trained(found.trained_bytes),
            trained_bytes=trained(found.trained_bytes),
            state_bytes=trained(found.state_bytes),
            eval_forward=part(found.eval_forward),
        )
        for kind, found in terms.layers.items()
    }
    around = ends.embedding + ends.head  # the embedding is cut too, and on the card then
    there = ends.head + (ends.embedding if plan.embedding_place == "device" else 0)
    ends_trained = trained(terms.other_trained_bytes)
    frozen = terms.other_weight_bytes - terms.other_trained_bytes
    return replace(
        terms,
        layers=layers,
        other_weight_bytes=cut(frozen - there) + cut(around) + ends_trained,  # the logits' buffer too
        other_trained_bytes=ends_trained,
        other_state_bytes=trained(terms.other_state_bytes),
        first_pass=passed(terms.first_pass, lambda kind: terms.layers[kind].trained_bytes),
        later_pass=passed(terms.later_pass, lambda kind: 0),
        optimizer_peak_bytes=cut(terms.optimizer_peak_bytes),
        eval_tail=Part(cut(terms.eval_tail.peak_bytes, 2 * hidden), terms.eval_tail.delta_bytes),
    )


# ---- zero1, zero2, zero3 ---------------------------------------------------------------------------------------------


def _partitioned(terms: StepTerms, plan: Plan) -> StepTerms:
    """DeepSpeed's stages: what is held by `memory.zero`'s forms, activations as on one card. Gradients and buckets are
    taken to be there during all of a backward pass: in most stages they are made once and kept."""
    width = 4 if plan.precision == "fp32" else 2
    trained = terms.trained_bytes // 4
    base = terms.weight_bytes - terms.trained_bytes
    narrow = plan.method == "full" and plan.precision != "fp32"
    own = width * trained if narrow else 0  # of the base what is trained, as it computes
    largest = max(layer.weight_bytes - layer.trained_bytes or layer.trained_bytes for layer in terms.layers.values())
    found = zero_bytes(plan, trained=trained, frozen_bytes=max(0, base - own), state_bytes=terms.state_bytes,
                       unit=largest // width)  # fmt: skip
    made = max(0, found.gradients + found.bucket - found.lasting)
    later = terms.later_pass
    return replace(
        terms,
        layers={kind: replace(f, weight_bytes=0, trained_bytes=0, state_bytes=0) for kind, f in terms.layers.items()},
        other_weight_bytes=found.weights + found.masters + found.lasting + found.gathered,
        other_trained_bytes=made,
        other_state_bytes=found.state,
        first_pass=replace(later, embed=_raised(later.embed, made)),
        later_pass=later,
        optimizer_peak_bytes=found.copied,
    )
