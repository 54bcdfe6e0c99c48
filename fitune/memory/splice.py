"""A script's parts put together to a whole step, event after event.

Keys of a script's segments: "start" (one micro-batch's tensors, then the running loss); else "PASS|PART|..." with PASS
0 for a step's first micro-batch, 1 for later ones, e for evaluation: "embed"; "stash|LAYER"; "forward|LAYER|POLICY";
"backward|LAYER|POLICY" with "|enters" for the first of the layers that keep their activations; "tail|POLICY" and
"chunk|POLICY|PLACE", POLICY being the last layer's and PLACE F (first), M, L (last) or FL; "backward|embed". LAYER is
"first" for layer 0 and the layer's kind for all others; POLICY r (recompute) or k (keep). Plain Python.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fitune.memory.events import Event
from fitune.memory.script import Held, Script, Segment, Trained, symbols

Shape = tuple[int, int, int]
GRADIENT = "gradient of "
_PIECE_ELEMENTS = 65_536


@dataclass(slots=True)
class _Made:
    """Blocks that one part made: in order of birth, and those it hands on."""

    blocks: list[int]
    handed: list[int]
    next_chunk: list[int]


class Splicer:
    """Puts parts one after another. `events` grows; `parts` are (pass, part, layer) to the range of its events."""

    def __init__(self, script: Script, shape: Shape):
        self.script, self.shape = script, shape
        num_rows, num_columns, chunk = shape
        self.num_targets = num_rows * (num_columns - 1)
        self.num_chunks = max(1, -(-self.num_targets // chunk))
        last = self.num_targets - (self.num_chunks - 1) * chunk
        self._values = {x: symbols(*shape, x) for x in {chunk, last}}
        self._templates: dict[int, list[tuple[int, str, str]]] = {}
        self.chunk_tokens = [chunk] * (self.num_chunks - 1) + [last]
        self.events: list[Event] = []
        self.parts: dict[tuple[str, str, int], tuple[int, int]] = {}
        self.templates: list[tuple[int, int | None]] = []  # per block of a part: its template, tokens of its loss chunk
        self._size: list[tuple[int, str, str]] = []  # per block: bytes, owner, label
        self._made: dict[tuple[str, int], _Made] = {}
        self._before_forward: dict[int, _Made] = {}
        self._latest = _Made([], [], [])
        self.gradients: dict[tuple[int, str], int] = {}

    def _resolved(self, tokens: int) -> list[tuple[int, str, str]]:
        if tokens not in self._templates:
            values = self._values[tokens]
            made = [(t.bytes_at(values), t.owner, t.label_at(values)) for t in self.script.templates]
            self._templates[tokens] = made
        return self._templates[tokens]

    def birth(self, num_bytes: int, owner: str, label: str, part: str, layer: int) -> int:
        block = len(self._size)
        self._size.append((num_bytes, owner, label))
        self.events.append(Event(block, num_bytes, owner, label, part, layer))
        return block

    def death(self, block: int, part: str, layer: int) -> None:
        num_bytes, owner, label = self._size[block]
        self.events.append(Event(block, -num_bytes, owner, label, part, layer))

    def load(self, held: Held, layer: int) -> None:
        for tensor in held.tensors:
            self.birth(tensor.num_bytes, tensor.owner, named(tensor.label, layer), "load", layer)

    def part(self, run: str, name: str, index: int, key: str, tokens: int | None = None) -> None:
        """One part of pass `run`. `index`: layer, or loss chunk; `key`: of its segment."""
        in_layer = name != "chunk" and f"{name}|embed" not in key and name not in ("embed", "tail")
        layer = index if in_layer else -1
        made = _Made([], [], [])
        start = len(self.events)
        if name == "forward":
            self._before_forward[index] = self._latest
        self._play(self.script.segments[f"{run}|{key}"], made, name, index, layer, tokens)
        self._made[name, index] = made
        if in_layer and name != "stash":
            self._latest = made
        self.parts[run, name, index] = (start, len(self.events))

    def _play(self, segment: Segment, made: _Made, name: str, index: int, layer: int, tokens: int | None) -> None:
        resolved = self._resolved(self.shape[2] if tokens is None else tokens)
        shown = "tail" if name == "chunk" else name
        for source, number, group in segment:
            if source:
                self.death(self._find(source, number, made, index), shown, layer)
                continue
            num_bytes, owner, label = resolved[number]
            block = self.birth(num_bytes, owner, label, shown, layer)
            self.templates.append((number, tokens))
            made.blocks.append(block)
            if group == "c":
                made.handed.append(block)
            elif group == "n":
                made.next_chunk.append(block)
            elif group == "g":
                self.gradients[layer, self.script.templates[number].what.removeprefix(GRADIENT)] = block

    def _find(self, source: str, number: int, made: _Made, index: int) -> int:
        if source == ".":
            return made.blocks[number]
        if source == "<":
            return self._latest.handed[number]
        if source == "^":
            return self._before_forward[index].handed[number]
        if source == "~":
            return self._made["chunk", index - 1].next_chunk[number]
        if source[0] == "@":
            return self._made[source[1:], index].blocks[number]
        return self._made[source[1:], 0].blocks[number]

    def start(self, num_micro_batches: int) -> None:
        """The micro-batches' tensors and, in training, the running loss: the last of the segment."""
        at = len(self.events)
        made = _Made([], [], [])
        segment = self.script.segments["start"]
        for _ in range(num_micro_batches):
            self._play(segment[:-1], made, "start", 0, -1, None)
        self._made["start", 0] = made
        if num_micro_batches:
            self._play(segment[-1:], made, "start", 0, -1, None)
        self.parts["0", "start", 0] = (at, len(self.events))

    def forward_backward(self, run: str, kinds: tuple[str, ...], recompute: int) -> None:
        """One micro-batch through the model and back."""
        count = len(kinds)
        places = ["first", *kinds[1:]]
        policies = ["r" if i < recompute else "k" for i in range(count)]
        self.part(run, "embed", 0, "embed")
        for i in range(recompute):
            if f"{run}|stash|{places[i]}" in self.script.segments:  # saved inputs may wait in host memory
                self.part(run, "stash", i, f"stash|{places[i]}")
        for i in range(count):
            self.part(run, "forward", i, f"forward|{places[i]}|{policies[i]}")
        self._tail(run, policies[-1])
        for i in reversed(range(count)):
            enters = "|enters" if i == recompute and i > 0 else ""
            self.part(run, "backward", i, f"backward|{places[i]}|{policies[i]}{enters}")
        if f"{run}|backward|embed" in self.script.segments:
            self.part(run, "backward", -1, "backward|embed")

    def _tail(self, run: str, policy: str) -> None:
        start = len(self.events)
        self.part(run, "tail", 0, f"tail|{policy}")
        count = self.num_chunks
        for j, tokens in enumerate(self.chunk_tokens):
            place = "FL" if count == 1 else "F" if j == 0 else "L" if j == count - 1 else "M"
            if f"{run}|chunk|{policy}|{place}" in self.script.segments:  # else the tail is one part, at one shape
                self.part(run, "chunk", j, f"chunk|{policy}|{place}", tokens)
        self.parts[run, "tail", 0] = (start, len(self.events))
        self._latest = self._made["tail", 0]

    def evaluation(self, kinds: tuple[str, ...]) -> None:
        self.part("e", "embed", 0, "embed")
        for i, kind in enumerate(kinds):
            self.part("e", "forward", i, f"forward|{kind if i else 'first'}|k")
        self._tail("e", "k")
        end = self.script.segments["e|end"]
        self._play(end, _Made([], [], []), "end", 0, -1, None)

    def batch_blocks(self) -> list[int]:
        """Blocks of the micro-batches' tensors that go at the end of the step: not the running loss, nor what the
        model's context keeps of the last one."""
        blocks = self._made["start", 0].blocks[:-1]
        groups = [group for _, _, group in self.script.segments["start"][:-1]]
        last = len(blocks) - len(groups)
        found = []
        for start in range(last, -1, -len(groups)):  # a Python list lets go of its last element first
            batch = zip(blocks[start : start + len(groups)], groups, strict=True)
            found += [block for block, group in batch if group != "s" or start < last]
        return found

    def loss_block(self) -> int:
        return self._made["start", 0].blocks[-1]


