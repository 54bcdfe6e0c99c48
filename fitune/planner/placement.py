"""Plans whose frozen weights or layer inputs wait outside the card: which there are, and what they need.

A step under such a plan allocates what the resident one does, less the streamed layers' weights, plus the ring of
buffers they pass through; less the saved inputs, plus two of them; less masters, optimizer state and all gradients but
two layers'. `terms_of` changes the resident step's terms so, for the search; `script_of` gives the events, for the
allocator's replay. A head in host memory makes another loss tail, which is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fitune.memory.events import Event, rounded
from fitune.memory.host import PROCESS_BYTES
from fitune.memory.in_host import piece_buffers
from fitune.memory.pieces import MASTER, STREAMED
from fitune.memory.policies import highest_peaks
from fitune.memory.replay import LayerParts, Part, PassParts, StepTerms
from fitune.memory.script import placement_of
from fitune.memory.terms import together
from fitune.memory.variant import BASE
from fitune.plan import Plan
from fitune.planner import sharing, ways
from fitune.planner.ladder import SMALLEST_CHUNK, TermsOf

if TYPE_CHECKING:
    from fitune.memory.sequence import Script
    from fitune.planner.context import PlanContext

LEVELS = (0.0, 0.25, 0.5, 0.75)  # shares of the layers whose weights stay on the card
TILE_TOKENS = 2048  # of a piece of a tiled MLP, at most: enough for full speed of its products
FEWEST_TILES = 4
MOST_HEAD_CHUNK = 1024


def is_placed(plan: Plan) -> bool:
    """Whether something of the plan's step waits outside the card."""
    places = plan.offload_inputs, plan.head_place == "host", plan.optimizer_place != "device"
    return bool(plan.streamed_layers()) or any(places)


def resident(plan: Plan) -> Plan:
    """The plan whose step is traced: everything on the card, one micro-batch after the other. With a head in host
    memory inputs stay where they are, and either all layers are streamed or none (its tiles are sized by the ring).
    Masters of full fine-tuning stay in host memory, and inputs where they are."""
    if plan.masters_in_host:
        return plan.with_(accumulation_order="micro-batch-major", optimizer_place="host", optimizer=BASE,
                          stream_from="none", resident_layers=None)  # fmt: skip
    plan = plan.with_(accumulation_order="micro-batch-major", optimizer_place="device", parallel="none", world_size=1,
                      offload_optimizer="none", offload_params="none", offload_folder=None)  # fmt: skip
    if plan.head_place == "device":
        return plan.with_(stream_from="none", resident_layers=None, offload_inputs=False)
    if plan.streamed_layers():
        return plan.with_(stream_from="pinned", resident_layers=0)
    return plan.with_(stream_from="none", resident_layers=None)


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


