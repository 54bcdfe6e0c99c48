"""The list of streamed cases: what a person is told, and that cases run. (`stream.py --tiny` runs all of them.)"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import bench
import pytest
import stream
import stream_cases
import stream_killed
import stream_limits
import stream_profile
from stream_cases import CASES, EQUALITIES

BRIEF = argparse.Namespace(steps=2, turns=2)


def test_every_acceptance_has_cases_and_every_case_its_reason():
    numbers = {case.acceptance for case in CASES.values() if not case.long}
    assert numbers - {0} == set(range(2, 10)) and {why[0] for why in EQUALITIES.values()} == {"1", "6"}
    text = stream.listed()
    for name, case in CASES.items():
        assert case.why in text and name in text
        assert case.against is None or case.against in CASES


def test_an_acceptance_brings_what_it_is_compared_with():
    names = stream.selected(8, with_long=False)
    assert names[0] == "8b-nf4-1x2048-resident" and "8b-bf16-4x2048-ring-12gb-s" in names
    assert stream.selected(1, with_long=False) == [name for name, why in EQUALITIES.items() if why[0] == "1"]
    assert not set(stream.selected(None, with_long=False)) & {name for name, case in CASES.items() if case.long}


@pytest.mark.parametrize("name", ["8b-nf4-1x2048-least", "qwen3-30b-a3b-nf4-1x2048-experts"])
def test_a_case_runs_at_tiny_sizes_on_the_cpu(name):
    record = stream.work(name, BRIEF, tiny=True)
    assert record["plan"]["device"] == "cpu" and len(record["measured"]["losses"]) == 2
    assert record["predicted"]["peak_allocated_bytes"] > 0 and record["predicted"]["step_s"] > 0
    if "experts" in name:
        assert record["num_trained"] > 2 * 4 * 8 * 16 * 64, "every expert has its own A and B"
    assert name in stream.row(record)
    beside = record["beside"]
    if CASES[name].against is None:
        assert beside is None
    else:
        assert len(beside["seconds"]) == len(beside["resident_seconds"]) == 2 and beside["tokens_per_s_ratio"] > 0
        assert "by turns" in stream.row(record)


def test_a_shape_keeps_as_many_layers_as_asked_for():
    config = stream_cases.config_of("random:openai/gpt-oss-120b", 2, tiny=False)
    assert config.num_hidden_layers == len(config.layer_types) == 2 and config.hidden_size == 2880
    assert stream_cases.config_of("random:openai/gpt-oss-120b", None, tiny=False) is None


@pytest.mark.timeout(1200)
def test_a_run_from_the_disk_is_killed_in_a_step_and_comes_to_the_same_bits(monkeypatch, tmp_path):
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path))
    name = "8b-bf16-1x2048-disk-ram8-killed"
    record = stream.work(name, BRIEF, tiny=True)
    assert record.get("error") is None, record
    assert record["plan"]["stream_from"] == "disk" and record["link"]["link_bytes"] > 0
    assert record["killed"]["in_step"] == 2 and record["killed"]["steps_before"] == 1, (
        "in the middle of the second step"
    )
    assert record["killed"]["resumed_from"] in (None, 0, 1), "not from the beginning of a step that was not over"
    assert record["bit_identical"] == {"losses": True, "gradient_norms": True, "adapter_sha256": True}
    assert len(record["losses"][0]) == 3 and "same bits" in stream.row(record)
    other = record | {"bit_identical": record["bit_identical"] | {"losses": False}}
    assert "DIFFERENT losses" in stream.row(other)


DONE = dict(job={}, recipe={}, plan={}, ram_left=None, resumed_from=2, losses=[1.0], gradient_norms=[1.0],
            adapter_sha256="ab", link={}, measured={})  # fmt: skip


@pytest.mark.parametrize(
    ("second", "third", "expected"),
    [
        (DONE, DONE, "it was not killed in step 2"),
        ({"error": "the process died (exit code 1)"}, DONE, "it was not killed in step 2"),
        ({"error": "the process died (exit code -9)"}, {"error": "UserError: no run"}, "resumed: UserError: no run"),
        ({"error": "the process died (exit code -9)"}, DONE | {"adapter_sha256": "cd"}, None),
    ],
)
def test_a_kill_that_did_not_happen_and_other_bits_are_told(monkeypatch, second, third, expected):
    answers = iter([DONE, second, third])
    monkeypatch.setattr(stream_killed._Job, "train", lambda job, run, **how: dict(next(answers)))
    record = stream_killed.measure("case", CASES["8b-bf16-1x2048-disk-ram8-killed"], tiny=True)
    if expected is not None:
        assert record["error"].startswith(expected)
    else:
        assert record["bit_identical"] == {"losses": True, "gradient_norms": True, "adapter_sha256": False}


def test_what_a_process_may_use_of_host_memory_is_limited_or_said_not_to_be():
    """As root, where control groups of memory are: a process that takes more than it may is killed."""

    def greedy() -> dict:
        said = stream_limits.leave_ram(2**28, fill=False)
        if said.startswith("not limited"):
            return {"said": said}
        return {"took": len(bytearray(os.urandom(1) * 2**29))}

    record = bench.forked_record("greedy", greedy)
    stream_limits.sweep()
    assert "took" not in record
    assert "no control group" in record.get("said", "") or "exit code -9" in record["error"]


def test_without_control_groups_the_reason_is_told(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(stream_limits, "_own_groups", lambda: [(tmp_path / "none", "memory.max")])
    said = stream_limits.leave_ram(2**33, fill=False)
    assert said == f"not limited (no control group: {tmp_path / 'none'}: No such file or directory)"
    monkeypatch.setattr(stream_limits, "_own_groups", list)
    monkeypatch.setattr(stream_limits, "_taken_up", lambda left: f"another process holds all but {left}")
    assert (
        stream_limits.leave_ram(7)
        == "another process holds all but 7 (no control group: no control groups of memory here)"
    )


def test_memory_is_locked_where_that_is_allowed():
    import mmap

    room = mmap.mmap(-1, mmap.PAGESIZE)
    assert stream_limits._locked(room) in (True, False)
    locked = Path("/proc/self/status").read_text().partition("VmLck:")[2].split()[0]
    assert int(locked) >= 4 or not stream_limits._locked(room)


def test_a_profile_tells_streams_kernels_and_gaps():
    of = lambda stream, name, begin, end: stream_profile.Span(stream, name, begin, end)  # noqa: E731
    spans = [of(7, "a", 0, 1000), of(7, "b", 1500, 2500), of(7, "a", 2500, 3000), of(9, "copy", 500, 2000)]
    assert list(stream_profile.gaps(spans[:3])) == [("a -> b", 500)]
    lines = stream_profile.table(spans).splitlines()
    assert lines[:3] == ["from the first to the last of all: 3.0 ms", "stream 7: busy 2.5 ms, 3 kernels",
                         "stream 9: busy 1.5 ms, 1 kernels"]  # fmt: skip
    assert any(line.split()[:1] == ["1.50"] and line.endswith("  a") for line in lines), "both of them"
    assert stream_profile.table([]) == "nothing ran on a GPU"
