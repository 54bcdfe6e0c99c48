"""The highest moment of each part, from events written by hand."""

from __future__ import annotations

from fitune.memory.events import Event
from fitune.memory.moments import Moment, highest, moments_of


def event(block: int, num_bytes: int, owner: str = "temporary", part: str = "forward", layer: int = 0, label: str = ""):
    return Event(block, num_bytes, owner, label or f"block {block}", part, layer)


STEP = [
    event(0, 100, "weights", "load", -1),
    event(1, 10, "saved"),
    event(2, 50),
    event(2, -50),
    event(3, 20),
    event(3, -20, part="tail", layer=-1),
    event(4, 30, "logits", "tail", -1),
    event(4, -30, "logits", "tail", -1),
    event(1, -10, "saved", "backward"),
    event(5, 5, "gradients", "backward"),
]


def test_each_part_has_its_highest_moment():
    found = moments_of(STEP)
    assert [(m.part, m.layer) for m in found] == [("load", -1), ("forward", 0), ("tail", -1), ("backward", 0)]
    assert [m.num_bytes for m in found] == [100, 160, 140, 110]
    assert found[1].owners == {"weights": 100, "saved": 10, "temporary": 50}
    assert found[2].owners == {"weights": 100, "saved": 10, "logits": 30}


def test_a_part_that_only_frees_is_as_high_as_it_began():
    """The moment before its first death counts: a peak must not get lost between two parts."""
    assert moments_of(STEP)[3].owners == {"weights": 100, "saved": 10}


def test_largest_blocks_are_the_parts_own_and_alive_at_its_peak():
    forward = moments_of(STEP, num_largest=2)[1]
    assert [(b.label, b.num_bytes) for b in forward.largest] == [("block 2", 50), ("block 1", 10)]


def test_blocks_are_rounded_up_to_the_granule():
    assert moments_of(STEP[:2], granule=512)[1].owners == {"weights": 512, "saved": 512}


def test_masters_are_told_from_weights():
    events = [event(0, 8, "weights", "load", -1, "model.norm.weight"),
              event(1, 16, "weights", "load", -1, "fp32 master of model.norm.weight")]  # fmt: skip
    assert moments_of(events)[0].owners == {"weights": 8, "masters": 16}


def test_places_are_words():
    assert highest(moments_of(STEP)).place == "the forward pass of layer 0"
    assert Moment("backward", -1, {}).place == "the embedding's backward pass"
    assert Moment("tail", -1, {}).place == "the loss"
