"""What the measuring scripts share, as far as it needs no GPU."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import bench


def test_a_process_sends_its_records():
    def work(send):
        send({"name": "one", "pid": os.getpid()})
        send({"name": "two", "pid": os.getpid()})

    found = list(bench.forked("case", work))
    assert [record["name"] for record in found] == ["one", "two"]
    assert os.getpid() not in {record["pid"] for record in found}


def test_an_error_and_a_death_are_records_of_the_case():
    def fails(send):
        send({"name": "before"})
        raise ValueError("no such shape")

    before, error = bench.forked("case", fails)
    assert before == {"name": "before"}
    assert error["name"] == "case" and error["error"] == "ValueError: no such shape" and "fails" in error["traceback"]
    died = bench.forked_record("case", lambda: os._exit(7))
    assert died == {"name": "case", "error": "the process died (exit code 7)"}


def test_a_process_has_ended_when_its_record_is_there(tmp_path):
    """The next case would find the card still in use."""
    mark = tmp_path / "ended"

    def slow_end():
        def end():
            time.sleep(0.3)
            mark.touch()

        threading.Thread(target=end).start()
        return {"name": "case"}

    assert bench.forked_record("case", slow_end) == {"name": "case"}
    assert mark.exists()


def test_records_are_kept_by_name_and_failures_are_not_done(tmp_path):
    out = bench.Records(tmp_path / "results" / "x.json")
    out.add({"name": "a", "value": 1})
    out.add({"name": "b", "error": "none"})
    out.add({"name": "a", "value": 2})
    again = bench.Records(out.path)
    assert again.records == [{"name": "b", "error": "none"}, {"name": "a", "value": 2}] and again.names == {"a"}


def test_full_rows_are_the_same_each_time():
    plan = SimpleNamespace(batch=3, seq_len=16, micro_batch=2)
    first, again = (bench.batches(plan, 5, 1000) for _ in range(2))
    assert [b.input_ids.shape for b in first] == [(2, 16), (1, 16)]
    assert all((a.input_ids == b.input_ids).all() for a, b in zip(first, again, strict=True))
