"""Steps that several GPUs share: what passes between them, what hides it, and the pace of cards that are not alike."""

from __future__ import annotations

from typing import Any

import pytest

from fitune import speed
from fitune.speed import links, together
from fitune.speed.links import Links
from fitune.speed.together import EXCHANGE
from tests.speed.case import LLAMA, decoder, plan

BIG = "meta-llama/Llama-3.3-70B-Instruct"
FOUR = ("GeForce RTX 3090",) * 4
SLOW = Links(1e9, 20e9, "PCIe", "")


def step(way: str, ranks: int, card: str = "rtx3090", model: str = LLAMA, **changes: Any) -> speed.StepTime:
    """8 records of 2,048 tokens shared by `ranks`."""
    records = 8 if way in ("none", "tp", "pp", "cp") else 8 // ranks
    placed = {"streamed": "pinned", "fsdp2": "shards"}
    values: dict[str, Any] = dict(device_name=card, micro_batch=1, parallel=way, world_size=ranks)
    if way in placed:
        values |= dict(stream_from=placed[way], resident_layers=0)
    return speed.predict(plan(records, model=model, **(values | changes)), decoder(model))


def test_data_parallel_adds_up_speed():
    alone = step("none", 1)
    for way in ("ddp", "streamed", "fsdp2"):
        for ranks in (2, 4, 8):
            shared = step(way, ranks)
            assert shared.tokens == alone.tokens, way
            assert 0.8 * ranks < shared.tokens_per_s / alone.tokens_per_s <= ranks * 1.001, (way, ranks)
            assert not shared.verified and shared.high_s / shared.step_s > alone.high_s / alone.step_s


def test_parts_add_up():
    for way in ("ddp", "fsdp2", "tp", "pp", "cp"):
        time = step(way, 4)
        assert sum(time.parts.values()) == pytest.approx(time.step_s, rel=0.01), way


def test_gradients_of_adapters_are_summed_once():
    """42 M fp32 elements: 2 * 3/4 * 168 MB at 1 GB/s."""
    shared = plan(2, parallel="ddp", world_size=4)
    assert together.blocking_s(shared, decoder(), SLOW) == pytest.approx(1.5 * 41.94e6 * 4 / 1e9, rel=0.01)
    wide = shared.with_(method="full", adapter=None, base_format="bf16")
    assert together.blocking_s(wide, decoder(), SLOW) == pytest.approx(1.5 * 8.03e9 * 4 / 1e9, rel=0.01)


def test_sharded_layers_hide_behind_compute_until_the_link_is_too_slow():
    full = dict(method="full", adapter=None, base_format="bf16")
    quick, slow = step("fsdp2", 8, "H100 SXM5", **full), step("fsdp2", 8, "rtx4090", **full)
    assert quick.parts["stall"] < 0.1 * quick.step_s and slow.parts["stall"] > 0.5 * slow.step_s
    assert slow.bound == "link"
    # layer-major: each layer is gathered twice a step, not twice for every micro-batch
    once = step("fsdp2", 2, "rtx4090", accumulation_order="layer-major", **full)
    assert once.step_s < step("fsdp2", 2, "rtx4090", **full).step_s


def test_a_pipeline_waits_to_fill_and_to_empty():
    """(m + p - 1) / m of the longest stage."""
    many, few = step("pp", 4), step("pp", 4, micro_batch=4)
    busy = many.step_s - many.parts[EXCHANGE]
    assert many.parts[EXCHANGE] == pytest.approx(busy * 3 / 8, rel=0.1)
    assert few.parts[EXCHANGE] / few.step_s > many.parts[EXCHANGE] / many.step_s
    assert many.tokens == few.tokens == 8 * 2048


def test_tensor_parallel_pays_for_every_layer():
    """Two sums of [2048, 4096] in bf16 per layer forward, backward and recomputed, of 8 micro-batches."""
    time = step("tp", 2)
    link = links.links_of(FOUR[:2], [None, None])
    expected = 6 * 32 * 8 * (2048 * 4096 * 2 / link.peer + links.EXCHANGE_LATENCY_S)
    assert time.parts[EXCHANGE] == pytest.approx(expected, rel=0.01)
    assert step("tp", 8, "H100 SXM5").parts[EXCHANGE] < step("tp", 8).parts[EXCHANGE] / 5, "NVLink"


def test_the_slowest_card_sets_the_pace():
    shared = plan(4, device_name="rtx4090", micro_batch=1, parallel="ddp", world_size=2)
    mixed, slow, quick = (
        speed.predict(shared, decoder(), together=names)
        for names in (("rtx4090", "rtx3090"), ("rtx3090",) * 2, ("rtx4090",) * 2)
    )
    assert quick.step_s < mixed.step_s == pytest.approx(slow.step_s, rel=0.02)


def test_cards_of_a_socket_share_its_memory():
    one, four, eight = (links.links_of(FOUR[:1] * count, [None] * count) for count in (1, 4, 8))
    assert one.host > four.host == eight.host == links.SOCKET_GB_PER_S * 1e9 / 4
    fast = links.links_of(["H200 SXM"] * 8, [None] * 8)
    assert fast.host == links.SOCKET_GB_PER_S * 1e9 / 4, "two sockets of four"
    eight_cards = step("streamed", 8, "H200 SXM", BIG, base_format="bf16")
    assert eight_cards.parts["stall"] > step("streamed", 2, "H200 SXM", BIG, base_format="bf16").parts["stall"] / 4


def test_how_cards_are_connected():
    kinds = {name: links.links_of([name] * 2, [None] * 2) for name in ("A100-SXM4-80GB", "rtx3090", "rtx4090", "Mine")}
    assert [found.kind for found in kinds.values()] == [
        "NVLink", "PCIe", "PCIe through host memory", "PCIe through host memory",
    ]  # fmt: skip
    assert kinds["A100-SXM4-80GB"].peer > 10 * kinds["rtx3090"].peer > 10 * kinds["rtx4090"].peer
    assert "NVLink bridge is not assumed" in kinds["rtx3090"].sentence and "not measured" in kinds["Mine"].sentence
    narrow = links.links_of(["rtx3090"] * 2, [12e9, 24e9])
    assert narrow.host == 12e9 and narrow.peer == 12e9 * links.PCIE_SHARE, "a slot of eight lanes holds all back"


def test_context_parallel_shares_a_rows_tokens():
    alone, shared = step("none", 1, seq_len=32768), step("cp", 4, seq_len=32768)
    assert shared.tokens == alone.tokens
    assert 2 < alone.step_s / shared.step_s < 4.1
    assert shared.parts["attention"] == pytest.approx(alone.parts["attention"] / 4, rel=0.05)
