"""A script's parts put together to a whole step, event after event.

Keys of a script's segments: "start" (one micro-batch's tensors, then the running loss); else "PASS|PART|..." with PASS
0 for a step's first micro-batch, 1 for later ones, e for evaluation: "embed"; "stash|LAYER"; "forward|LAYER|POLICY";
"backward|LAYER|POLICY" with "|enters" for the first of the layers that keep their activations; "tail|POLICY" and
"chunk|POLICY|PLACE", POLICY being the last layer's and PLACE F (first), M, L (last) or FL; "backward|embed". LAYER is
"first" for layer 0 and the layer's kind for all others; POLICY r (recompute) or k (keep). Where inputs of recomputed
layers wait in host memory there is no "stash", "forward|LAYER|r|second" is layer 1's and "backward|LAYER|r|turn" that
of the last recomputed layer, which makes the buffers for what comes back. "g|tail|POLICY" is the tail of micro-batches
that pass a head in host memory together, as one of all their rows. Where gradients leave for host memory
"PASS|leave|LAYER|POLICY" is the order in which those of a layer go, at the end of the backward pass of the next one.
Plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fitune.memory.events import Event
from fitune.memory.pieces import Held, Segment, Trained, symbols
from fitune.memory.update import make_state, play_update

if TYPE_CHECKING:
    from fitune.memory.script import Script

Shape = tuple[int, int, int]
GRADIENT = "gradient of "
SECOND, TURN = "|second", "|turn"
LEAVE = "leave"
GROUP = "g"


@dataclass(slots=True)
class _Made:
    """Blocks that one part made: in order of birth, and those it hands on."""

    blocks: list[int]
    handed: list[int]
    next_chunk: list[int]
    gradients: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Pass:
    """One micro-batch on its way through the model and back; `run` begins the keys of its segments."""

    run: str
    made: dict[tuple[str, int], _Made] = field(default_factory=dict)
    before_forward: dict[int, _Made] = field(default_factory=dict)
    latest: _Made = field(default_factory=lambda: _Made([], [], []))


class Splicer:
    """Puts parts one after another. `events` grows; `parts` are (pass, part, layer) to the range of its events.

    Args:
        most_chunks: loss chunks that are told of a micro-batch, four at least; the others repeat those in the middle,
            which leave behind what they met. None: all.
    """

    def __init__(self, script: Script, shape: Shape, most_chunks: int | None = None):
        self.script, self.shape = script, shape
        num_rows, num_columns, chunk = shape
        self.num_targets = num_rows * (num_columns - 1)
        self.num_chunks = max(1, -(-self.num_targets // chunk))
        last = self.num_targets - (self.num_chunks - 1) * chunk
        self._values = {x: symbols(*shape, x) for x in {chunk, last}}
        self._templates: dict[int, list[tuple[int, str, str]]] = {}
        if most_chunks is not None and all(_leaves_nothing(script, key) for key in script.segments if "chunk|" in key):
            self.num_chunks = min(self.num_chunks, max(4, most_chunks))
        self.chunk_tokens = [chunk] * (self.num_chunks - 1) + [last]
        self.events: list[Event] = []
        self.parts: dict[tuple[str, str, int], tuple[int, int]] = {}
        self.templates: list[tuple[int, int | None]] = []  # per block of a part: its template, tokens of its loss chunk
        self._size: list[tuple[int, str, str]] = []  # per block: bytes, owner, label
        self._start = _Made([], [], [])
        self._pass = _Pass("0")
        self.gradients: dict[tuple[int, str], int] = {}
        self._buffers: list[int] = []  # for inputs that come back from host memory
        self._leaving: list[int] = []  # a layer's gradients, on their way to host memory

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

    def part(self, name: str, index: int, key: str, tokens: int | None = None, segment: Segment | None = None) -> None:
        """One part of the running pass. `index`: layer, or loss chunk; `key`: of its segment, unless that is given."""
        here = self._pass
        in_layer = name != "chunk" and f"{name}|embed" not in key and name not in ("embed", "tail")
        made = _Made([], [], [])
        start = len(self.events)
        if name == "forward":
            here.before_forward[index] = here.latest
        segment = self.script.segments[f"{here.run}|{key}"] if segment is None else segment
        self._play(segment, made, name, index, index if in_layer else -1, tokens)
        if name == "backward" and in_layer and self.script.in_host:
            self._let_go("backward", index)
            order = self.script.segments["|".join([here.run, LEAVE, *key.split("|")[1:3]])]
            self._leaving = [made.gradients[number] for _, number, _ in order]
        here.made[name, index] = made
        if in_layer and name != "stash":
            here.latest = made
        self.parts[here.run, name, index] = (start, len(self.events))

    def _play(self, segment: Segment, made: _Made, name: str, index: int, layer: int, tokens: int | None) -> None:
        resolved = self._resolved(self.shape[2] if tokens is None else tokens)
        shown = "tail" if name == "chunk" else name
        for source, number, group in segment:
            if source == ">":
                self._let_go(shown, layer)
                continue
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
            elif group == "b":
                self._buffers.append(block)
            elif group == "g":
                made.gradients.append(block)
                self.gradients[layer, self.script.templates[number].what.removeprefix(GRADIENT)] = block
            if name == "backward" and index < 0 and number == table_gradient(self.script):
                scratch = embedding_scratch(self.script, self.shape[0] * self.shape[1])
                if scratch:
                    self.templates.append((number, tokens))  # no part of a script: `terms` adds it by itself
                    label = "sums of the embedding's gradient"
                    self.death(self.birth(scratch, "temporary", label, shown, layer), shown, layer)

    def _let_go(self, part: str, layer: int) -> None:
        """The gradients of the layer above have left."""
        for block in self._leaving:
            self.death(block, part, layer)
        self._leaving = []

    def _find(self, source: str, number: int, made: _Made, index: int) -> int:
        here = self._pass
        if source == ".":
            return made.blocks[number]
        if source == "<":
            return here.latest.handed[number]
        if source == "^":
            return here.before_forward[index].handed[number]
        if source == "<<":
            return here.made["forward", index - 2].handed[number]
        if source == "%":
            return self._buffers[number]
        if source == "~":
            return here.made["chunk", index - 1].next_chunk[number]
        if source == "#start":
            return self._start.blocks[number]
        return here.made[source[1:], index if source[0] == "@" else 0].blocks[number]

    def start(self, num_micro_batches: int) -> None:
        """The micro-batches' tensors and, in training, the running loss: the last of the segment."""
        at = len(self.events)
        self._start = _Made([], [], [])
        segment = self.script.segments["start"]
        for _ in range(num_micro_batches):
            self._play(segment[:-1], self._start, "start", 0, -1, None)
        if num_micro_batches:
            self._play(segment[-1:], self._start, "start", 0, -1, None)
        self.parts["0", "start", 0] = (at, len(self.events))

    def forward_backward(self, runs: Sequence[str], kinds: tuple[str, ...], recompute: int) -> None:
        """Micro-batches through the model and back, all of them through each part before the next."""
        passes = [_Pass(run) for run in runs]
        segments = self.script.segments
        count = len(kinds)
        places = ["first", *kinds[1:]]
        policies = ["r" if i < recompute else "k" for i in range(count)]
        trains_embedding = f"{runs[0]}|backward|embed" in segments
        offloads = recompute > 0 and f"{runs[0]}|stash|first" not in segments
        self._buffers = []
        self._each(passes, "embed", 0, "embed")
        for i in range(recompute):
            if f"{runs[0]}|stash|{places[i]}" in segments:  # saved inputs may wait in host memory
                self._each(passes, "stash", i, f"stash|{places[i]}")
        for i in range(count):
            second = SECOND if offloads and i == 1 and recompute > 1 else ""
            leaving = offloads and i < recompute
            self._each(passes, "forward", i, f"forward|{places[i]}|{policies[i]}{second}", leaving=leaving)
        self._tails(passes, policies[-1])
        for i in reversed(range(count)):
            enters = "|enters" if i == recompute and i > 0 else TURN if offloads and i == recompute - 1 else ""
            is_last = i == 0 and not trains_embedding
            self._each(passes, "backward", i, f"backward|{places[i]}|{policies[i]}{enters}", is_last)
        if trains_embedding:
            self._each(passes, "backward", -1, "backward|embed", True)

    def _each(
        self, passes: list[_Pass], name: str, index: int, key: str, is_last: bool = False, leaving: bool = False
    ) -> None:
        """A part of every pass. In the last part of all, what passes hold until the end goes once all are through: the
        engine's list of them lets go of its last but one element first, and of the one it looked at last in the end.

        Args:
            leaving: the part sends its input to host memory; the one that was sent before it goes.
        """
        ends = 0
        for number, each in enumerate(passes):
            self._pass = each
            part_key = key.removesuffix(TURN) if number else key
            segment = self.script.segments[f"{each.run}|{part_key}"]
            if len(passes) > 1:
                ends = _held_until_the_end(segment) if is_last else 0
                segment = segment[: len(segment) - ends]
                if leaving or part_key.endswith(TURN):
                    segment = self._without_leaving(segment, passes, number, name, index)
            self.part(name, index, key, segment=segment)
        if not ends:
            return
        for block in reversed(self._buffers):
            self.death(block, name, index)
        for source in ("#embed", "#tail"):
            for each in [*reversed(passes[:-1]), passes[-1]] if source == "#embed" else passes[:1]:
                self._pass = each
                ops = self.script.segments[f"{each.run}|{key.removesuffix(TURN)}"][-ends:]
                self._play(tuple(op for op in ops if op[0] == source), _Made([], [], []), name, index, index, None)

    def _without_leaving(self, segment: Segment, passes: list[_Pass], number: int, name: str, index: int) -> Segment:
        """A segment that begins with the end of a layer's input that has been sent to host memory, and the rest of it:
        where micro-batches pass together it is the input that was sent last, of the micro-batch before this one."""
        rest = next(i for i, op in enumerate(segment) if not op[0])
        if index > 0 or number > 0 or name == "backward":
            sender = passes[number - 1]
            layer = index if name == "backward" or number else index - 1
            made = sender.made["forward", layer - 1].handed if layer > 0 else [self._embedded(sender)]
            assert len(made) == 1, "a layer hands on its output alone"
            self.death(made[0], name, index)
        if name == "backward":
            births = [op for op in segment if op[2] == "b"]
            if len(births) == 1:  # of one layer's inputs, of several micro-batches: two, as ever
                self._play(tuple(births), _Made([], [], []), name, index, index, None)
        return segment[rest:]

    def _embedded(self, each: _Pass) -> int:
        """The embedding's output: what layer 1's forward pass, or the only layer's turn, lets go of."""
        keys = [key for key in self.script.segments if key.startswith(f"{each.run}|forward|") and key.endswith(SECOND)]
        source, number, _ = self.script.segments[keys[0]][0]
        assert source == "#embed"
        return each.made["embed", 0].blocks[number]

    def _group_tail(self, passes: list[_Pass], policy: str) -> None:
        """The losses of micro-batches that pass a head in host memory together: each has its own hidden states and its
        own gradient of them, all else is there once."""
        assert self.script.group == len(passes), f"traced for {self.script.group} micro-batches, not {len(passes)}"
        start, shared = len(self.events), _Made([], [], [])
        handed: list[list[int]] = [[] for _ in passes]
        resolved = self._resolved(self.shape[2])
        for op in self.script.segments[f"{GROUP}|tail|{policy}"]:
            if op[0] == "<":
                for each in passes:
                    self.death(each.latest.handed[op[1]], "tail", -1)
            elif op[2] == "c":
                num_bytes, owner, label = resolved[op[1]]
                for own in handed:
                    own.append(self.birth(num_bytes // len(passes), owner, label, "tail", -1))
                    self.templates.append((op[1], None))
                shared.blocks.append(handed[0][-1])
            else:
                self._play((op,), shared, "tail", 0, -1, None)
        for each, own in zip(passes, handed, strict=True):
            each.made["tail", 0] = each.latest = _Made(shared.blocks, own, [])
        self.parts[passes[0].run, "tail", 0] = (start, len(self.events))

    def _tails(self, passes: list[_Pass], policy: str) -> None:
        if len(passes) > 1 and f"{GROUP}|tail|{policy}" in self.script.segments:
            self._group_tail(passes, policy)
            return
        for number, each in enumerate(passes):
            self._pass = each
            self._tail(policy, passes[number - 1] if number else None, number == len(passes) - 1)

    def _tail(self, policy: str, before: _Pass | None = None, is_last: bool = True) -> None:
        """The loss of a micro-batch. Where several pass together, they add to one sum, which the first of them makes,
        and a micro-batch's own sum goes when the next one's is there."""
        here, start = self._pass, len(self.events)
        segment = self.script.segments[f"{here.run}|tail|{policy}"]
        if before is None:
            self.part("tail", 0, f"tail|{policy}")
        else:
            made = _Made(before.made["tail", 0].blocks[:1], [], [])
            at = next(i for i, op in enumerate(segment) if not op[0])
            self._play(segment[:at] + segment[at + 1 :], made, "tail", 0, -1, None)
            here.made["tail", 0] = made
        count = self.num_chunks
        for j, tokens in enumerate(self.chunk_tokens):
            place = "FL" if count == 1 else "F" if j == 0 else "L" if j == count - 1 else "M"
            key = f"chunk|{policy}|{place}"
            if f"{here.run}|{key}" not in self.script.segments:
                continue  # the tail is one part, at one shape
            chunk = self.script.segments[f"{here.run}|{key}"]
            if "L" in place and not (before is None and is_last):
                self._last_chunk(chunk, j, tokens, before, is_last)
            else:
                self.part("chunk", j, key, tokens)
        self.parts[here.run, "tail", 0] = (start, len(self.events))
        here.latest = here.made["tail", 0]

    def _last_chunk(self, segment: Segment, index: int, tokens: int, before: _Pass | None, is_last: bool) -> None:
        """The end of a tail that is not the only one: see `_tail`."""
        at = segment.index(("#tail", 1, ""))
        first = at - 1 if segment[at - 1][0] in ("<", "^") else at
        made = _Made([], [], [])
        self._play(segment[:first], made, "chunk", index, -1, tokens)
        if before is not None:
            self.death(before.made["tail", 0].blocks[1], "tail", -1)
        rest = segment[first:] if is_last else segment[first:at] + segment[at + 1 :]
        self._play(rest, made, "chunk", index, -1, tokens)
        self._pass.made["chunk", index] = made

    def evaluation(self, kinds: tuple[str, ...]) -> None:
        self._pass = _Pass("e")
        self.part("embed", 0, "embed")
        for i, kind in enumerate(kinds):
            self.part("forward", i, f"forward|{kind if i else 'first'}|k")
        self._tail("k")
        end = self.script.segments["e|end"]
        self._play(end, _Made([], [], []), "end", 0, -1, None)

    def batch_blocks(self) -> list[int]:
        """Blocks of the micro-batches' tensors that go at the end of the step: not the running loss, nor what the
        model's context keeps of the last one."""
        blocks = self._start.blocks[:-1]
        groups = [group for _, _, group in self.script.segments["start"][:-1]]
        groups = groups[len(groups) - len(groups) // (self.script.group if self.script.whole else 1) :]
        last = len(blocks) - len(groups)
        found = []
        for start in range(last, -1, -len(groups)):  # a Python list lets go of its last element first
            batch = zip(blocks[start : start + len(groups)], groups, strict=True)
            found += [block for block, group in batch if group != "s" or start < last]
        return found

    def loss_block(self) -> int:
        return self._start.blocks[-1]


def _leaves_nothing(script: Script, key: str) -> bool:
    """Whether a loss chunk in the middle lets go of as much as it makes, whatever the shape."""
    if not key.endswith("|M"):
        return True
    segment = script.segments[key]
    births = [op for op in segment if not op[0]]
    handed = [op[1] for op in births if op[2] == "n"]
    left: dict[int, int] = {}
    for source, number, _ in segment:
        template = {"": number, ".": births[number][1] if source == "." else -1}.get(source)
        if source == "~":
            template = handed[number]
        if template is None or template < 0:
            return False
        left[template] = left.get(template, 0) + (1 if source == "" else -1)
    return not any(left.values())


# The gradient of an embedding on CUDA for more tokens than this (torch 2.11, EmbeddingBackwardKernel.cu): they are
# sorted and summed up in fp32 in pieces of ten of one row of the table, with room for any number of pieces, beside a
# few numbers per token: 49 bytes of them in two records of an H200 (18,653,696 bytes at 4,096 tokens and 1,024
# wide, 55,558,656 at 3,072 wide, benchmarks/results/h200-matrix-2026-11-30.json).
_SORTED_FROM = 3072
_PIECE_TOKENS, _BYTES_PER_TOKEN = 10, 49


def table_gradient(script: Script) -> int | None:
    """The template of the gradient of the embedding's table, the first of its size in the last part."""
    key = ("table",)
    if key not in script._cache:
        births = [op[1] for op in script.segments.get("0|backward|embed", ()) if not op[0]]
        tables = [n for n in births if all(not name for dim in script.templates[n].dims for _, name in dim)]
        script._cache[key] = next((n for n in tables if len(script.templates[n].dims) == 2), None)
    return script._cache[key]


def embedding_scratch(script: Script, num_tokens: int) -> int:
    """Bytes that the gradient of a trained embedding needs inside its kernel."""
    table = table_gradient(script)
    if table is None or not script.on_cuda or num_tokens <= _SORTED_FROM:
        return 0
    vocab, width = (sum(factor for factor, _ in dim) for dim in script.templates[table].dims)
    rows = num_tokens // _PIECE_TOKENS + min(num_tokens, vocab)
    return rows * width * 4 + num_tokens * _BYTES_PER_TOKEN


def _held_until_the_end(segment: Segment) -> int:
    """How many ops at the end of a pass's last part let go of what its first parts and its tail made."""
    return next(i for i, op in enumerate(reversed(segment)) if op[0] not in ("#embed", "#tail", "%"))


def named(label: str, layer: int) -> str:
    """A label of a layer's template, with the layer's number."""
    return label.replace("{layer}", str(layer))


def step_events(
    script: Script, shape: Shape, *, recompute_layers: int, num_micro_batches: int, first_step: bool,
    most_chunks: int | None,
) -> list[Event]:  # fmt: skip
    """See `Script.step_events`."""
    splicer = Splicer(script, shape, most_chunks)
    _load(splicer, with_state=not first_step)
    splicer.start(num_micro_batches)
    runs = ["1" if number else "0" for number in range(num_micro_batches)]
    together = script.together
    for at in range(0, num_micro_batches, together):
        splicer.forward_backward(runs[at : at + together], script.kinds, recompute_layers)
    play_update(splicer, first_step, _trained(script))
    return splicer.events


def eval_events(script: Script, shape: Shape, most_chunks: int | None) -> list[Event]:
    """See `Script.eval_events`."""
    splicer = Splicer(script, shape, most_chunks)
    _load(splicer, with_state=True)
    play_evaluation(splicer, script.kinds)
    return splicer.events


def play_evaluation(splicer: Splicer, kinds: tuple[str, ...]) -> None:
    """One micro-batch's evaluation."""
    made = _Made([], [], [])
    start = len(splicer.events)
    splicer._play(splicer.script.segments["e|start"], made, "start", 0, -1, None)
    splicer._start = made
    splicer.parts["e", "start", 0] = (start, len(splicer.events))
    splicer.evaluation(kinds)


def holders(script: Script) -> list[tuple[int, Held]]:
    """(layer, what it holds) of the whole model in its own order; -1 outside the layers."""
    layers = [(i, script.held_by(i)) for i in range(len(script.kinds))]
    return [(-1, script.before), *layers, (-1, script.after), (-1, script.ring)]


def _trained(script: Script) -> list[tuple[int, Trained]]:
    return [(layer, trained) for layer, held in holders(script) for trained in held.trained]


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
        make_state(splicer, _trained(script), "load")
