"""What a model's step allocates, as data: templates of its parts, sizes in rows, columns and loss chunk. Plain Python.

A trace of a few layers on `meta` (`memory.trace`) is cut into parts of the step; each part of each kind of layer and
activation policy becomes a `Segment`: births and deaths of blocks in order, every size an expression. A step of any
shape, depth of recomputation and number of loss chunks is spliced from them, event for event what a trace of the
whole model gives, without torch. A block that dies in a later part is named by where it was born relative to that part:
see `Op`.

Symbols of expressions: B rows, T columns, N = B x T, K = tokens with a target (all but a row's last), C loss chunk,
X tokens of the running loss chunk (the last one may be partial), P and Q = T rounded up to 32 and to 128.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fitune.memory.events import Event
from fitune.memory.replay import LayerParts, LayerTerms, Part, PassParts, StepTerms

if TYPE_CHECKING:
    from fitune.plan import Plan

SCRIPT_VERSION = 1
MOST_CHUNKS = 4  # loss chunks of a micro-batch that are told: the first, two of those in the middle, the last
MASTER = "fp32 master of "  # begins the label of a 16-bit trained tensor's copy
BUFFER = " (buffer)"  # ends that of a module's buffer, which stays on the device
WIDTHS = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "uint64": 8,
}  # fmt: skip

Term = tuple[int, str]
"""A coefficient and the product of symbols it belongs to, such as (4, "BP"); "" for a constant."""


def symbols(num_rows: int, num_columns: int, loss_chunk: int, chunk_tokens: int) -> dict[str, int]:
    """Values of the symbols at a micro-batch of [num_rows, num_columns]."""
    return {
        "B": num_rows,
        "T": num_columns,
        "N": num_rows * num_columns,
        "K": num_rows * (num_columns - 1),
        "C": loss_chunk,
        "X": chunk_tokens,
        "P": -(-num_columns // 32) * 32,
        "Q": -(-num_columns // 128) * 128,
    }


def evaluate(terms: Iterable[Term], values: dict[str, int]) -> int:
    return sum(factor * math.prod(values[s] for s in name) for factor, name in terms)


@dataclass(frozen=True)
class Template:
    """A block of a kind that parts make: `dims` are sums of terms, `num_bytes` is None where it follows from them."""

    owner: str
    what: str
    dims: tuple[tuple[Term, ...], ...]
    dtype: str
    num_bytes: tuple[Term, ...] | None = None

    def bytes_at(self, values: dict[str, int]) -> int:
        if self.num_bytes is not None:
            return evaluate(self.num_bytes, values)
        return math.prod(evaluate(d, values) for d in self.dims) * WIDTHS[self.dtype]

    def label_at(self, values: dict[str, int]) -> str:
        shape = "x".join(str(evaluate(d, values)) for d in self.dims) or "scalar"
        return f"{self.what} {shape} {self.dtype}"


Op = tuple[str, int, str]
"""(source, number, group). Source "" is the birth of template `number`; `group` says who lets go of it where that is
not the layer itself: "c" the next part in order (hidden states, their gradient), "g" the optimizer (gradients), "n" the
next loss chunk, "b" the pass's end (buffers for inputs that come back from host memory), "s" the next step. Any other
source is the death of a block, the `number`th (in order of birth): "." of those born in this part; "@name" of those
born in the same layer's part `name`; "#name" of those born in this pass's `name` ("embed", "tail", or the step's
"start"); "<" of group "c" of the part before this one; "^" of group "c" of the part that ran before this layer's
forward pass; "<<" of group "c" of the layer before the layer before this one; "%" of group "b" of this pass; "~" of
group "n" of the loss chunk before this one."""

Segment = tuple[Op, ...]


@dataclass(frozen=True)
class Tensor:
    """A tensor that is there before the step."""

    owner: str
    label: str
    num_bytes: int


@dataclass(frozen=True)
class Trained:
    """A trained tensor (its fp32 master) and the optimizer state that the first step makes for it, in order. `coded`:
    in 8 bits, with the code tables that all such tensors share."""

    name: str
    numel: int
    state: tuple[Tensor, ...]
    coded: bool = False


@dataclass(frozen=True)
class Held:
    """What a layer, or the rest of the model, holds: tensors on the device, and those trained, in the model's order."""

    tensors: tuple[Tensor, ...]
    trained: tuple[Trained, ...]

    def _is_frozen(self, tensor: Tensor) -> bool:
        name = tensor.label.partition("{layer}.")[2]
        own = tensor.owner == "weights" and not tensor.label.startswith(MASTER) and not tensor.label.endswith(BUFFER)
        return own and all(trained.name != name for trained in self.trained)

    def without_frozen(self) -> Held:
        """What stays on the device when the layer's frozen weights are streamed."""
        return replace(self, tensors=tuple(t for t in self.tensors if not self._is_frozen(t)))

    @property
    def frozen_bytes(self) -> int:
        """The layer's frozen weights as one flat buffer."""
        sizes = (-(-t.num_bytes // _ALIGNMENT_BYTES) for t in self.tensors if self._is_frozen(t))
        return sum(sizes) * _ALIGNMENT_BYTES


STREAMED = ", streamed"
"""Follows a kind of layer's name in `StepTerms` where its frozen weights are streamed."""
_ALIGNMENT_BYTES = 512  # of a streamed layer's tensors and of the ring's buffers (model.streamed, engine.ring)


@dataclass(frozen=True)
class Placement:
    """What of a step is not as a trace has it: everything on the device, one micro-batch after the other.

    Attributes:
        streamed: layers whose frozen weights pass through the device's ring of buffers.
        ring_buffers: how many buffers that has, each of the largest of these layers' size.
        together: micro-batches that pass each layer before the next one (layer-major accumulation); 1: none do.
    """

    streamed: tuple[int, ...] = ()
    ring_buffers: int = 2
    together: int = 1


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
    placement: Placement = Placement()
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def on_cuda(self) -> bool:
        """Whether the step runs on a GPU: only its allocator rounds."""
        return self.granule > 1

    def placed(self, placement: Placement) -> Script:
        """The same step with weights elsewhere, or in another order of micro-batches."""
        if placement == self.placement:
            return self
        narrow = self.narrow.placed(placement) if self.narrow is not None else None
        return replace(self, placement=placement, narrow=narrow, _cache={})

    def held_by(self, layer: int) -> Held:
        """What a layer holds on the device all the time."""
        held = self.layers[self.kinds[layer]]
        return held.without_frozen() if layer in self.placement.streamed else held

    @property
    def ring(self) -> Held:
        """The buffers that streamed weights pass through."""
        size = -(-self.tile_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        size = max([size, *(self.layers[self.kinds[i]].frozen_bytes for i in self.placement.streamed)])
        if size == 0:
            return Held((), ())
        return Held(tuple(Tensor("stream", f"ring buffer {i}", size) for i in range(self.placement.ring_buffers)), ())

    def terms(self, num_rows: int, num_columns: int, loss_chunk: int) -> StepTerms:
        """Terms of a step at micro-batches of [num_rows, num_columns], every block rounded to the granule. Cached."""
        from fitune.memory.terms import step_terms

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
        from fitune.memory.splice import step_events

        script = self._for(num_rows, num_columns, loss_chunk)
        return step_events(
            script,
            (num_rows, num_columns, loss_chunk),
            recompute_layers=recompute_layers,
            num_micro_batches=max(self.placement.together, 2 if accumulates else 1),
            first_step=first_step,
            most_chunks=most_chunks,
        )

    def eval_events(
        self, num_rows: int, num_columns: int, loss_chunk: int, most_chunks: int | None = MOST_CHUNKS
    ) -> list[Event]:
        """The evaluation of one micro-batch, after "load" (with optimizer state) as in `step_events`."""
        from fitune.memory.splice import eval_events

        script = self._for(num_rows, num_columns, loss_chunk)
        return eval_events(script, (num_rows, num_columns, loss_chunk), most_chunks)

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


__all__ = [
    "Event",
    "Held",
    "LayerParts",
    "LayerTerms",
    "Op",
    "Part",
    "PassParts",
    "Placement",
    "Script",
    "Segment",
    "StepTerms",
    "Template",
    "Tensor",
    "Trained",
    "evaluate",
    "placement_of",
    "symbols",
]
