"""A followed run cut into the parts of the step; its sizes as expressions, found by comparing runs of a few shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fitune.memory.follow import Block, Follower
from fitune.memory.pieces import WIDTHS, Op, Template, Term, evaluate, symbols
from fitune.memory.splice import GRADIENT

_IN_PASS = ("embed", "tail")  # parts of which a pass has one
_OUTSIDE = ("start", "optimizer", "end", *_IN_PASS)
_LARGEST_FACTOR = 1 << 40
_PRODUCTS = ("T", "N", "B", "X", "C", "K", "BP", "BQ", "P", "Q", "NT", "TT", "XX", "BTT", "XT", "PP", "QQ")
_WORDS = {
    "mm": "matrix product", "addmm": "matrix product", "bmm": "batched matrix product", "_to_copy": "copy",
    "linear": "matrix product", "to": "copy",
    "empty_like": "result", "empty": "result", "zeros_like": "zeros", "new_empty": "result", "embedding": "embedding",
    "_flash_attention_forward": "attention", "_flash_attention_backward": "gradient of attention", "cat": "joined",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_efficient_attention": "attention", "index": "gathered", "clone": "contiguous copy",
}  # fmt: skip


class NotRegular(Exception):
    """The step's parts do not repeat from layer to layer, or a size follows from no expression known here."""


@dataclass(frozen=True)
class Shape:
    """A micro-batch and what of it is traced: `limit` targets at most."""

    num_rows: int
    num_columns: int
    loss_chunk: int
    limit: int | None = None

    @property
    def num_targets(self) -> int:
        everything = self.num_rows * (self.num_columns - 1)
        return everything if self.limit is None else min(everything, self.limit)

    def chunk_tokens(self, index: int) -> int:
        return min(self.loss_chunk, self.num_targets - index * self.loss_chunk)

    def values(self, chunk_tokens: int) -> dict[str, int]:
        return symbols(self.num_rows, self.num_columns, self.loss_chunk, chunk_tokens)


@dataclass
class CutPart:
    """One part of a followed run."""

    run: str  # "0", "1": micro-batch; "e": evaluation; "" before, between and after
    name: str
    index: int
    events: list[int]
    births: list[int]  # numbers of blocks

    @property
    def in_layer(self) -> bool:
        return self.name not in _OUTSIDE and self.name != "chunk" and self.index >= 0


def cut(follower: Follower, evaluation: bool = False) -> list[CutPart]:
    """The parts of a run in order. A pass begins with "embed"; what is after the last pass belongs to no pass."""
    found, run = [], -1
    ends = [mark.at for mark in follower.marks[1:]] + [len(follower.events)]
    for mark, end in zip(follower.marks, ends, strict=True):
        if mark.name == "embed":
            run += 1
        events = follower.events[mark.at : end]
        outside = mark.name in ("start", "optimizer", "end")
        name = "e" if evaluation else "" if outside else str(run)
        found.append(CutPart(name, mark.name, mark.index, events, [e - 1 for e in events if e > 0]))
    if not evaluation:
        _split_update(found)
    return [_numbered(part, i, follower) for i, part in enumerate(found)]


def _split_update(found: list[CutPart]) -> None:
    """The mean of the losses is taken before the engine says that its update begins: it belongs there."""
    loss = found[0].births[-1]
    update = next(i for i, part in enumerate(found) if part.name == "optimizer")
    last = found[update - 1]
    at = last.events.index(-loss - 1) - 1
    found[update].events = last.events[at:] + found[update].events
    found[update].births = [e - 1 for e in found[update].events if e > 0]
    last.events = last.events[:at]
    last.births = [e - 1 for e in last.events if e > 0]


def _numbered(part: CutPart, number: int, follower: Follower) -> CutPart:
    for event in part.events:
        block = follower.blocks[abs(event) - 1]
        if event > 0:
            block.part = number
        else:
            block.died = number
    return part


