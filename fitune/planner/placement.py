"""Plans whose frozen weights or layer inputs wait outside the card: which there are, and what they need.

A step under such a plan allocates what the resident one does, less the streamed layers' weights, plus the ring of
buffers they pass through; less the saved inputs, plus two of them. `terms_of` changes the resident step's terms so, for
the search; `script_of` gives the events, for the allocator's replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fitune.memory.events import Event, rounded
from fitune.memory.host import PROCESS_BYTES
from fitune.memory.pieces import STREAMED
from fitune.memory.replay import LayerParts, Part, PassParts, StepTerms
from fitune.memory.terms import together
from fitune.plan import Plan
from fitune.planner.ladder import TermsOf

if TYPE_CHECKING:
    from fitune.memory.sequence import Script
    from fitune.planner.context import PlanContext

LEVELS = (0.0, 0.25, 0.5, 0.75)  # shares of the layers whose weights stay on the card


def is_placed(plan: Plan) -> bool:
    """Whether something of the plan's step waits outside the card."""
    return bool(plan.streamed_layers()) or plan.offload_inputs or plan.head_place == "host"


def resident(plan: Plan) -> Plan:
    """The plan with everything of its step on the card, one micro-batch after the other."""
    return plan.with_(
        stream_from="none", resident_layers=None, head_place="device", offload_inputs=False,
        accumulation_order="micro-batch-major",
    )  # fmt: skip


# ---- which there are -------------------------------------------------------------------------------------------------


def drafts(draft: Plan) -> Iterator[Plan]:
    """The drafts beside the resident one, easiest first: saved inputs in host memory; then frozen weights streamed,
    some layers or all of them, one micro-batch after the other or all through a layer before the next."""
    if draft.device != "cuda":
        return
    yield draft.with_(offload_inputs=True)
    if draft.method != "lora":
        return
    levels = sorted({int(share * draft.num_layers) for share in LEVELS}, reverse=True)
    for count in levels:
        for order in ("micro-batch-major", "layer-major"):
            for offload in (False, True):
                yield draft.with_(stream_from="pinned", resident_layers=count, accumulation_order=order,
                                  offload_inputs=offload)  # fmt: skip


# ---- what they need on the card --------------------------------------------------------------------------------------


