"""The allocator's model on sequences worked out by hand, and on what a GPU's own allocator did with others."""

from __future__ import annotations

import importlib.util
import json
import random
import time
from pathlib import Path

import pytest

from fitune.memory.allocator import CachingAllocator, replay
from fitune.memory.events import Event
from fitune.units import GIB, KIB, MIB

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
RECORDS = sorted(RESULTS.glob("allocator-*.json"))


def event(block: int, num_bytes: int) -> Event:
    return Event(block, num_bytes, "temporary", f"block {block}", "forward", 0)


def play(*steps: tuple[int, int], **arguments):
    """`(1, 5 * MIB)` makes block 1, `(1, -5 * MIB)` frees it."""
    return replay([event(*step) for step in steps], **({"expandable": False} | arguments))


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "segment", "pages"),
    [
        (1, 512, 2 * MIB, 2 * MIB),
        (512, 512, 2 * MIB, 2 * MIB),
        (513, 1024, 2 * MIB, 2 * MIB),
        (MIB, MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB, 20 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB, 20 * MIB),
        (21 * MIB, 21 * MIB, 22 * MIB, 40 * MIB),
    ],
)
def test_one_request(num_bytes, allocated, segment, pages):
    """What a first request takes. Left-overs of at most 1 MiB are not split off in the large pool of plain segments."""
    plain, expandable = play((1, num_bytes)), play((1, num_bytes), expandable=True)
    kept_whole = num_bytes > MIB and segment - allocated <= MIB
    assert (plain.peak_allocated_bytes, plain.peak_reserved_bytes) == (segment if kept_whole else allocated, segment)
    assert (expandable.peak_allocated_bytes, expandable.peak_reserved_bytes) == (allocated, pages)


def test_small_requests_share_a_segment():
    found = play(*((index, 256 * KIB) for index in range(8)))
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (2 * MIB, 2 * MIB)
    assert play(*((index, 256 * KIB) for index in range(9))).peak_reserved_bytes == 4 * MIB


def test_the_smallest_block_that_fits_is_taken():
    """16 and 12 MiB are free; 11 MiB goes into the 12, so that 16 MiB still fits."""
    steps = [(1, 16 * MIB), (2, 12 * MIB), (1, -16 * MIB), (2, -12 * MIB), (3, 11 * MIB), (4, 16 * MIB)]
    assert play(*steps).peak_reserved_bytes == 28 * MIB


def test_freed_neighbours_join():
    """Five blocks of 4 MiB fill a segment of 20; the second and third, freed, take one of 8; the first and last do not
    touch."""
    start = [(index, 4 * MIB) for index in range(5)]
    joined = play(*start, (1, -4 * MIB), (2, -4 * MIB), (6, 8 * MIB))
    apart = play(*start, (0, -4 * MIB), (4, -4 * MIB), (6, 8 * MIB))
    assert (joined.peak_reserved_bytes, apart.peak_reserved_bytes) == (20 * MIB, 40 * MIB)


def test_segments_do_not_join_and_expandable_ones_do():
    """The case of a batch that grows by one: two freed segments of 30 MiB cannot hold 40, the same pages can."""
    steps = [(1, 30 * MIB), (2, 30 * MIB), (1, -30 * MIB), (2, -30 * MIB), (3, 40 * MIB)]
    assert play(*steps).peak_reserved_bytes == 100 * MIB
    assert play(*steps, expandable=True).peak_reserved_bytes == 60 * MIB


def test_expandable_grows_the_block_at_the_end():
    """50 MiB behind a free end of 10 MiB map two pages, not three."""
    found = play((1, 30 * MIB), (2, 50 * MIB), expandable=True)
    assert found.peak_reserved_bytes == 80 * MIB


def test_expandable_takes_the_block_at_the_end_last():
    """A hole of 12 MiB and the end of 8: 5 MiB goes into the hole, though the end is the smaller block."""
    steps = [(1, 12 * MIB), (2, 20 * MIB), (1, -12 * MIB), (3, 5 * MIB), (4, 8 * MIB)]
    assert play(*steps, expandable=True).peak_reserved_bytes == 40 * MIB, "the end still holds 8 MiB"


def test_the_pools_have_pages_of_their_own():
    found = play((1, MIB), (2, 2 * MIB), expandable=True)
    assert found.peak_reserved_bytes == 22 * MIB


