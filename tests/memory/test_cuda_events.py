"""What a GPU's allocator was asked for in a training step (`benchmarks/record_events.py`), predicted again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import record_events
from fitune.memory.events import Event

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ALL = {
    case["name"]: case
    for path in sorted(RESULTS.glob("events-*.json.gz"))
    for case in json.loads(gzip.decompress(path.read_bytes()))
}


@pytest.mark.skipif(not ALL, reason="no events of a GPU have been recorded in benchmarks/results")
@pytest.mark.parametrize("name", ALL)
def test_meta_says_what_the_gpu_was_asked_for(name):
    assert tuple(ALL[name]["case"][:8]) == tuple(record_events.CASES[name][:8]), "recorded for another case"
    recorded = record_events.joined(ALL[name]["parts"])
    found = record_events.differences(recorded, record_events.predicted(name), frames=False)
    assert not found, "\n".join(found[:10])


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
