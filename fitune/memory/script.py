"""What a model's step allocates, as data: templates of its parts, sizes in rows, columns and loss chunk. Plain Python.

A trace of a few layers on `meta` (`memory.trace`) is cut into parts of the step; each part of each kind of layer and
activation policy becomes a `Segment`: births and deaths of blocks in order, every size an expression (see
`memory.pieces`). A step of any shape, depth of recomputation and number of loss chunks is spliced from them, event for
event what a trace of the whole model gives, without torch. A block that dies in a later part is named by where it was
born relative to that part: see `Op`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fitune.memory import splice
from fitune.memory.events import Event, rounded
from fitune.memory.pieces import ALIGNMENT_BYTES, Held, Op, Placement, Segment, Template, Tensor, Term, Trained
from fitune.memory.replay import StepTerms
from fitune.memory.terms import step_terms

if TYPE_CHECKING:
    from fitune.plan import Plan

SCRIPT_VERSION = 1
MOST_CHUNKS = 4  # loss chunks of a micro-batch that are told: the first, two of those in the middle, the last


def placement_of(plan: Plan) -> Placement:
    """The placement that a plan asks for."""
    together = -(-plan.batch // plan.micro_batch) if plan.accumulation_order == "layer-major" else 1
    return Placement(plan.streamed_layers(), plan.ring_buffers, together)


@dataclass(frozen=True)
class Script:
    """A model's step under one plan (method, formats, precision, attention, optimizer), at any shape.

    Attributes:
        kinds: kind of every decoder layer of the full-depth model, in order.
        granule: bytes to which the device's allocator rounds a block (512 on CUDA).
        templates: the distinct blocks.
        segments: parts by key, see `fitune.memory.splice`.
        layers: what a layer of each kind holds; `before` and `after` the layers in the model's order.
        shared_state: code tables of 8-bit optimizer state.
        scratch: (bytes of the widest unpacked weight, bytes per token of a loss chunk); None without a scratch buffer.
        clips: whether gradients are clipped.
        update_bytes: what the optimizer allocates besides state.
        largest_weight_bytes: the widest unpacked tensor while weights load.
        at: (rows, columns, loss chunk) where sizes are only known for one shape; None when they hold for all.
        narrow: the script for one row, where the program runs differently then.
        tile_bytes: of the widest tile of a head in host memory, which passes through the ring too; 0 without one.
        group: micro-batches whose tails go through a head in host memory together; 1 where that was not traced.
        in_host: masters and optimizer state are in host memory, and gradients go there (full fine-tuning).
        whole: segments are of all `group` micro-batches, which pass each layer together.
        placement: what waits outside the device, and how micro-batches are ordered; no part of a trace.
    """

    kinds: tuple[str, ...]
    granule: int
    templates: tuple[Template, ...]
    segments: dict[str, Segment]
    layers: dict[str, Held]
    before: Held
    after: Held
    shared_state: tuple[Tensor, ...]
    scratch: tuple[int, int] | None
    clips: bool
    update_bytes: int
    largest_weight_bytes: int
    at: tuple[int, int, int] | None = None
    narrow: Script | None = None
    tile_bytes: int = 0
    group: int = 1
    in_host: bool = False
    whole: bool = False
    placement: Placement = Placement()
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def on_cuda(self) -> bool:
        """Whether the step runs on a GPU: only its allocator rounds."""
        return self.granule > 1

    def placed(self, placement: Placement) -> Script:
        """The same step with weights elsewhere, or in another order of micro-batches. Cached."""
        if placement == self.placement:
            return self
        if placement not in self._cache:
            narrow = self.narrow.placed(placement) if self.narrow is not None else None
            self._cache[placement] = replace(self, placement=placement, narrow=narrow, _cache={})
        made: Script = self._cache[placement]
        return made

    def held_by(self, layer: int) -> Held:
        """What a layer holds on the device all the time."""
        held = self.layers[self.kinds[layer]]
        return held.without_frozen() if layer in self.placement.streamed else held

    @property
    def together(self) -> int:
        """Passes whose parts are played together."""
        return 1 if self.whole else self.placement.together

    @property
    def ring(self) -> Held:
        """The buffers that streamed weights pass through."""
        size = rounded(self.tile_bytes, ALIGNMENT_BYTES)
        size = max([size, *(self.layers[self.kinds[i]].frozen_bytes for i in self.placement.streamed)])
        if size == 0:
            return Held((), ())
        return Held(tuple(Tensor("stream", f"ring buffer {i}", size) for i in range(self.placement.ring_buffers)), ())

    def terms(self, num_rows: int, num_columns: int, loss_chunk: int) -> StepTerms:
        """Terms of a step at micro-batches of [num_rows, num_columns], every block rounded to the granule. Cached."""
        key = (num_rows, num_columns, loss_chunk)
        if key not in self._cache:
            self._cache[key] = step_terms(self._for(*key), *key)
        return self._cache[key]

    def step_events(
        self,
        num_rows: int,
        num_columns: int,
        loss_chunk: int,
        *,
        recompute_layers: int,
        accumulates: bool,
        first_step: bool,
        most_chunks: int | None = MOST_CHUNKS,
    ) -> list[Event]:
        """One optimizer step of the whole model, event for event.

        What is there before it (weights, adapters, masters, optimizer state unless `first_step`) is born at the head
        of the list in part "load", one event per tensor, and stays. `accumulates`: two micro-batches, else one; where
        they pass the layers together, all of them.

        `most_chunks`: as many loss chunks are told of a micro-batch; further ones repeat those in the middle, with
        other blocks of the same sizes (None: all are told).

        Raises:
            ValueError: the script holds for another shape only.
        """
        script = self._for(num_rows, num_columns, loss_chunk)
        return splice.step_events(
            script,
            (num_rows, num_columns, loss_chunk),
            recompute_layers=recompute_layers,
            num_micro_batches=1 if self.whole else max(self.placement.together, 2 if accumulates else 1),
            first_step=first_step,
            most_chunks=most_chunks,
        )

    def eval_events(
        self, num_rows: int, num_columns: int, loss_chunk: int, most_chunks: int | None = MOST_CHUNKS
    ) -> list[Event]:
        """The evaluation of one micro-batch, after "load" (with optimizer state) as in `step_events`."""
        script = self._for(num_rows, num_columns, loss_chunk)
        return splice.eval_events(script, (num_rows, num_columns, loss_chunk), most_chunks)

    def _for(self, num_rows: int, num_columns: int, loss_chunk: int) -> Script:
        wanted = (num_rows, num_columns, loss_chunk)
        if self.at is not None and self.at != wanted:
            raise ValueError(f"sizes are known at {self.at} only, not at {wanted}")
        return self.narrow if num_rows == 1 and self.narrow is not None else self

    def to_json(self) -> str:
        """Compact text; inverse of `from_json`."""
        return json.dumps({"version": SCRIPT_VERSION, **_packed(self)}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Script:
        """The script that `to_json` wrote.

        Raises:
            ValueError: another version.
        """
        values = json.loads(text)
        if values.pop("version") != SCRIPT_VERSION:
            raise ValueError("a script of another version")
        return _unpacked(values)


def _packed(script: Script) -> dict[str, Any]:
    values = asdict(replace(script, narrow=None, segments={}, placement=Placement(), _cache={}))
    del values["_cache"], values["placement"]
    if not script.tile_bytes:
        del values["tile_bytes"]
    if script.group == 1:
        del values["group"]
    assert not script.in_host and not script.whole, "traced for every shape by itself, and not kept"
    del values["in_host"], values["whole"]
    distinct: dict[str, int] = {}
    keys = {}
    for key, segment in script.segments.items():
        text = " ".join(f"{source}{number}{group}" for source, number, group in segment)
        keys[key] = distinct.setdefault(text, len(distinct))
    values |= {
        "segments": keys,
        "texts": list(distinct),
        "templates": [[t.owner, t.what, t.dims, t.dtype, t.num_bytes] for t in script.templates],
        "layers": {kind: _packed_held(held) for kind, held in script.layers.items()},
        "before": _packed_held(script.before),
        "after": _packed_held(script.after),
        "shared_state": [[t.owner, t.label, t.num_bytes] for t in script.shared_state],
        "narrow": _packed(script.narrow) if script.narrow is not None else None,
    }
    return values


def _packed_held(held: Held) -> list[Any]:
    def rows(tensors: Sequence[Tensor]) -> list[Any]:
        return [[t.owner, t.label, t.num_bytes] for t in tensors]

    return [rows(held.tensors), [[t.name, t.numel, rows(t.state), t.coded] for t in held.trained]]


def _unpacked(values: dict[str, Any]) -> Script:
    def held(packed: list[Any]) -> Held:
        tensors, trained = packed
        return Held(
            tuple(Tensor(*t) for t in tensors),
            tuple(
                Trained(name, numel, tuple(Tensor(*t) for t in state), coded) for name, numel, state, coded in trained
            ),
        )

    def terms(packed: list[Any]) -> tuple[Term, ...]:
        return tuple((factor, name) for factor, name in packed)

    texts = [tuple(_op(token) for token in text.split()) for text in values.pop("texts")]
    templates = [
        Template(owner, what, tuple(terms(d) for d in dims), dtype, None if size is None else terms(size))
        for owner, what, dims, dtype, size in values.pop("templates")
    ]
    narrow, scratch, at = values.pop("narrow"), values.pop("scratch"), values.pop("at")
    return Script(
        kinds=tuple(values.pop("kinds")),
        templates=tuple(templates),
        segments={key: texts[number] for key, number in values.pop("segments").items()},
        layers={kind: held(packed) for kind, packed in values.pop("layers").items()},
        before=held(values.pop("before")),
        after=held(values.pop("after")),
        shared_state=tuple(Tensor(*t) for t in values.pop("shared_state")),
        scratch=None if scratch is None else (scratch[0], scratch[1]),
        at=None if at is None else (at[0], at[1], at[2]),
        narrow=None if narrow is None else _unpacked(narrow),
        **values,
    )


def _op(token: str) -> Op:
    """ "12c" or "@forward7" as an Op."""
    group = token[-1] if token[-1].isalpha() else ""
    body = token[: len(token) - len(group)]
    digits = len(body) - len(body.rstrip("0123456789"))
    cut = len(body) - digits
    return body[:cut], int(body[cut:]), group