class Cutter:
    """Turns one run's parts into ops. `follower.blocks[i].part` indexes `parts`."""

    def __init__(self, follower: Follower, parts: list[CutPart]):
        self.blocks, self.parts = follower.blocks, parts
        self._ordinal = {b: i for part in parts for i, b in enumerate(part.births)}
        self._before: dict[int, int | None] = {}  # part to the layer part before it
        self._before_forward: dict[tuple[str, int], int | None] = {}
        latest = tail = None
        for i, part in enumerate(parts):
            self._before[i] = latest
            if part.name == "forward":
                self._before_forward[part.run, part.index] = latest
            if part.in_layer and part.name != "stash":
                latest = i
            if part.name == "tail":
                tail = i
            if part.name in ("tail", "chunk") and i + 1 < len(parts) and parts[i + 1].name == "backward":
                latest = tail  # what it hands on is the gradient of the last layer's output

    def group(self, block: Block) -> str:
        """See `script.Op`."""
        born = self.parts[block.part]
        if block.died is None and born.name == "start":
            return "s"
        if block.died is None:
            raise NotRegular(f"a block of {born.name} {born.index} is never let go: {block}")
        died = self.parts[block.died]
        if born.name == "backward" and block.op == "empty" and block.dtype == "uint8":
            return "b"
        if born.name == "tail" and died.in_layer and block.shape and self._before[block.died] == block.part:
            return "c"
        if died is born or born.name in ("start", *_IN_PASS):
            return ""
        if block.owner == "gradients":
            return "g"
        if born.name == "chunk":
            if died.name == "chunk" and died.index == born.index + 1:
                return "n"
        elif born.in_layer and died.run == born.run:
            return "" if died.in_layer and died.index == born.index else "c"
        raise NotRegular(f"{block} of {born.name} {born.index} dies in {died.name} {died.index}")

    def _group_ordinal(self, block: Block, group: str) -> int:
        """Which of its part's blocks with that group it is."""
        same = [b for b in self.parts[block.part].births if self.group(self.blocks[b]) == group]
        return same.index(block.number)

    def death(self, block: Block, at: int) -> Op:
        """The op of a block's death in part `at`."""
        born, here = self.parts[block.part], self.parts[at]
        ordinal = self._ordinal[block.number]
        group = self.group(block)
        if group == "b":
            return ("%", self._group_ordinal(block, group), "")
        if block.part == at:
            return (".", ordinal, "")
        if born.name == "start" or (born.name in _IN_PASS and born.run == here.run and not group):
            return (f"#{born.name}", ordinal, "")
        if group == "n":
            return ("~", self._group_ordinal(block, group), "")
        if group == "":
            return (f"@{born.name}", ordinal, "")
        if group == "g" and self._before[at] == block.part:
            return (">", self._group_ordinal(block, group), "")
        if group == "c":
            if self._before[at] == block.part:
                return ("<", self._group_ordinal(block, group), "")
            if here.in_layer and self._before_forward.get((here.run, here.index)) == block.part:
                return ("^", self._group_ordinal(block, group), "")
            if (born.name, here.name) == ("forward", "forward") and born.index == here.index - 2:
                return ("<<", self._group_ordinal(block, group), "")
        raise NotRegular(f"{block} of {born.name} {born.index} dies in {here.name} {here.index}")

    def ops(self, at: int) -> list[Op]:
        """Births as ("", block number, group), deaths as `script.Op`s."""
        made: list[Op] = []
        for event in self.parts[at].events:
            block = self.blocks[abs(event) - 1]
            made.append(("", block.number, self.group(block)) if event > 0 else self.death(block, at))
        return made

    def _is_handed_on(self, block: Block) -> bool:
        try:
            return self.group(block) == "c"
        except NotRegular:  # of a run that is told but not taken apart
            return False

    def described(self, block: Block, layer_name: str) -> tuple[str, str]:
        """(owner, what a person calls it without its shape)."""
        if block.owner == "gradients":
            return "gradients", GRADIENT + layer_name
        if block.owner:
            return block.owner, block.name
        born, word = self.parts[block.part], _WORDS.get(block.op, block.op.strip("_").replace("_", " "))
        if born.name == "start":
            return "inputs", "tokens of the micro-batch" if block.shape else "sum of losses"
        if born.name == "stash":
            return "inputs", "input of a recomputed layer"
        if block.died is not None and block.died != block.part:
            died = self.parts[block.died]
            if born.name == "embed":
                return "inputs", f"what layers are called with: {word}"
            if born.name == "tail" and self._is_handed_on(block):
                return "temporary", "gradient of hidden states"
            if self._is_handed_on(block):
                return (
                    ("inputs", "hidden states")
                    if born.name == "forward"
                    else ("temporary", "gradient of hidden states")
                )
            if born.name == "forward" and died.name == "backward":
                return "saved", f"saved {word}"
        return "temporary", word