def terms_of(context: PlanContext, draft: Plan, num_rows: int) -> TermsOf:
    """Terms of a draft's step at (rows, columns, loss chunk); of one whose accumulation is layer-major those of all
    `num_rows` rows of an optimizer step together."""
    of_resident: TermsOf = context.tracer(resident(draft)).terms
    if not is_placed(draft):
        return of_resident

    def placed(rows: int, columns: int, chunk: int) -> StepTerms:
        terms = of_resident(rows, columns, chunk)
        room = terms.first_pass.first.stash.delta_bytes
        if draft.accumulation_order == "layer-major":
            both = together(terms.first_pass, terms.later_pass, -(-num_rows // rows))
            terms = replace(terms, first_pass=both, later_pass=both)
        if draft.offload_inputs:
            terms = offloaded(terms, room)
        return streamed(terms, draft)

    return placed


def streamed(terms: StepTerms, plan: Plan) -> StepTerms:
    """Without the streamed layers' frozen weights, with the ring that they pass through."""
    indices = set(plan.streamed_layers())
    if not indices:
        return terms

    def frozen(kind: str) -> int:
        layer = terms.layers[kind]
        return layer.weight_bytes - layer.trained_bytes

    kinds = tuple(kind + STREAMED if i in indices else kind for i, kind in enumerate(terms.kinds))
    renamed = {kind + STREAMED: kind for i, kind in enumerate(terms.kinds) if i in indices}
    layers = dict(terms.layers) | {
        name: replace(terms.layers[kind], weight_bytes=terms.layers[kind].trained_bytes)
        for name, kind in renamed.items()
    }  # fmt: skip

    def known(parts: PassParts) -> PassParts:
        extra = {name: parts.kinds[kind] for name, kind in renamed.items() if kind in parts.kinds}
        return replace(parts, kinds=parts.kinds | extra)

    buffer = rounded(max(frozen(kind) for kind in renamed.values()))
    return replace(
        terms, kinds=kinds, layers=layers, first_pass=known(terms.first_pass), later_pass=known(terms.later_pass),
        other_weight_bytes=terms.other_weight_bytes + plan.ring_buffers * buffer,
    )  # fmt: skip


def script_of(context: PlanContext, plan: Plan) -> Script | None:
    """The events of a plan's step; None where they are not known."""
    if plan.head_place == "host":
        return None
    tracer: Script = context.tracer(resident(plan))
    return _Placed(tracer, plan) if is_placed(plan) else tracer


class _Placed:
    """A resident step's events with weights elsewhere and in another order of micro-batches (`memory.script`), and with
    what inputs in host memory leave on the card in place of them."""

    def __init__(self, tracer: Any, plan: Plan):
        self.tracer, self.plan = tracer, plan

    def _script(self, *shape: int) -> Script:
        from fitune.memory.script import placement_of

        made: Script = self.tracer.script_at(*shape).placed(placement_of(self.plan))
        return made

    def step_events(self, num_rows: int, num_columns: int, loss_chunk: int, **how: Any) -> list[Event]:
        """See `memory.sequence.Script`."""
        events = self._script(num_rows, num_columns, loss_chunk).step_events(num_rows, num_columns, loss_chunk, **how)
        return list(_without_inputs(events)) if self.plan.offload_inputs else events

    def eval_events(self, num_rows: int, num_columns: int, loss_chunk: int) -> list[Event]:
        """See `memory.sequence.Script`."""
        return self._script(num_rows, num_columns, loss_chunk).eval_events(num_rows, num_columns, loss_chunk)


_INPUTS = -2000  # numbers of blocks that no script uses


def _without_inputs(events: Iterable[Event]) -> Iterator[Event]:
    """Two buffers from a pass's first saved input to its last in place of a room for each."""
    rooms: set[int] = set()
    buffers: list[Event] = []
    number = _INPUTS
    for event in events:
        if event.num_bytes > 0 and event.part == "stash":
            if not rooms:
                buffers = [replace(event, block=number - i, label="layer input, on its way") for i in range(2)]
                number -= 2
                yield from buffers
            rooms.add(event.block)
        elif event.num_bytes < 0 and event.block in rooms:
            rooms.discard(event.block)
            if not rooms:
                yield from (replace(event, block=b.block, num_bytes=-b.num_bytes) for b in buffers)
        else:
            yield event


def streamed_bytes(terms: StepTerms, plan: Plan) -> int:
    """Frozen weights that wait outside. `terms`: of the same model, streamed or not."""
    kinds = [terms.kinds[i].removesuffix(STREAMED) for i in plan.streamed_layers()]
    return sum(terms.layers[kind].weight_bytes - terms.layers[kind].trained_bytes for kind in kinds)


def offloaded(terms: StepTerms, input_bytes: int) -> StepTerms:
    """With saved inputs, of `input_bytes` each, in host memory: no room for each, but two on the card (while forward
    one leaves as its layer runs; while backward one is used and one fetched). The first layer's part holds them."""

    def without(layer: LayerParts, buffers: int) -> LayerParts:
        """A recomputed layer's backward pass used to end with its saved input's room, which is not there now."""
        room = layer.stash.delta_bytes
        forward, backward = layer.recompute
        again = forward, Part(backward.peak_bytes, backward.delta_bytes + room)
        return LayerParts(Part(buffers * input_bytes, buffers * input_bytes), again, layer.keep)

    def changed(parts: PassParts) -> PassParts:
        kinds = {kind: without(layer, 0) for kind, layer in parts.kinds.items()}
        return replace(parts, first=without(parts.first, 2), kinds=kinds)

    return replace(terms, first_pass=changed(terms.first_pass), later_pass=changed(terms.later_pass))


# ---- what they need of the host --------------------------------------------------------------------------------------


def input_bytes(plan: Plan, width: int, hidden_size: int) -> int:
    """Saved inputs of a plan's recomputed layers, at rows of `width` tokens."""
    rows = plan.batch if plan.accumulation_order == "layer-major" else plan.micro_batch
    return plan.recompute_layers * rows * width * hidden_size * _element_bytes(plan)


def _element_bytes(plan: Plan) -> int:
    return 4 if plan.precision == "fp32" else 2


def settled(context: PlanContext, plan: Plan, terms: StepTerms, width: int) -> Plan | None:
    """The plan with its weights in the fastest place of the host that has room for them: pinned RAM, pageable RAM,
    the disk. None where not even what has to be in RAM has room."""
    target, config = context.target, context.config
    inputs = input_bytes(plan, width, config.hidden_size) if plan.offload_inputs else 0
    table = config.vocab_size * config.hidden_size * _element_bytes(plan) if plan.embedding_place == "host" else 0
    always = PROCESS_BYTES["linux", "cuda"] + table + inputs
    weights = streamed_bytes(terms, plan)
    if always > target.ram_bytes or inputs > target.pinned_bytes:
        return None
    if not weights:
        return plan
    if always + weights > target.ram_bytes:
        fits = target.disk_bytes is None or weights <= target.disk_bytes
        return plan.with_(stream_from="disk") if fits else None
    return plan.with_(stream_from="pinned" if inputs + weights <= target.pinned_bytes else "pageable")
