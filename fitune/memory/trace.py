"""From runs of a few layers on `meta` to a script of the whole model's step.

Nothing is computed and nothing is allocated; what is measured is what the same code would allocate on the target. A few
layers of each kind are run under both activation policies, at a few shapes; `memory.splice` puts the parts together.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from fitune.engine.optimizers import update_peak_bytes
from fitune.engine.tiled_tail import BLOCK_TOKENS
from fitune.memory.cut import CutPart, Cutter, Fitter, NotRegular, Shape, cut
from fitune.memory.dry import DryRun, Rows
from fitune.memory.events import GRANULE, Event
from fitune.memory.follow import Follower
from fitune.memory.held import holdings, in_host_of, largest_weight, layer_of
from fitune.memory.in_host import InHost
from fitune.memory.pieces import Op, Segment, Template
from fitune.memory.replay import StepTerms
from fitune.memory.script import Script, placement_of
from fitune.memory.splice import GROUP, LEAVE, SECOND, TURN
from fitune.model.build import Built, make_scratch
from fitune.plan import Plan

# Rows, columns and loss chunk of the traced shapes: three loss chunks, the last one partial; numbers that no dimension
# of a model is a multiple of; more and fewer columns than a block of queries has.
_SEVERAL_ROWS = ((2, 71, 53), (3, 103, 113), (5, 331, 601))
_ONE_ROW = ((1, 139, 53), (1, 307, 113), (1, 1327, 601))
Run = tuple[Follower, list[CutPart]]
# Settings that tell layers apart by their number.
_BY_NUMBER = ("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "moe_layer_start_index")


def layer_kinds(config: Any) -> tuple[str, ...]:
    """A name per decoder layer; layers of one name have the same shapes and the same kernels."""
    kinds = []
    types = getattr(config, "layer_types", None)
    mlp_types = getattr(config, "mlp_layer_types", None)
    others = [name for name in _per_layer(config) if name not in ("layer_types", "mlp_layer_types")]
    for i in range(config.num_hidden_layers):
        kind = str(types[i]) if types else "layer"
        if mlp_types:
            kind += f"/{mlp_types[i]}"
        elif getattr(config, "first_k_dense_replace", None) is not None:
            kind += "/dense" if i < config.first_k_dense_replace else "/sparse"
        elif getattr(config, "decoder_sparse_step", None):
            dense = i in (getattr(config, "mlp_only_layers", None) or ()) or (i + 1) % config.decoder_sparse_step
            kind += "/dense" if dense else "/sparse"
        kinds.append(kind + "".join(f"/{name}={getattr(config, name)[i]}" for name in others))
    return tuple(kinds)


def representatives(kinds: tuple[str, ...], of_each: int = 1) -> tuple[int, ...]:
    """The first layer, which is special (its input needs no gradient where the embedding is frozen), and the first ones
    of each kind behind it."""
    places = range(1, len(kinds))
    return (0, *sorted(i for i in places if kinds[1:i].count(kinds[i]) < of_each))


def shortened(config: Any, kinds: tuple[str, ...], of_each: int = 1) -> Any:
    """The same configuration with few layers, `of_each` kind behind the first among them: these alone where lists say
    all that differs from layer to layer, else the leading layers up to the last of them."""
    chosen = representatives(kinds, of_each)
    leading = tuple(range(chosen[-1] + 1))
    for picks in dict.fromkeys((chosen, leading)):
        short = _picked(config, picks)
        if picks == leading or (_lists_say_all(config) and layer_kinds(short) == tuple(kinds[i] for i in picks)):
            return short
    raise AssertionError("the leading layers can always be taken")


def _picked(config: Any, picks: tuple[int, ...]) -> Any:
    short = copy.deepcopy(config)
    for name in _per_layer(config):
        setattr(short, name, [getattr(config, name)[i] for i in picks])
    short.num_hidden_layers = len(picks)
    return short


def _per_layer(config: Any) -> list[str]:
    """Settings that are lists with an entry per layer."""
    values = config.to_dict()
    return [
        name
        for name, value in values.items()
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == config.num_hidden_layers
    ]


def _lists_say_all(config: Any) -> bool:
    return all(getattr(config, name, None) in (None, 0, 1, []) for name in _BY_NUMBER)


class Tracer:
    """Traces of one model under one plan's method, format and precision; micro-batch shapes vary by call.

    Streamed layers, layer-major order, a head and saved inputs in host memory are exact, but for the loss tail of
    micro-batches that pass the layers together with a head in host memory: it is that of one micro-batch of all their
    rows, whose chunks end elsewhere (less than one chunk's difference). Masters in host memory are traced, shape by
    shape, where all weights are trained; adapters' are not: see `planner.placement`.

    Args:
        irregular: no script for every shape is looked for, since an earlier time has found none.
    """

    def __init__(self, config: Any, plan: Plan, irregular: bool = False):
        self.plan = plan
        self.kinds = layer_kinds(config)
        # an input that waits in host memory goes two layers later, and the last of them makes the buffers for all
        self.config = shortened(config, self.kinds, of_each=2 if plan.offload_inputs else 1)
        self.granule = GRANULE if plan.device == "cuda" else 1
        self.placement = placement_of(plan)
        self.in_host = plan.masters_in_host
        self.dry = DryRun(self.config, _untouched(plan))
        if plan.head_place == "host" and self.placement.streamed:
            held = holdings(self.dry.built, self.dry.engine.masters, plan.optimizer)
            kinds = {self.kinds[i] for i in self.placement.streamed}
            traced = enumerate(layer_kinds(self.config))
            self.dry.share_ring(max(held.layers[i].frozen_bytes for i, kind in traced if kind in kinds))
        self._script: Script | None = None
        # why there is no script for every shape
        self._why_not: str | None = "an earlier trace has found no expressions" if irregular else None
        if self.in_host:
            self._why_not = "gradients leave for host memory"
        if plan.mlp_tiles > 1:
            self._why_not = "sizes of the pieces of an MLP are rounded"
        self._scripts: dict[tuple[int, int, int, int, bool], Script] = {}

    def script(self) -> Script:
        """The step at any shape. Made once, from a few traces.

        Raises:
            NotRegular: what the step does depends on the shape in a way that expressions cannot say (attention in
                blocks, counter dropout in pieces, ...): ask for events or terms of one shape.
        """
        if self._why_not is not None:
            raise NotRegular(self._why_not)
        if self._script is None:
            try:
                self._script = _Builder(self).general().placed(self.placement)
            except NotRegular as why:
                self._why_not = str(why)
                raise
        return self._script

    def script_at(
        self, num_rows: int, num_columns: int, loss_chunk: int, together: int | None = None, keeps: bool = True
    ) -> Script:
        """The step at one shape: the general script where there is one, else a trace of this shape. Cached.

        Args:
            together: micro-batches that pass each layer before the next; None: the plan's.
            keeps: layers may keep their activations (False: where masters are in host memory it is not looked at).
        """
        try:
            return self.script()
        except NotRegular:
            together = self.placement.together if together is None else together
            key = (num_rows, num_columns, loss_chunk, together, keeps)
            if key not in self._scripts:
                made = _Builder(self).in_host(*key) if self.in_host else _Builder(self).at(*key[:-1])
                self._scripts[key] = made.placed(self.placement)
            return self._scripts[key]

    def in_host_sizes(self) -> InHost:
        """What is trained, where its masters are in host memory."""
        return in_host_of(self.dry.built, self.dry.engine.masters, self.kinds, layer_kinds(self.config))

    def terms(self, num_rows: int, num_columns: int, loss_chunk: int) -> StepTerms:
        """Terms of a step at micro-batches of [num_rows, num_columns]. Cached per shape."""
        return self.script_at(num_rows, num_columns, loss_chunk).terms(num_rows, num_columns, loss_chunk)

    def step_events(self, num_rows: int, num_columns: int, loss_chunk: int, **how: Any) -> list[Event]:
        """See `Script.step_events`."""
        script = self.script_at(num_rows, num_columns, loss_chunk)
        return script.step_events(num_rows, num_columns, loss_chunk, **how)

    def eval_events(self, num_rows: int, num_columns: int, loss_chunk: int, *how: Any) -> list[Event]:
        """See `Script.eval_events`."""
        return self.script_at(num_rows, num_columns, loss_chunk).eval_events(num_rows, num_columns, loss_chunk, *how)


def _untouched(plan: Plan) -> Plan:
    """The plan with what `Placement` stands for left out: where frozen layers are, and the order of micro-batches."""
    return plan.with_(accumulation_order="micro-batch-major", stream_from="none", resident_layers=None)


class _Builder:
    """Collects segments of several runs into one script."""

    def __init__(self, tracer: Tracer):
        self.tracer, self.dry = tracer, tracer.dry
        self.kinds = layer_kinds(tracer.config)
        self.prefix = self.dry.built.layers_prefix
        self._templates: dict[Template, int] = {}
        self._segments: dict[str, Segment] = {}

    def general(self) -> Script:
        script = self._fitted([Shape(*s) for s in _SEVERAL_ROWS])
        if self._same_for_one_row(script):
            return script
        narrow = _Builder(self.tracer)._fitted([Shape(*s) for s in _ONE_ROW])
        return replace(script, narrow=narrow, _cache={})

    def at(self, num_rows: int, num_columns: int, loss_chunk: int, together: int = 1) -> Script:
        """The script at one shape."""
        shape = self._limited(Shape(num_rows, num_columns, loss_chunk))
        short = replace(shape, limit=min(loss_chunk, shape.num_targets))
        fitter = Fitter([shape], constant=True)
        for recompute in self._cuts():
            if recompute in (0, len(self.kinds)) or not self._tail_is_one_part():
                self._add(self._run(shape, recompute, 2), fitter, recompute)
            else:  # nothing new in the tail
                self._add(self._run(short, recompute, 2), Fitter([short], constant=True), recompute, has_tail=False)
        self._add(self._evaluation(shape), fitter, 0)
        if self._tail_is_one_part() and together > 1:
            self._add_group_tails(self._limited(Shape(num_rows * together, num_columns, loss_chunk)))
        else:
            together = 1
        return replace(self._script(), at=(num_rows, num_columns, loss_chunk), group=together, _cache={})

    def in_host(self, num_rows: int, num_columns: int, loss_chunk: int, together: int, keeps: bool) -> Script:
        """The script at one shape where gradients leave for host memory: of all micro-batches that pass the layers
        together, or of one, and of another after it."""
        shape, count = Shape(num_rows, num_columns, loss_chunk), len(self.kinds)
        if -(-shape.num_targets // loss_chunk) > 3:
            shape = self._limited(shape)
        fitter = Fitter([shape], constant=True)
        whole = together > 1
        for recompute in self._cuts() if keeps else [count, *self._turns()]:
            self._add(self._run(shape, recompute, together if whole else 2, whole), fitter, recompute, whole=whole)
        self._add(self._evaluation(shape), fitter, 0)
        return replace(self._script(), at=(num_rows, num_columns, loss_chunk), group=together, whole=whole, _cache={})

    def _limited(self, shape: Shape) -> Shape:
        """Many loss chunks are traced as three, the partial one last; with a head in host memory many blocks of them,
        which pass it together, as two (the second's chunks are made before the first one's go)."""
        size = shape.loss_chunk
        if self._tail_is_one_part():
            return replace(shape, limit=min(shape.num_targets, 2 * max(BLOCK_TOKENS // size, 1) * size))
        count = -(-shape.num_targets // size)
        if count <= 3:
            return shape
        return replace(shape, limit=2 * size + shape.num_targets - (count - 1) * size)

    def _add_group_tails(self, whole: Shape) -> None:
        """The tails of micro-batches that pass together through each tile of the head, from one of all their rows."""
        fitter = Fitter([whole], constant=True)
        for recompute, policy in ((len(self.kinds), "r"), (0, "k")):
            follower, parts = self._run(whole, recompute, 1)
            at = next(i for i, part in enumerate(parts) if part.name == "tail")
            self._segments[f"{GROUP}|tail|{policy}"] = self._segment(Cutter(follower, parts), at, fitter)

    def _fitted(self, shapes: list[Shape]) -> Script:
        """All segments at the first shape, with sizes as expressions that hold at the others too."""
        if self._tail_is_one_part():
            raise NotRegular("the loss tail is not a sequence of chunks")
        base, count = shapes[0], len(self.kinds)
        fitter = Fitter(shapes)
        everything = self._run(base, count, 2)
        fitter.learn([everything, *(self._run(s, count, 1) for s in shapes[1:])])
        evaluation = self._evaluation(base)
        fitter.learn([evaluation, *(self._evaluation(s) for s in shapes[1:])])
        self._add(everything, fitter, count)
        self._add(evaluation, fitter, 0)
        for recompute in self._cuts():
            if recompute != count:
                self._add(self._run(base, recompute, 2), fitter, recompute)
        at_once = Shape(base.num_rows, base.num_columns, base.num_rows * base.num_columns)
        fitter = fitter.moved(at_once)
        for recompute in (count, 0):
            self._add(self._run(at_once, recompute, 2), fitter, recompute)
        self._add(self._evaluation(at_once), fitter, 0)
        return self._script()

    def _tail_is_one_part(self) -> bool:
        """A head in host memory takes all chunks through each tile of it."""
        return self.dry.engine.driver.tiled_head is not None

    def _cuts(self) -> list[int]:
        """Numbers of recomputed layers: all, none, and so that a layer of each kind is the first that is kept; with
        inputs in host memory, so that each is the last that is not."""
        if self.tracer.plan.offload_inputs:
            return [len(self.kinds), *range(len(self.kinds))]
        return list(dict.fromkeys([len(self.kinds), 0, *{kind: i for i, kind in enumerate(self.kinds) if i}.values()]))

    def _turns(self) -> list[int]:
        """The same where no layer is kept: with inputs in host memory, so that one like the model's last layer is the
        last that is recomputed, where the traced layers end in another kind."""
        last = self.tracer.kinds[-1]
        if not self.tracer.plan.offload_inputs or self.kinds[-1] == last:
            return []
        return [1 + max(i for i, kind in enumerate(self.kinds) if kind == last)]

    def _rows(self, shape: Shape) -> Rows:
        return Rows(shape.num_rows, shape.num_columns, shape.limit)

    def _run(self, shape: Shape, recompute: int, micro_batches: int, together: bool = False) -> Run:
        rows = [self._rows(shape)] * micro_batches
        follower = self.dry.step(rows, loss_chunk=shape.loss_chunk, recompute_layers=recompute, together=together)
        return follower, cut(follower)

    def _evaluation(self, shape: Shape) -> Run:
        follower = self.dry.evaluation(self._rows(shape), loss_chunk=shape.loss_chunk)
        return follower, cut(follower, evaluation=True)

    def _add(
        self, run: Run, fitter: Fitter, recompute: int, has_tail: bool = True, whole: bool = False
    ) -> None:  # fmt: skip
        follower, parts = run
        cutter = Cutter(follower, parts)
        last_chunk = max((part.index for part in parts if part.name == "chunk"), default=-1)
        for at, part in enumerate(parts):
            if part.name == "optimizer" or (part.name == "tail" and not has_tail):
                continue
            key = self._key(part, recompute, last_chunk)
            segment = self._segment(cutter, at, fitter)
            if part.name == "start" and key == "start" and not whole:
                segment = self._one_micro_batch(segment)
            order = tuple(op for op in segment if op[0] == ">")
            if order:
                self._learn(self._leaves(cutter, at, recompute), order)
                segment = self._with_one_leaving(segment, order, part)
            self._learn(key, segment)

    def _learn(self, key: str, segment: Segment) -> None:
        if self._segments.setdefault(key, segment) != segment:
            raise NotRegular(f"{key} is not always the same")

    def _leaves(self, cutter: Cutter, at: int, recompute: int) -> str:
        """Key of the order in which the gradients of the layer before a part leave."""
        before = cutter._before[at]
        assert before is not None
        above = cutter.parts[before]
        where = self.kinds[above.index] if above.index else "first"
        return "|".join([above.run, LEAVE, where, "r" if above.index < recompute else "k"])

    def _with_one_leaving(self, segment: Segment, order: Segment, part: CutPart) -> Segment:
        """Gradients leave all at once: at the end of a layer (which then need not be said, so that the last layer, with
        none above it, is as the others), before the pass's end, or where the embedding makes room for its own."""
        first = segment.index(order[0])
        rest = segment[first + len(order) :]
        if segment[first : first + len(order)] != order:
            raise NotRegular(f"gradients do not leave at once in {part.name} {part.index}")
        return (*segment[:first], (">", 0, ""), *rest) if rest or not part.in_layer else segment[:first]

    def _one_micro_batch(self, segment: Segment) -> Segment:
        half = (len(segment) - 1) // 2
        first, second = segment[:half], segment[half:-1]
        if [op[:2] for op in first] != [op[:2] for op in second]:
            raise NotRegular("micro-batches of one shape differ")
        return (*second, segment[-1])

    def _key(self, part: CutPart, recompute: int, last_chunk: int) -> str:
        if part.name in ("start", "end"):
            return f"{part.run}|{part.name}".lstrip("|")
        if part.name == "embed":
            return f"{part.run}|embed"
        policy = "r" if (part.index if part.in_layer else len(self.kinds) - 1) < recompute else "k"
        if part.name == "tail":
            return f"{part.run}|tail|{policy}"
        if part.name == "chunk":
            place = ("F" if part.index == 0 else "") + ("L" if part.index == last_chunk else "") or "M"
            return f"{part.run}|chunk|{policy}|{place}"
        if not part.in_layer:
            return f"{part.run}|{part.name}|embed"
        where = self.kinds[part.index] if part.index else "first"
        if part.name == "stash":
            return f"{part.run}|stash|{where}"
        enters = "|enters" if part.name == "backward" and part.index == recompute and part.index else ""
        if self.tracer.plan.offload_inputs and policy == "r" and part.run != "e":
            if part.name == "forward" and part.index == 1:
                enters = SECOND
            if part.name == "backward" and part.index == recompute - 1:
                enters = TURN
        return f"{part.run}|{part.name}|{where}|{policy}{enters}"

    def _segment(self, cutter: Cutter, at: int, fitter: Fitter) -> Segment:
        part = cutter.parts[at]
        made: list[Op] = []
        for source, number, group in cutter.ops(at):
            if source == "":
                block = cutter.blocks[number]
                owner, what = cutter.described(block, layer_of(block.name, self.prefix)[1])
                template = fitter.template(block, part, owner, what)
                number = self._templates.setdefault(template, len(self._templates))
            made.append((source, number, group))
        return tuple(made)

    def _same_for_one_row(self, script: Script) -> bool:
        """Whether the script says of one row what a trace of one row does (a few layers of it)."""
        shape = Shape(*_ONE_ROW[0])
        short, count = replace(script, kinds=self.kinds, _cache={}), len(self.kinds)
        key = (shape.num_rows, shape.num_columns, shape.loss_chunk)
        for recompute in (count, 0):
            run = self._run(shape, recompute, 1)
            said = short.step_events(*key, recompute_layers=recompute, accumulates=False, first_step=True)
            if _sizes(said) != _sizes(_as_events(run, self.prefix)):
                return False
        return True

    def _script(self) -> Script:
        plan, built = self.tracer.plan, self.dry.built
        in_host = self.tracer.in_host
        held = holdings(built, None if in_host else self.dry.engine.masters, plan.optimizer)
        masters = [] if in_host else self.dry.engine.masters.parameters()
        return Script(
            kinds=self.tracer.kinds,
            granule=self.tracer.granule,
            templates=tuple(self._templates),
            segments=self._segments,
            layers={kind: held.layers[i] for i, kind in enumerate(self.kinds)},
            before=held.before,
            after=held.after,
            shared_state=held.shared,
            scratch=_scratch_rule(self.dry),
            clips=plan.clip > 0,
            update_bytes=update_peak_bytes(plan.optimizer, masters),
            largest_weight_bytes=largest_weight(built),
            tile_bytes=_tile_bytes(built),
            in_host=in_host,
        )


def _tile_bytes(built: Built) -> int:
    head = built.host_head
    return 0 if head is None else head.tile_rows * head.in_features * head.dtype.itemsize


def _scratch_rule(dry: DryRun) -> tuple[int, int] | None:
    """(least bytes, bytes per token of a loss chunk) of the scratch buffer, from its size for two chunks."""
    small, large, larger = (make_scratch(dry.built, chunk) for chunk in (0, 1 << 30, 1 << 31))
    if small is None or large is None or larger is None:
        return None
    per_token = (larger.buffer.numel() - large.buffer.numel()) >> 30
    return small.buffer.numel(), per_token


def events_of(follower: Follower, prefix: str, evaluation: bool = False) -> list[Event]:
    """A followed run as events, nothing added up: what a script's splice of a few layers must equal."""
    return _as_events((follower, cut(follower, evaluation)), prefix)


def _as_events(run: Run, prefix: str) -> list[Event]:
    follower, parts = run
    cutter = Cutter(follower, parts)
    found = []
    for part in parts:
        layer = part.index if part.in_layer else -1
        name = "tail" if part.name == "chunk" else part.name
        for event in part.events:
            block = follower.blocks[abs(event) - 1]
            owner, what = cutter.described(block, layer_of(block.name, prefix)[1])
            label = f"{what} {'x'.join(map(str, block.shape)) or 'scalar'} {block.dtype}"
            num_bytes = block.num_bytes if event > 0 else -block.num_bytes
            found.append(Event(block.number, num_bytes, owner, label, name, layer))
    return found


def _sizes(events: list[Event]) -> list[int]:
    return [event.num_bytes for event in events if event.part != "load"]
