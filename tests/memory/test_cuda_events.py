"""What a GPU's allocator was asked for in a training step (`benchmarks/record_events.py`), predicted again."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

import pytest

from benchmarks import record_events
from fitune.memory.events import Event
from tests.memory.engine_then import engine_of

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ALL = {
    case["name"]: case
    for path in sorted(RESULTS.glob("events-*.json.gz"))
    for case in json.loads(gzip.decompress(path.read_bytes()))
}


@functools.cache
def prediction(name):
    with engine_of(ALL[name]):
        return record_events.predicted(name)


@pytest.mark.skipif(not ALL, reason="no events of a GPU have been recorded in benchmarks/results")
@pytest.mark.parametrize("name", ALL)
def test_meta_says_what_the_gpu_was_asked_for(name):
    """Every birth and death in order, but for what `record_events` lists as (1) to (4)."""
    assert tuple(ALL[name]["case"][:8]) == tuple(record_events.CASES[name][:8]), "recorded for another case"
    found = record_events.compared(ALL[name], prediction(name))
    assert not found, "\n".join(found[:10])


def highest(parts, rounding=512):
    """Peak of each part in bytes of whole blocks, from signed sizes; blocks from before the step count nothing."""
    live, found = 0, []
    for events in parts:
        top = live
        for num_bytes in events:
            live += -(-abs(num_bytes) // rounding) * rounding * (1 if num_bytes > 0 else -1)
            top = max(top, live)
        found.append(top)
    return found


@pytest.mark.skipif(not ALL, reason="no events of a GPU have been recorded in benchmarks/results")
@pytest.mark.parametrize("name", ALL)
def test_peaks_of_the_parts_are_the_gpus(name):
    """With the scratch of kernels in the record: no part's peak is more than 8 KB from it, and the step's peak is not
    further off either; where keys are split, only the passes of layers are."""
    recorded = record_events.joined(ALL[name]["parts"])
    gpu = highest([[n for block, n in part["events"] if block >= 0] for part in recorded])
    meta = highest([[e.num_bytes for e in events] for _, _, events in prediction(name)])
    assert max(gpu) == pytest.approx(max(meta), abs=8192)
    for part, ours, theirs in zip(recorded, gpu, meta, strict=True):
        if part["part"] != "forward":
            assert ours == pytest.approx(theirs, abs=8192), (part["part"], part["layer"])


def test_split_keys_are_counted_as_the_kernel_does():
    """8 heads of 2 rows of 256 tokens on 132 multiprocessors: 4 splits, seen in the record of gemma-3-1b."""
    assert record_events.num_splits(8, 256, 256, 132) == 4
    assert record_events.num_splits(32, 512, 128, 132) == 1, "enough blocks without"


def parts(*lists):
    return [
        ("forward", i, [Event(b, n, "temporary", "a block", "forward", i) for b, n in e]) for i, e in enumerate(lists)
    ]


def recorded(*lists):
    return [{"part": "forward", "layer": i, "events": [list(e) for e in events]} for i, events in enumerate(lists)]


def test_equal_lists_have_no_differences():
    gpu = recorded([(7, 100), (9, 50), (9, -50)], [(7, -100)])
    assert record_events.differences(gpu, parts([(0, 100), (1, 50), (1, -50)], [(0, -100)]), frames=False) == []


def test_differences_say_where_and_what():
    gpu = recorded([(0, 100), (1, 50), (1, -50)], [(0, -100)])
    (line, *_) = record_events.differences(gpu, parts([(0, 100)], [(0, -100)]), frames=False)
    assert line == "forward 0, event 1 of 3: on the GPU [50, -50], on meta []"
    swapped = recorded([(0, 100), (1, 100)], [(1, -100), (0, -100)])
    said = parts([(0, 100), (1, 100)], [(0, -100), (1, -100)])
    assert record_events.differences(swapped, said, frames=False) == [
        "the same sizes in the same order, but other blocks die"
    ]


def test_allocator_entries_are_cut_at_the_markers():
    marker = record_events.MARKER_BYTES + 2
    trace = [
        {"action": "alloc", "addr": 1, "size": 8},
        {"action": "alloc", "addr": 2, "size": marker},
        {"action": "free_requested", "addr": 2, "size": marker},
        {"action": "free_completed", "addr": 2, "size": marker},
        {"action": "segment_alloc", "addr": 5, "size": 99},
        {"action": "alloc", "addr": 2, "size": 16},
        {"action": "free_requested", "addr": 1, "size": 8},
        {"action": "free_requested", "addr": 77, "size": 4},
    ]
    found = record_events._cut(trace, [("start", -1), ("embed", 0)])
    assert [part["events"] for part in found] == [[[0, 8]], [[1, 16], [0, -8], [-1, -4]]]
