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
class LayerTerms:
    """One kind of layer. `recompute` and `keep` are (forward, backward) under the two activation policies; `stash` is
    the room for a recomputed layer's input, made before the first layer runs."""

    weight_bytes: int  # frozen and trained weights on the device
    trained_bytes: int  # trained parameters' masters, as allocated (also the size of their gradients)
    state_bytes: int  # optimizer state
    stash: Part
    recompute: tuple[Part, Part]
    keep: tuple[Part, Part]
    eval_forward: Part


@dataclass(frozen=True)
class StepTerms:
    """Terms of a whole model at one micro-batch shape."""

    kinds: tuple[str, ...]  # kind of every decoder layer, in order
    layers: dict[str, LayerTerms]
    other_weight_bytes: int
    other_trained_bytes: int
    other_state_bytes: int
    embed: Part
    tail_after_recompute: Part  # the loss tail after a recomputed last layer, and after a kept one
    tail_after_keep: Part
    embed_backward: Part
    optimizer_peak_bytes: int
    eval_embed: Part
    eval_tail: Part
    largest_weight_bytes: int  # the widest unpacked tensor that is on the device while weights load


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
    layers = [terms.layers[kind] for kind in terms.kinds]
    weights = terms.other_weight_bytes + sum(layer.weight_bytes for layer in layers)
    state = terms.other_state_bytes + sum(layer.state_bytes for layer in layers)
    dynamic, where, at_end = _walk(terms, layers, recompute_layers, gradients_there=False)
    if accumulates:
        later, later_where, at_end = _walk(terms, layers, recompute_layers, gradients_there=True)
        if later > dynamic:
            dynamic, where = later, later_where
    update = at_end + terms.optimizer_peak_bytes
    steady = max(dynamic, update)
    live, evaluation = terms.eval_embed.delta_bytes, terms.eval_embed.peak_bytes
    for layer in layers:
        evaluation = max(evaluation, live + layer.eval_forward.peak_bytes)
        live += layer.eval_forward.delta_bytes
    evaluation = max(evaluation, live + terms.eval_tail.peak_bytes)
    return Peaks(
        load=weights + terms.largest_weight_bytes,
        first_step=weights + max(dynamic, update + state),
        step=weights + state + steady,
        eval=weights + state + evaluation,
        save=weights + state,
        where=where if dynamic >= update else "optimizer",
    )


def _walk(
    terms: StepTerms, layers: list[LayerTerms], recompute_layers: int, *, gradients_there: bool
) -> tuple[int, str, int]:
    """(peak of forward and backward, where it is, alive at the end) above weights and optimizer state.

    With `gradients_there` new gradients are added to those of earlier micro-batches and freed, so that a backward pass
    leaves nothing behind.
    """
    live = terms.other_trained_bytes + sum(layer.trained_bytes for layer in layers) if gradients_there else 0
    highest, where = live, "embed"

    def part(name: str, terms_of_part: Part) -> None:
        nonlocal live, highest, where
        if live + terms_of_part.peak_bytes > highest:
            highest, where = live + terms_of_part.peak_bytes, name
        live += terms_of_part.delta_bytes

    def policy(index: int) -> tuple[Part, Part]:
        return layers[index].recompute if index < recompute_layers else layers[index].keep

    part("embed", terms.embed)
    for index in range(recompute_layers):
        part(f"room for the input of layer {index}", layers[index].stash)
    for index in range(len(layers)):
        part(f"forward of layer {index}", policy(index)[0])
    part("loss tail", terms.tail_after_keep if recompute_layers < len(layers) else terms.tail_after_recompute)
    for index in reversed(range(len(layers))):
        part(f"backward of layer {index}", policy(index)[1])
        live -= layers[index].trained_bytes if gradients_there else 0
    part("embedding's backward", terms.embed_backward)
    # gradients outside the layers appear in the tail and the embedding's backward, whose deltas count them once more
    return highest, where, live - (terms.other_trained_bytes if gradients_there else 0)