class Fitter:
    """Expressions of sizes, learned from runs of one structure at several shapes."""

    def __init__(self, shapes: Sequence[Shape], constant: bool = False):
        self.shapes = list(shapes)
        self.constant = constant  # sizes are as they are at the one shape
        self._known: dict[tuple, tuple[tuple[tuple[Term, ...], ...], tuple[Term, ...] | None]] = {}

    def learn(self, runs: Sequence[tuple[Follower, list[CutPart]]]) -> None:
        """The same run at each of the shapes. One of several micro-batches teaches its first.

        Raises:
            NotRegular: the runs differ in more than sizes, or a size has no expression.
        """
        taught = [[part for part in parts if part.run in ("0", "e")] for _, parts in runs]
        if len({len(parts) for parts in taught}) > 1:
            raise NotRegular("the number of parts depends on the shape")
        for parts in zip(*taught, strict=True):
            if len({len(part.births) for part in parts}) > 1:
                raise NotRegular(f"what {parts[0].name} {parts[0].index} does depends on the shape")
            self._learn_part(runs, parts, [part.births for part in parts])
        starts = [parts[0] for _, parts in runs]
        if starts[0].run == "":
            least = min(len(part.births) for part in starts)
            self._learn_part(runs, starts, [[*part.births[: least - 1], part.births[-1]] for part in starts])

    def _learn_part(
        self, runs: Sequence[tuple[Follower, list[CutPart]]], parts: Sequence[CutPart], births: list[list[int]]
    ) -> None:
        values = [
            s.values(s.chunk_tokens(p.index) if p.name == "chunk" else s.loss_chunk)
            for s, p in zip(self.shapes, parts, strict=True)
        ]
        for numbers in zip(*births, strict=True):
            self._learn([f.blocks[n] for (f, _), n in zip(runs, numbers, strict=True)], parts[0], values)

    def moved(self, shape: Shape) -> Fitter:
        """The same expressions, to be found by their values at another shape, whose loss chunk holds all targets."""
        made = Fitter([shape])
        for in_chunk in (False, True):
            values = shape.values(shape.chunk_tokens(0))
            for (tokens, _, dtype, _), (dims, size) in self._known.items():
                if in_chunk != (tokens is not None):
                    continue
                at = tuple(evaluate(d, values) for d in dims)
                num_bytes = math.prod(at) * WIDTHS[dtype] if size is None else evaluate(size, values)
                key = (shape.chunk_tokens(0) if in_chunk else None, at, dtype, num_bytes)
                if made._known.setdefault(key, (dims, size)) != (dims, size) and not in_chunk:
                    raise NotRegular(f"two sizes look alike at {shape}: {at}")
        return made

    def _key(self, block: Block, part: CutPart, shape: Shape) -> tuple:
        tokens = shape.chunk_tokens(part.index) if part.name == "chunk" else None
        return (tokens, block.shape, block.dtype, block.num_bytes)

    def _learn(self, blocks: list[Block], part: CutPart, values: list[dict[str, int]]) -> None:
        key = self._key(blocks[0], part, self.shapes[0])
        if len({(b.op, b.dtype, len(b.shape)) for b in blocks}) > 1:
            raise NotRegular(f"an op of {part.name} {part.index} depends on the shape: {blocks}")
        known = self._known.get(key)
        if known is None:
            in_chunk = part.name == "chunk"
            dims = tuple(fit([b.shape[d] for b in blocks], values, in_chunk) for d in range(len(blocks[0].shape)))
            size = None
            if any(b.num_bytes != math.prod(b.shape) * WIDTHS[b.dtype] for b in blocks):
                size = fit([b.num_bytes for b in blocks], values, in_chunk)
            known = self._known[key] = (dims, size)
        for block, at in zip(blocks, values, strict=True):
            if tuple(evaluate(d, at) for d in known[0]) != block.shape:
                raise NotRegular(f"two sizes look alike at {self.shapes[0]}: {block}")

    def knows(self, block: Block, part: CutPart) -> bool:
        return self.constant or self._key(block, part, self.shapes[0]) in self._known

    def template(self, block: Block, part: CutPart, owner: str, what: str) -> Template:
        """The template of a block of a run at the first shape."""
        if self.constant:
            return self._as_it_is(block, part, owner, what)
        known = self._known.get(self._key(block, part, self.shapes[0]))
        if known is None:
            raise NotRegular(f"a size of {part.name} {part.index} was not seen at other shapes: {block}")
        return Template(owner, what, known[0], block.dtype, known[1])

    def _as_it_is(self, block: Block, part: CutPart, owner: str, what: str) -> Template:
        shape = self.shapes[0]
        counted = part.name == "start" and block.shape == (shape.num_targets,)
        dims = (((1, "K"),),) if counted else tuple(((d, ""),) for d in block.shape)
        plain = math.prod(block.shape) * WIDTHS[block.dtype]
        return Template(owner, what, dims, block.dtype, None if plain == block.num_bytes else ((block.num_bytes, ""),))


def fit(found: list[int], values: list[dict[str, int]], in_chunk: bool) -> tuple[Term, ...]:
    """The expression with these values: a constant, a multiple of a product of symbols, or the sum of two of them.

    Raises:
        NotRegular: there is none.
    """
    if len(set(found)) == 1:
        return ((found[0], ""),)
    products = [p for p in _PRODUCTS if in_chunk or "X" not in p]
    at = {p: [evaluate(((1, p),), v) for v in values] for p in products}
    for product in products:
        factor, rest = divmod(found[0], at[product][0])
        if rest == 0 and all(f == factor * a for f, a in zip(found, at[product], strict=True)):
            return ((factor, product),)
    at[""] = [1] * len(values)
    for i, first in enumerate(products):
        for second in ["", *products[:i]]:
            pair = _solve(found, at[first], at[second])
            if pair is not None:
                return tuple((factor, name) for factor, name in zip(pair, (first, second), strict=True) if factor)
    raise NotRegular(f"no expression gives {found}")


def _solve(found: list[int], a: list[int], b: list[int]) -> tuple[int, int] | None:
    """Integers x, y with found = x a + y b at every shape."""
    determinant = a[0] * b[1] - a[1] * b[0]
    if determinant == 0:
        return None
    x, rest_x = divmod(found[0] * b[1] - found[1] * b[0], determinant)
    y, rest_y = divmod(a[0] * found[1] - a[1] * found[0], determinant)
    if rest_x or rest_y or max(abs(x), abs(y)) > _LARGEST_FACTOR:
        return None
    return (x, y) if all(f == x * p + y * q for f, p, q in zip(found, a, b, strict=True)) else None
