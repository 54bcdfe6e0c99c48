"""Adding up the terms of layers: by hand, in plain Python."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from fitune.memory.replay import LayerParts, LayerTerms, Part, PassParts, StepTerms, peaks

NOTHING = Part(0, 0)
LAYER = LayerTerms(weight_bytes=1000, trained_bytes=10, state_bytes=20, eval_forward=Part(60, 0))
PARTS = LayerParts(
    stash=Part(5, 5),
    recompute=(Part(50, 0), Part(200, 5)),  # backward: the layer again, then +10 of gradients and -5 of its input
    keep=(Part(90, 80), Part(120, -70)),  # backward: -80 of activations, +10 of gradients
)
PASS = PassParts(
    embed=Part(7, 5), first=PARTS, kinds={"layer": PARTS}, tail_after_recompute=Part(300, 5),
    tail_after_keep=Part(300, 5), embed_backward=NOTHING,
)  # fmt: skip


def with_gradients_there(parts: PassParts, trained_bytes: dict[str, int], first_trained_bytes: int) -> PassParts:
    """The later micro-batches' pass of adapters, from the first one's: the same peaks, but new gradients are added to
    those that are there and freed, so that a layer's backward leaves `trained_bytes` less behind."""

    def without(layer: LayerParts, trained: int) -> LayerParts:
        def backward(part: Part) -> Part:
            return Part(part.peak_bytes, part.delta_bytes - trained)

        return LayerParts(
            layer.stash,
            (layer.recompute[0], backward(layer.recompute[1])),
            (layer.keep[0], backward(layer.keep[1])),
        )

    kinds = {kind: without(layer, trained_bytes[kind]) for kind, layer in parts.kinds.items()}
    return dataclasses.replace(parts, first=without(parts.first, first_trained_bytes), kinds=kinds)


def terms(num_layers=3, in_pass=None, kinds=None, layers=None, **changes):
    first_pass = dataclasses.replace(PASS, **(in_pass or {}))
    layers = layers or {"layer": LAYER}
    trained = {kind: layer.trained_bytes for kind, layer in layers.items()}
    values = dict(
        kinds=kinds or ("layer",) * num_layers, layers=layers, other_weight_bytes=500, other_trained_bytes=0,
        other_state_bytes=0, first_pass=first_pass, later_pass=with_gradients_there(first_pass, trained, 10),
        optimizer_peak_bytes=0, eval_embed=Part(7, 5), eval_tail=Part(250, 0), largest_weight_bytes=400,
    )  # fmt: skip
    return StepTerms(**(values | changes))


WEIGHTS, STATE = 500 + 3 * 1000, 3 * 20


def test_everything_recomputed():
    """5 (embedding) + 15 (inputs) are alive at the tail, whose 5 stay: the peak is the tail's, 320."""
    found = peaks(terms(), 3)
    assert found.step == WEIGHTS + STATE + 5 + 15 + 300
    assert found.where == "loss tail"
    assert found.save == WEIGHTS + STATE
    assert found.load == WEIGHTS + 400
    assert found.eval == WEIGHTS + STATE + 5 + 250


def test_nothing_recomputed():
    found = peaks(terms(), 0)
    assert found.step == WEIGHTS + STATE + 5 + 3 * 80 + 300


def test_a_backward_pass_may_be_the_highest():
    found = peaks(terms(in_pass={"tail_after_recompute": Part(50, 5)}), 3)
    # 25 after the tail, +5 for each of the layers 2 and 1 already done, then the first layer's 200
    assert (found.where, found.step) == ("backward of layer 0", WEIGHTS + STATE + 25 + 10 + 200)


def test_the_first_layers_recompute_and_the_last_are_kept():
    """Two stashed inputs and one kept layer are alive at the tail."""
    found = peaks(terms(), 2)
    assert found.step == WEIGHTS + STATE + 5 + 2 * 5 + 80 + 300


def test_the_tail_after_a_kept_layer():
    made = terms(in_pass={"tail_after_keep": Part(900, 5)})
    assert peaks(made, 2).step == WEIGHTS + STATE + 5 + 10 + 80 + 900
    assert peaks(made, 3).step == WEIGHTS + STATE + 5 + 15 + 300


def test_kinds_of_layers_are_told_apart():
    wide = dataclasses.replace(LAYER, weight_bytes=5000)
    wide_parts = dataclasses.replace(PARTS, keep=(Part(500, 400), Part(120, -390)))
    made = terms(
        in_pass={"kinds": {"layer": PARTS, "wide": wide_parts}},
        layers={"layer": LAYER, "wide": wide},
        kinds=("layer", "wide", "layer"),
    )
    found = peaks(made, 0)
    assert found.save == 500 + 2 * 1000 + 5000 + STATE
    assert found.step == found.save + 5 + 2 * 80 + 400 + 300
    assert peaks(made, 2).step == found.save + 5 + 10 + 80 + 300, "the wide one recomputes"


def test_gradients_of_earlier_micro_batches_are_there():
    once, several = peaks(terms(), 3), peaks(terms(), 3, accumulates=True)
    assert several.step - once.step == 3 * 10


@pytest.mark.parametrize("accumulates", [False, True])
def test_the_update(accumulates):
    """Gradients and the optimizer's own need."""
    made = terms(optimizer_peak_bytes=1000)
    found = peaks(made, 3, accumulates)
    assert (found.where, found.step) == ("optimizer", WEIGHTS + STATE + 3 * 10 + 1000)
    assert found.first_step == found.step, "state is made in the update"
    small = peaks(terms(), 3, accumulates)
    assert small.first_step == small.step - STATE


def test_no_torch_is_needed():
    """The planner adds up stored terms without loading torch."""
    code = "import sys, fitune.memory.replay; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_first_layer_stands_for_itself():
    first = dataclasses.replace(PARTS, keep=(Part(90, 50), Part(120, -40)))
    made = terms(in_pass={"first": first})
    assert peaks(made, 0).step == WEIGHTS + STATE + 5 + 50 + 2 * 80 + 300
