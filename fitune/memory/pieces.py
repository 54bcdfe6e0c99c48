"""What a script is made of: sizes as expressions, templates of blocks, segments of births and deaths, what layers hold.
Plain Python.

Symbols of expressions: B rows, T columns, N = B x T, K = tokens with a target (all but a row's last), C loss chunk,
X tokens of the running loss chunk (the last one may be partial), P and Q = T rounded up to 32 and to 128.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fitune.memory.events import rounded

MASTER = "fp32 master of "  # begins the label of a 16-bit trained tensor's copy
BUFFER = " (buffer)"  # ends that of a module's buffer, which stays on the device
WIDTHS = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "uint64": 8, "complex64": 8,
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
        "P": rounded(num_columns, 32),
        "Q": rounded(num_columns, 128),
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
source is the death of a block, the `number`th (in order of birth): "." of those born in this part; ">" of the
gradients of the layer above that are on their way to host memory; "@name" of those
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
        return sum(rounded(t.num_bytes, ALIGNMENT_BYTES) for t in self.tensors if self._is_frozen(t))


STREAMED = ", streamed"
"""Follows a kind of layer's name in `StepTerms` where its frozen weights are streamed."""
ALIGNMENT_BYTES = 512  # of a streamed layer's tensors and of the ring's buffers (model.streamed, engine.ring)


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