def test_streams_share_nothing():
    allocator = CachingAllocator(expandable=False)
    allocator.allocate("a", 4 * MIB, stream=0)
    allocator.free("a")
    allocator.allocate("b", 4 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB


def test_pressure_gives_cached_segments_back():
    """Below 60 MiB: the free 30 must go before the 40 come."""
    steps = [(1, 30 * MIB), (1, -30 * MIB), (2, 40 * MIB)]
    free, tight = play(*steps), play(*steps, limit_bytes=60 * MIB)
    assert (free.num_retries, free.peak_reserved_bytes) == (0, 70 * MIB)
    assert (tight.num_retries, tight.peak_reserved_bytes, tight.reserved_bytes) == (1, 40 * MIB, 40 * MIB)
    assert tight.oom_at is None


def test_a_segment_in_use_cannot_go_back():
    """16 of its 20 MiB are free, yet the segment stays: 40 more do not fit below 50."""
    steps = [(1, 4 * MIB), (2, 4 * MIB), (1, -4 * MIB), (3, 40 * MIB)]
    found = play(*steps, limit_bytes=50 * MIB)
    assert found.oom_at == event(3, 40 * MIB)
    assert (found.num_retries, found.allocated_bytes, found.reserved_bytes) == (1, 4 * MIB, 20 * MIB)


def test_expandable_gives_whole_pages_back():
    """40 of 60 MiB are free, two whole pages: they go back, and 60 MiB come behind the block in use."""
    steps = [(1, 40 * MIB), (2, 20 * MIB), (1, -40 * MIB), (3, 60 * MIB)]
    found = play(*steps, limit_bytes=80 * MIB, expandable=True)
    assert (found.num_retries, found.oom_at, found.reserved_bytes) == (1, None, 80 * MIB)
    plain = play(*steps, limit_bytes=80 * MIB)
    assert (plain.num_retries, plain.oom_at, plain.reserved_bytes) == (1, None, 80 * MIB)


def test_the_limit_counts_a_whole_request_where_pages_are_there():
    """19 MiB are free at the end of what is mapped. 24 more would map one page, but the limit is compared with 60 + 24:
    a retry, which finds the same."""
    steps = [(1, 41 * MIB), (2, 24 * MIB)]
    assert play(*steps, expandable=True).peak_reserved_bytes == 80 * MIB
    tight = play(*steps, expandable=True, limit_bytes=80 * MIB)
    assert (tight.num_retries, tight.oom_at) == (1, event(2, 24 * MIB))


def test_expandable_pages_may_pass_the_limit():
    """21 MiB are allowed below 23, and map two pages of 20."""
    found = play((1, 21 * MIB), expandable=True, limit_bytes=23 * MIB)
    assert (found.oom_at, found.peak_reserved_bytes) == (None, 40 * MIB)


def test_the_driver_counts_pages():
    found = play((1, 21 * MIB), expandable=True, device_bytes=23 * MIB)
    assert (found.oom_at, found.num_retries) == (event(1, 21 * MIB), 1)
    assert play((1, 21 * MIB), device_bytes=23 * MIB).oom_at is None


def test_addresses_end_and_a_second_range_begins():
    """A card of 160 MiB has 180 of addresses: a hole of 100 MiB and 20 behind hold no 120, a new range does."""
    allocator = CachingAllocator(expandable=True, total_bytes=160 * MIB)
    allocator.run([event(1, 60 * MIB), event(2, 40 * MIB), event(3, 60 * MIB)])
    assert allocator.reserved_bytes == 160 * MIB
    allocator.run([event(2, -40 * MIB), event(4, 60 * MIB)])
    assert allocator.reserved_bytes == 160 * MIB + 60 * MIB


def test_lists_follow_one_another():
    """Load, then two steps: the second step finds what the first left."""
    allocator = CachingAllocator(expandable=False)
    load = allocator.run([event(1, 100 * MIB), event(2, 30 * MIB), event(2, -30 * MIB)])
    assert (load.peak_allocated_bytes, load.allocated_bytes, load.reserved_bytes) == (130 * MIB, 100 * MIB, 130 * MIB)
    assert load.allocated_peak_at == load.reserved_peak_at == event(2, 30 * MIB)
    step = [event(1, 24 * MIB), event(2, 10 * MIB), event(1, -24 * MIB), event(2, -10 * MIB)]
    first, second = allocator.run(step), allocator.run(step)
    assert first.allocated_bytes == 100 * MIB, "block 1 of the load stays, under a number that is used again"
    assert (first.peak_allocated_bytes, first.peak_reserved_bytes) == (134 * MIB, 140 * MIB)
    assert (second.peak_reserved_bytes, second.reserved_peak_at) == (140 * MIB, None)
    assert second.allocated_peak_at == event(2, 10 * MIB)


def test_a_later_list_may_free_what_an_earlier_one_made():
    allocator = CachingAllocator(expandable=True)
    allocator.run([event(7, 30 * MIB)])
    assert allocator.run([event(7, -30 * MIB)]).allocated_bytes == 0


def test_empty_tensors_take_nothing():
    assert play((1, 0)).peak_reserved_bytes == 0


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="block 3 dies and is not there"):
        play((3, -MIB))
    with pytest.raises(ValueError, match="block 1 is born twice"):
        play((1, MIB), (1, MIB))