def named(label: str, layer: int) -> str:
    """A label of a layer's template, with the layer's number."""
    return label.replace("{layer}", str(layer))


def step_events(
    script: Script, shape: Shape, *, recompute_layers: int, num_micro_batches: int, first_step: bool
) -> list[Event]:
    """See `Script.step_events`."""
    splicer = Splicer(script, shape)
    _load(splicer, with_state=not first_step)
    splicer.start(num_micro_batches)
    for number in range(num_micro_batches):
        splicer.forward_backward("1" if number else "0", script.kinds, recompute_layers)
    _update(splicer, first_step)
    return splicer.events


def eval_events(script: Script, shape: Shape) -> list[Event]:
    """See `Script.eval_events`."""
    splicer = Splicer(script, shape)
    _load(splicer, with_state=True)
    play_evaluation(splicer, script.kinds)
    return splicer.events


def play_evaluation(splicer: Splicer, kinds: tuple[str, ...]) -> None:
    """One micro-batch's evaluation."""
    made = _Made([], [], [])
    start = len(splicer.events)
    splicer._play(splicer.script.segments["e|start"], made, "start", 0, -1, None)
    splicer._made["start", 0] = made
    splicer.parts["e", "start", 0] = (start, len(splicer.events))
    splicer.evaluation(kinds)


