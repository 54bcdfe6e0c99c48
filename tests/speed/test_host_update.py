"""Time of full fine-tuning with masters in host memory: what is copied, what the CPU does, and what waits for it."""

from __future__ import annotations

import pytest

from fitune import speed
from fitune.engine import optimizers, streamed_update
from fitune.speed import host_update
from fitune.speed.work import step_work
from tests.speed.case import decoder, plan

FULL = dict(method="full", base_format="bf16", adapter=None, embedding_place="device", optimizer_place="host")
STREAM = dict(stream_from="pinned", resident_layers=0, offload_inputs=True)
PARAMS = decoder().params
LAYERS = sum(layer.params for layer in decoder().layers)


def work(**changes):
    return step_work(plan(**(FULL | STREAM | changes)), decoder())


def by(made, name):
    return [segment for segment in made.segments if segment.name == name]


def test_gradients_leave_once_for_each_group():
    """16 bits of one micro-batch; fp32 of several that pass together."""
    (one,) = by(work(), "gradients leave")
    (together,) = by(work(micro_batch=1, accumulation_order="layer-major"), "gradients leave")
    (apart,) = by(work(micro_batch=1), "gradients leave")
    assert [s.link_out_bytes / PARAMS for s in (one, together, apart)] == [2, 4, 2 * 4]
    assert one.phase == "backward" and apart.cpu_s > 2 * together.cpu_s > 0


def test_the_update_runs_before_the_next_forward_pass_or_beside_the_backward_pass():
    """And that of the ends by itself."""
    for clip, phase in ((1.0, "forward"), (0.0, "backward")):
        layers, ends = by(work(clip=clip), "adamw")
        assert (layers.phase, ends.phase) == (phase, "optimizer")
        assert layers.cpu_s / ends.cpu_s == pytest.approx(LAYERS / (PARAMS - LAYERS))
    assert by(work(loss_scaling=True, precision="fp16", base_format="fp16", clip=0.0), "adamw")[0].phase == "forward"


def test_an_update_on_the_card_copies_masters_and_state_both_ways():
    layers, ends = by(work(optimizer_place="streamed", optimizer="adamw8bit"), "adamw8bit")
    come, go = (getattr(layers, way) + getattr(ends, way) for way in ("link_in_bytes", "link_out_bytes"))
    assert come / PARAMS == pytest.approx(4 + 2 + 2 + 8 / 256)
    assert go / PARAMS == pytest.approx(4 + 2 + 8 / 256 + 2 * LAYERS / PARAMS)
    assert layers.cpu_s == 0 and layers.memory_bytes > 0


def test_8_bit_state_is_slow_on_the_cpu_and_fast_on_the_card():
    """8 billion elements at 100 million a second: over a minute; on the card both ways of the link."""
    seconds = {
        (optimizer, place): speed.predict(
            plan(**(FULL | STREAM | dict(optimizer=optimizer, optimizer_place=place))), decoder()
        ).step_s
        for optimizer in ("adamw", "adamw8bit") for place in ("host", "streamed")
    }  # fmt: skip
    assert seconds["adamw8bit", "host"] > 75 > 30 > seconds["adamw", "host"]
    assert seconds["adamw8bit", "streamed"] < seconds["adamw", "streamed"] < seconds["adamw", "host"]


def test_more_tokens_hide_it():
    """Of a long step the update takes the ends' part alone, and what the forward pass is too short for."""
    few, many = (speed.predict(plan(batch, **(FULL | STREAM | dict(micro_batch=1, accumulation_order="layer-major"))),
                               decoder()) for batch in (4, 64))  # fmt: skip
    resident = speed.predict(plan(64, **(FULL | dict(optimizer_place="device", micro_batch=1))), decoder())
    assert few.bound == "link" and many.tokens_per_s > 2 * few.tokens_per_s
    assert many.tokens_per_s > 0.6 * resident.tokens_per_s


def test_constants_are_the_engines():
    assert host_update._PIECE_ELEMENTS == streamed_update.PIECE_ELEMENTS
    assert 2 * 4 / optimizers._BNB_BLOCK == 8 / 256


def test_other_updates_are_none_of_these():
    for other in (plan(), plan(**FULL, device="cpu")):
        assert not any(segment.cpu_s for segment in step_work(other, decoder()).segments)