def test_releasing_everything_leaves_nothing():
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable)
        made = random_events(2000, seed=3)
        allocator.run(made)
        for block, left in alive(made).items():
            allocator.run([event(block, -left)])
        assert allocator.allocated_bytes == 0
        allocator.release_cached()
        assert allocator.reserved_bytes == 0


@pytest.mark.parametrize("expandable", [False, True])
def test_invariants_of_random_lists(expandable):
    """At every point asked <= allocated <= reserved, and blocks do not overlap; also while requests fail."""
    allocator = CachingAllocator(expandable=expandable, limit_bytes=300 * MIB)
    asked: dict[int, int] = {}
    num_failed = 0
    for made in random_events(3000, seed=5):
        if made.num_bytes < 0 and made.block not in asked:
            continue  # the request had failed
        found = allocator.run([made])
        if made.num_bytes < 0:
            del asked[made.block]
        elif found.oom_at is None:
            asked[made.block] = made.num_bytes
        num_failed += found.oom_at is not None
        blocks = sorted((block.start, block.size) for block in allocator._live.values())
        assert all(start + size <= after for (start, size), (after, _) in zip(blocks, blocks[1:], strict=False))
        assert sum(asked.values()) <= sum(size for _, size in blocks) == allocator.allocated_bytes
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    assert num_failed > 0


def test_twenty_thousand_events_take_less_than_half_a_second():
    made = random_events(20_000, seed=1)
    started = time.process_time()
    replay(made, expandable=True)
    assert time.process_time() - started < 0.5


def allocator_check():
    """The benchmark that made the records, for the way in which it plays a list."""
    path = RESULTS.parent / "allocator_check.py"
    spec = importlib.util.spec_from_file_location("allocator_check", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded_cases() -> list[dict]:
    """What GPUs recorded, each case with its list (still packed)."""
    cases = []
    for path in RECORDS:
        values = json.loads(path.read_text(encoding="utf-8"))
        lists = {value["name"].removeprefix("list "): value["entries"] for value in values if "real" not in value}
        cases += [value | {"entries": lists[value["list"]]} for value in values if "real" in value]
    return cases


CASES = recorded_cases()


@pytest.mark.skipif(not CASES, reason="no results/allocator-*.json: benchmarks/allocator_check.py makes it")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['gpu']['name']} {case['name']}")
def test_the_model_does_what_the_gpus_allocator_did(case):
    check = allocator_check()
    streams = {int(birth): stream for birth, stream in case["streams"].items()}
    model = check.replayed(
        check.unpacked(case["entries"]), streams, case["every"], expandable=case["expandable"],
        limit_bytes=case["limit_bytes"], total_bytes=case["gpu"]["total_bytes"],
    )  # fmt: skip
    real = case["real"]
    assert (model["oom_at"], model["num_retries"]) == (real["oom_at"], real["num_retries"])
    assert model["peak_allocated_bytes"] == real["peak_allocated_bytes"]
    assert check.difference({"model": model, "real": real}) <= 0.005


def test_the_benchmark_reads_torchs_own_record():
    """Births, deaths once they are complete, another stream, reserved bytes, the request that failed."""
    first = dict(addr=64, stream=5)
    entries = [
        dict(action="segment_map", addr=0, size=20 * MIB, stream=5), dict(action="alloc", size=5 * MIB, **first),
        dict(action="alloc", addr=640, size=100, stream=7), dict(action="free_requested", size=5 * MIB, **first),
        dict(action="free_completed", size=5 * MIB, **first), dict(action="alloc", size=7 * MIB, **first),
        dict(action="oom", addr=0, size=GIB, stream=5),
    ]  # fmt: skip
    made, streams, readings, failed = allocator_check()._from_trace(entries)
    assert (made, streams, readings, failed) == ([5 * MIB, 100, -1, 7 * MIB, GIB], {1: 1}, [], 4)


def random_events(count: int, seed: int) -> list[Event]:
    rng, made, living = random.Random(seed), [], []
    while len(made) < count:
        if living and (rng.random() < 0.45 or len(living) > 400):
            block, size = living.pop(rng.randrange(len(living)))
            made.append(event(block, -size))
        else:
            size = int(2 ** rng.uniform(6, 24))
            living.append((len(made), size))
            made.append(event(len(made), size))
    return made


def alive(made: list[Event]) -> dict[int, int]:
    left: dict[int, int] = {}
    for item in made:
        left[item.block] = left.get(item.block, 0) + item.num_bytes
    return {block: size for block, size in left.items() if size}