def holders(script: Script) -> list[tuple[int, Held]]:
    """(layer, what it holds) of the whole model in its own order; -1 outside the layers."""
    layers = [(i, script.layers[kind]) for i, kind in enumerate(script.kinds)]
    return [(-1, script.before), *layers, (-1, script.after)]


def scratch_bytes(script: Script, loss_chunk: int) -> int | None:
    return None if script.scratch is None else max(script.scratch[0], loss_chunk * script.scratch[1])


def _load(splicer: Splicer, with_state: bool) -> None:
    script = splicer.script
    for layer, held in holders(script):
        splicer.load(held, layer)
    size = scratch_bytes(script, splicer.shape[2])
    if size is not None:
        splicer.birth(size, "workspace", "buffer for unpacked weights and fp32 logits", "load", -1)
    if with_state:
        _make_state(splicer, [(layer, trained) for layer, held in holders(script) for trained in held.trained], "load")


def _make_state(splicer: Splicer, trained: Iterable[tuple[int, Trained]], part: str) -> None:
    tables = splicer.script.shared_state
    for layer, tensor in trained:
        if tensor.coded:
            for table in tables:
                splicer.birth(table.num_bytes, table.owner, table.label, part, -1)
            tables = ()
        for state in tensor.state:
            splicer.birth(state.num_bytes, state.owner, named(state.label, layer), part, layer)


def _update(splicer: Splicer, first_step: bool) -> None:
    """From the sum of losses to the end of `Engine.step`: the norm, clipping, the optimizer, and what is let go."""
    script = splicer.script
    trained = [(layer, t) for layer, held in holders(script) for t in held.trained]
    gradients = [(layer, t, splicer.gradients.get((layer, t.name))) for layer, t in trained]
    present = [block for _, _, block in gradients if block is not None]

    def scalar(label: str, num_bytes: int = 4) -> int:
        return splicer.birth(num_bytes, "temporary", label, "optimizer", -1)

    def gone(block: int) -> None:
        splicer.death(block, "optimizer", -1)

    mean = scalar("mean loss")
    gone(splicer.loss_block())
    pieces = None
    if script.on_cuda:
        numels = [tensor.numel for _, tensor, block in gradients if block is not None]
        pieces = scalar("norms of gradients' pieces", num_bytes=4 * norm_pieces(numels))
    norms = [scalar("norm of a gradient") for _ in present]
    if pieces is not None:
        gone(pieces)
    together = scalar("norms of gradients", num_bytes=4 * len(present))
    norm = scalar("norm of all gradients")
    gone(together)
    for block in reversed(norms):
        gone(block)
    gone(scalar("loss and norm", num_bytes=8))
    if script.clips:
        _clip(scalar, gone)
    if first_step:
        _make_state(splicer, [(layer, tensor) for layer, tensor, block in gradients if block is not None], "optimizer")
    if script.update_bytes:
        gone(
            splicer.birth(
                script.update_bytes, "temporary", "the optimizer's copy of the largest tensor", "optimizer", -1
            )
        )
    for block in present:
        gone(block)
    for block in [*splicer.batch_blocks(), mean, norm]:
        gone(block)


def norm_pieces(numels: list[int]) -> int:
    """Partial sums of torch's `_foreach_norm` on CUDA: of every tensor as many as the largest one has pieces of 65,536
    elements (torch 2.11, ForeachReduceOp.cu and MultiTensorApply.cuh; held to records of an H200)."""
    return len(numels) * max((-(-numel // _PIECE_ELEMENTS) for numel in numels), default=0)


def _clip(scalar, gone) -> None:  # type: ignore[no-untyped-def]
    """`torch.nn.utils.clip_grads_with_norm_`: the factor is max_norm / (norm + 1e-6), at most one."""
    padded = scalar("norm and epsilon")
    inverse = scalar("its inverse")
    factor = scalar("clipping factor")
    gone(inverse)
    gone(padded)
    clamped = scalar("clipping factor, at most one")
    gone(factor)
    gone(clamped)