def head_chunk(hidden_size: int) -> int:
    """Tokens of a loss chunk where logits are made a tile of the vocabulary at a time: a tile's logits (8 bytes each)
    take no more than the tile itself (two bytes per weight)."""
    return max(SMALLEST_CHUNK, min(MOST_HEAD_CHUNK, hidden_size // 4))


def tight_drafts(draft: Plan, width: int, has_mlp: bool, chunk: int) -> Iterator[list[Plan]]:
    """Drafts of one GPU for where none of `drafts` fits, in groups of which a later one is for where the former does
    not: a gated MLP in pieces of tokens; then the head in host memory too; then the adapters' masters and state.

    Args:
        width: tokens of the widest row.
        has_mlp: some layer has a gated MLP that can run in pieces.
        chunk: tokens of a loss chunk where logits are made in tiles (`head_chunk`, or what the person chose).
    """
    if draft.device != "cuda" or draft.method != "lora" or draft.world_size > 1:
        return
    tiles = max(FEWEST_TILES, 1 << (-(-width // TILE_TOKENS) - 1).bit_length()) if has_mlp else 1
    tiled = draft.with_(mlp_tiles=tiles)
    if has_mlp:
        yield [placed for placed in drafts(tiled) if placed.offload_inputs]
    lean = [placed.with_(head_place="host", loss_chunk=chunk) for placed in drafts(tiled)
            if placed.offload_inputs and placed.resident_layers == 0]  # fmt: skip
    yield lean
    if not draft.optimizer.startswith("paged_"):
        yield [placed.with_(optimizer_place="host") for placed in (*drafts(draft), *lean)]


# ---- what they need on the card --------------------------------------------------------------------------------------


def step_terms(context: PlanContext, plan: Plan) -> StepTerms:
    """Terms of a plan's step at its own micro-batch and chunk, in the widest rows that training meets."""
    return terms_of(context, plan, context.num_rows(plan))(plan.micro_batch, context.row_width(plan), plan.loss_chunk)


def highest_peak(context: PlanContext, plan: Plan) -> int:
    """The highest of all phases' sums of a plan's tensors, in bytes."""
    accumulates = plan.micro_batch < context.num_rows(plan) and plan.accumulation_order != "layer-major"
    return highest_peaks(step_terms(context, plan), accumulates)[plan.recompute_layers]


def terms_of(context: PlanContext, draft: Plan, num_rows: int) -> TermsOf:
    """Terms of a draft's step at (rows, columns, loss chunk); of one whose accumulation is layer-major those of all
    `num_rows` rows of an optimizer step together.
    """
    if draft.masters_in_host:
        return functools.partial(_in_host_terms, context, draft, num_rows)
    on_card = terms_with_masters(context, draft, num_rows)
    if draft.optimizer_place == "device":
        return on_card

    def placed(rows: int, columns: int, chunk: int) -> StepTerms:
        return without_masters(on_card(rows, columns, chunk), draft)

    return placed


def terms_with_masters(context: PlanContext, draft: Plan, num_rows: int) -> TermsOf:
    """The same, with masters and optimizer state on the card wherever the draft has them."""
    tracer = context.tracer(resident(draft))
    of_resident = sharing.of_rank(context, draft, num_rows, tracer.terms)
    if draft.head_place == "host":
        return functools.partial(_traced_terms, tracer, draft, num_rows)
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


def _traced_terms(tracer: Any, draft: Plan, num_rows: int, *shape: int) -> StepTerms:
    """Terms of a step whose head is in host memory (the script keeps them)."""
    where = placement_of(draft.with_(batch=num_rows, micro_batch=shape[0]))
    made: StepTerms = tracer.script_at(*shape, where.together).placed(where).terms(*shape)
    return made


def _in_host_terms(context: PlanContext, draft: Plan, num_rows: int, *shape: int) -> StepTerms:
    """Terms of full fine-tuning with masters in host memory: traced as it is, at each shape, with the buffers of
    updates on the card (which the first update makes) there from the beginning."""
    tracer = context.tracer(resident(draft))
    where = placement_of(draft.with_(batch=num_rows, micro_batch=shape[0]))
    keeps = draft.recompute_layers < draft.num_layers
    made: StepTerms = tracer.script_at(*shape, where.together, keeps).placed(where).terms(*shape)
    pieces = piece_buffers(tracer.in_host_sizes(), draft.with_(micro_batch=shape[0]), num_rows)
    total = sum(rounded(size) for _, size in pieces)
    return replace(made, other_weight_bytes=made.other_weight_bytes + total) if total else made


def without_masters(terms: StepTerms, plan: Plan) -> StepTerms:
    """With an adapter's masters and optimizer state in host memory. On the card are copies in the compute format, and
    of gradients those of the layer that runs and of the one before it, which are on their way. (In fp32 here, where the
    engine may have 16 bits: half of one layer's at most. Parts outside the layers that are trained, which are biases,
    count as on the card.) Updates on the card need buffers for their pieces."""
    narrow = _is_narrow(plan)
    layer_major = plan.accumulation_order == "layer-major"
    largest = max((layer.trained_bytes for layer in terms.layers.values()), default=0)
    leaving = largest // 2 if narrow and not layer_major else largest
    buffers = 0
    if plan.optimizer_place == "streamed":
        from fitune.engine.streamed_update import buffer_bytes

        buffers = buffer_bytes(plan.optimizer)
    layers = {
        kind: replace(
            layer, weight_bytes=layer.weight_bytes - (layer.trained_bytes // 2 if narrow else 0), trained_bytes=0,
            state_bytes=0,
        )
        for kind, layer in terms.layers.items()
    }  # fmt: skip

    def without(layer: LayerParts, kind: str) -> LayerParts:
        gone = terms.layers[kind].trained_bytes

        def ends(parts: tuple[Part, Part]) -> tuple[Part, Part]:
            return parts[0], Part(parts[1].peak_bytes, parts[1].delta_bytes - gone)

        return LayerParts(layer.stash, ends(layer.recompute), ends(layer.keep))

    parts = terms.first_pass  # a later micro-batch meets no gradients either
    parts = replace(
        parts,
        first=without(parts.first, terms.kinds[0]),
        kinds={kind: without(layer, kind) for kind, layer in parts.kinds.items()},
    )
    return replace(
        terms, layers=layers, first_pass=parts, later_pass=parts, other_state_bytes=0, optimizer_peak_bytes=0,
        other_weight_bytes=terms.other_weight_bytes + leaving + buffers,
    )  # fmt: skip


def _is_narrow(plan: Plan) -> bool:
    """Whether adapters on the card are 16-bit copies of masters elsewhere."""
    return plan.adapter is not None and not plan.adapter.dora and plan.precision != "fp32"


def streamed(terms: StepTerms, plan: Plan) -> StepTerms:
    """Without the streamed layers' frozen weights, with the ring that they pass through."""
    indices = set(plan.streamed_layers())
    if not indices or plan.stream_from == "shards":  # shards' terms have their ring
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
    if plan.parallel not in ways.REPLAYED:
        return None
    tracer: Script = context.tracer(resident(plan))
    return _Placed(tracer, plan, context.num_rows(plan)) if is_placed(plan) else tracer


class _Placed:
    """A traced step's events with weights elsewhere and in another order of micro-batches (`memory.script`), and with
    what inputs and masters in host memory leave on the card in place of them."""

    def __init__(self, tracer: Any, plan: Plan, num_rows: int):
        self.tracer, self.plan = tracer, plan
        self._where = placement_of(plan.with_(batch=max(num_rows, plan.micro_batch)))
        self._in_host = plan.masters_in_host
        self._pieces: list[Event] = []
        if self._in_host:
            made = piece_buffers(tracer.in_host_sizes(), plan, num_rows)
            self._pieces = [Event(_INPUTS * 2 - i, size, "workspace", f"{what}, on its way", "load", -1)
                            for i, (what, size) in enumerate(made)]  # fmt: skip

    def _script(self, *shape: int) -> Script:
        keeps = self.plan.recompute_layers < self.plan.num_layers
        more = (keeps,) if self._in_host else ()
        made: Script = self.tracer.script_at(*shape, self._where.together, *more).placed(self._where)
        return made

    def step_events(self, num_rows: int, num_columns: int, loss_chunk: int, **how: Any) -> list[Event]:
        """See `memory.sequence.Script`."""
        if self._in_host:
            events = self._script(num_rows, num_columns, loss_chunk).step_events(
                num_rows, num_columns, loss_chunk, **how
            )
            if how["first_step"]:  # its update makes them
                return [*events, *(replace(e, part="optimizer") for e in self._pieces)]
            return [*self._pieces, *events]
        hosted = self.plan.optimizer_place != "device"
        if hosted:  # nothing accumulates on the card: every micro-batch is as the first
            how |= {"accumulates": False}
        told: Iterable[Event] = self._script(num_rows, num_columns, loss_chunk).step_events(
            num_rows, num_columns, loss_chunk, **how
        )
        if self.plan.offload_inputs and self.plan.head_place == "device":  # else they were traced so
            told = _without_inputs(told, how["recompute_layers"])
        return list(_without_masters(told, self.plan) if hosted else told)

    def eval_events(self, num_rows: int, num_columns: int, loss_chunk: int) -> list[Event]:
        """See `memory.sequence.Script`."""
        events = self._script(num_rows, num_columns, loss_chunk).eval_events(num_rows, num_columns, loss_chunk)
        if self._in_host:
            return [*self._pieces, *events]
        return events if self.plan.optimizer_place == "device" else list(_without_masters(events, self.plan))


_INPUTS = -2000  # numbers of blocks that no script uses


def _without_inputs(events: Iterable[Event], recompute: int) -> Iterator[Event]:
    """In place of a room for each saved input, what `fitune.engine.inputs` has of them on the card: the one that was
    sent last until the backward pass comes to them (at layer `recompute` - 1), then two buffers until the last is used.
    (That a layer's output goes before its backward pass is left out: one hidden state too much.)"""
    rooms: set[int] = set()
    there: list[Event] = []
    has_turned = False
    number = _INPUTS
    for event in events:
        if event.num_bytes > 0 and event.part == "stash":
            if not rooms:
                there, has_turned = [replace(event, block=number, label="layer input, on its way")], False
                number -= 3
                yield from there
            rooms.add(event.block)
            continue
        if rooms and not has_turned and event.part == "backward" and event.layer == recompute - 1:
            (sent,) = there
            yield replace(event, block=sent.block, num_bytes=-sent.num_bytes, owner=sent.owner, label=sent.label)
            there = [replace(sent, block=sent.block - i, part=event.part, layer=event.layer) for i in (1, 2)]
            yield from there
            has_turned = True
        if event.num_bytes < 0 and event.block in rooms:
            rooms.discard(event.block)
            if not rooms:
                yield from (replace(event, block=b.block, num_bytes=-b.num_bytes) for b in there)
        else:
            yield event


def _without_masters(events: Iterable[Event], plan: Plan) -> Iterator[Event]:
    """See `without_masters`: a layer's gradients go once the layer below it is through."""
    narrow, wide = _is_narrow(plan), plan.accumulation_order == "layer-major"
    leaving: list[Event] = []
    if plan.optimizer_place == "streamed":
        from fitune.engine.streamed_update import buffer_bytes

        size = buffer_bytes(plan.optimizer)
        yield Event(_INPUTS * 2, size, "workspace", "pieces of masters and state on their way", "load", -1)
    for event in events:
        over = [e for e in leaving if event.part != "backward" or e.layer >= event.layer + 2]
        leaving = [e for e in leaving if e not in over]
        yield from (replace(e, num_bytes=-e.num_bytes, part=event.part, layer=event.layer) for e in over)
        if event.owner == "optimizer" or event.label.startswith(MASTER):
            continue
        if event.owner == "adapters" and narrow:
            event = replace(event, num_bytes=event.num_bytes // 2)
        elif event.owner == "gradients":
            if event.num_bytes < 0:
                continue
            event = replace(event, num_bytes=event.num_bytes // 2) if narrow and not wide else event
            leaving.append(event)
        yield event


def streamed_bytes(terms: StepTerms, plan: Plan) -> int:
    """Frozen weights that wait outside. `terms`: of the same model with its masters on the card, streamed or not."""
    if plan.stream_from == "shards":  # they wait on the other cards
        return 0
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
    masters = state = 0
    if plan.optimizer_place != "device":
        terms = terms_with_masters(context, plan, context.num_rows(plan))(plan.micro_batch, width, plan.loss_chunk)
        masters, state = terms.trained_bytes, terms.state_bytes
    inputs = input_bytes(plan, width, config.hidden_size) if plan.offload_inputs else 0
    table = config.vocab_size * config.hidden_size * _element_bytes(plan)
    tables = table * ((plan.embedding_place == "host") + (plan.head_place == "host"))
    ranks = context.layout.per_node  # of one machine: tables and streamed weights are there once for all of them
    always = tables + ranks * (PROCESS_BYTES["linux", "cuda"] + inputs + 2 * masters + state)
    head = table if plan.head_place == "host" else 0
    pinned = ranks * (inputs + masters) + head  # of masters the gradients, on their way
    weights = streamed_bytes(terms, plan)
    if always > target.ram_bytes or pinned > target.pinned_bytes:
        return None
    if not weights:
        return plan
    if always + weights > target.ram_bytes:
        fits = target.disk_bytes is None or weights <= target.disk_bytes
        return plan.with_(stream_from="disk") if fits else None
    return plan.with_(stream_from="pinned" if pinned + weights <= target.pinned_bytes else "pageable")
