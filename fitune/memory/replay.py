"""From the traced terms of each kind of layer to the peaks of a whole step, in plain Python.

The step's memory is additive: what is alive when a part starts, plus that part's own peak, minus what it frees. A
trace of a few layers gives the terms; any number of layers and any activation policy is then a sum. Leaves out: the
allocator's rounding to segments and its fragmentation (reserved memory).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part of the step: `peak_bytes` above what was alive at its start, `delta_bytes` alive after it minus before."""

    peak_bytes: int
    delta_bytes: int


@dataclass(frozen=True)
class LayerParts:
    """A layer's parts of one forward and backward pass. `recompute` and `keep` are (forward, backward) under the two
    activation policies; `stash` is the room for a recomputed layer's input, made before the first layer runs."""

    stash: Part
    recompute: tuple[Part, Part]
    keep: tuple[Part, Part]


@dataclass(frozen=True)
class PassParts:
    """All parts of one forward and backward pass. The decoder's first layer stands for itself: its input is the
    embedding's output, which may need no gradient; of the others one of each kind stands for all."""

    embed: Part
    first: LayerParts
    kinds: dict[str, LayerParts]
    tail_after_recompute: Part  # the loss tail after a recomputed last layer, and after a kept one
    tail_after_keep: Part
    embed_backward: Part

    def layer(self, index: int, kind: str) -> LayerParts:
        return self.first if index == 0 else self.kinds[kind]


@dataclass(frozen=True)
class LayerTerms:
    """What one kind of layer holds, and its forward pass in evaluation."""

    weight_bytes: int  # frozen and trained weights on the device
    trained_bytes: int  # trained parameters' masters, as allocated (also the size of their gradients)
    state_bytes: int  # optimizer state
    eval_forward: Part


@dataclass(frozen=True)
class StepTerms:
    """Terms of a whole model at one micro-batch shape."""

    kinds: tuple[str, ...]  # kind of every decoder layer, in order
    layers: dict[str, LayerTerms]
    other_weight_bytes: int
    other_trained_bytes: int
    other_state_bytes: int
    first_pass: PassParts
    later_pass: PassParts  # of a step's second and further micro-batches: gradients are there and are added to
    optimizer_peak_bytes: int
    eval_embed: Part
    eval_tail: Part
    largest_weight_bytes: int  # the widest unpacked tensor that is on the device while weights load

    @property
    def weight_bytes(self) -> int:
        """Of the whole model: frozen and trained weights on the device, with the latter's masters."""
        return self.other_weight_bytes + sum(self.layers[kind].weight_bytes for kind in self.kinds)

    @property
    def trained_bytes(self) -> int:
        """fp32 bytes of all that is trained, which its gradients take too."""
        return self.other_trained_bytes + sum(self.layers[kind].trained_bytes for kind in self.kinds)

    @property
    def state_bytes(self) -> int:
        """The whole optimizer's state."""
        return self.other_state_bytes + sum(self.layers[kind].state_bytes for kind in self.kinds)


@dataclass(frozen=True)
class Peaks:
    """Peak bytes of tensors per phase, and where the steady step's peak is."""

    load: int
    first_step: int
    step: int
    eval: int
    save: int
    where: str


def peaks(terms: StepTerms, recompute_layers: int, accumulates: bool = False) -> Peaks:
    """Peaks for a policy: the first `recompute_layers` layers recompute, the others keep their activations.

    `accumulates`: a step has several micro-batches, so that all gradients are there while the later ones run.
    """
    weights, state, gradients = terms.weight_bytes, terms.state_bytes, terms.trained_bytes
    dynamic, where = _walk(terms, terms.first_pass, recompute_layers, 0)
    if accumulates:
        later, later_where = _walk(terms, terms.later_pass, recompute_layers, gradients)
        if later > dynamic:
            dynamic, where = later, later_where
    update = gradients + terms.optimizer_peak_bytes
    live, evaluation = terms.eval_embed.delta_bytes, terms.eval_embed.peak_bytes
    for kind in terms.kinds:
        forward = terms.layers[kind].eval_forward
        evaluation = max(evaluation, live + forward.peak_bytes)
        live += forward.delta_bytes
    evaluation = max(evaluation, live + terms.eval_tail.peak_bytes)
    return Peaks(
        load=weights + terms.largest_weight_bytes,
        first_step=weights + max(dynamic, update + state),
        step=weights + state + max(dynamic, update),
        eval=weights + state + evaluation,
        save=weights + state,
        where=where if dynamic >= update else "optimizer",
    )


def _walk(terms: StepTerms, parts: PassParts, recompute_layers: int, live: int) -> tuple[int, str]:
    """(peak of one forward and backward pass, where it is) above weights and optimizer state, from `live` bytes on."""
    highest, where = live, "embed"
    count = len(terms.kinds)

    def run(name: str, part: Part) -> None:
        nonlocal live, highest, where
        if live + part.peak_bytes > highest:
            highest, where = live + part.peak_bytes, name
        live += part.delta_bytes

    def policy(index: int) -> tuple[Part, Part]:
        layer = parts.layer(index, terms.kinds[index])
        return layer.recompute if index < recompute_layers else layer.keep

    run("embed", parts.embed)
    for index in range(recompute_layers):
        run(f"room for the input of layer {index}", parts.layer(index, terms.kinds[index]).stash)
    for index in range(count):
        run(f"forward of layer {index}", policy(index)[0])
    run("loss tail", parts.tail_after_keep if recompute_layers < count else parts.tail_after_recompute)
    for index in reversed(range(count)):
        run(f"backward of layer {index}", policy(index)[1])
        if index == recompute_layers and index > 0:
            # the first kept layer's input is no other layer's output that is kept: it goes with its layer
            live -= parts.layer(index - 1, terms.kinds[index - 1]).stash.delta_bytes
    run("embedding's backward", parts.embed_backward)
    return highest, where
