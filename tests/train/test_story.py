"""What a run went through, in one line that a person understands."""

from __future__ import annotations

import pytest

from fitune.train.story import story

STEPS = [{"event": "step", "step": step, "loss": 1.0} for step in (1, 2, 3)]
REPLAN = {"event": "replan", "step": 2, "change": "micro-batch 4 -> 2", "where": "device", "phase": "step"}
RESTART = {"event": "restart", "step": 3, "from_step": 2, "cause": "the system killed it for memory (oom_kill)",
           "change": "nothing"}  # fmt: skip


def test_nothing_happened():
    assert story(STEPS) is None and story([]) is None


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([REPLAN], "ran out of GPU memory at step 2 and went on with micro-batch 4 -> 2"),
        ([REPLAN | {"where": "host"}], "ran out of host memory at step 2 and went on with micro-batch 4 -> 2"),
        ([REPLAN | {"phase": "eval", "step": 3}],
         "ran out of GPU memory in an evaluation before step 3 and went on with micro-batch 4 -> 2"),
        ([RESTART], "died after step 3 (the system killed it for memory (oom_kill)) and went on from step 2"),
        ([REPLAN | {"phase": "restart"}, RESTART | {"change": "micro-batch 4 -> 2", "from_step": 0}],
         "died after step 3 (the system killed it for memory (oom_kill)) and went on from the beginning with "
         "micro-batch 4 -> 2"),
        ([REPLAN | {"phase": "resume", "where": "moved", "change": "H200 -> CPU: precision bf16 -> fp32"}],
         "moved to another device after step 2 (H200 -> CPU: precision bf16 -> fp32)"),
        ([REPLAN | {"phase": "resume", "where": "layout", "change": "ddp -> fsdp2: the same settings"}],
         "shared the work another way after step 2 (ddp -> fsdp2: the same settings)"),
    ],
)  # fmt: skip
def test_one_line(events: list[dict], said: str):
    assert story([*events, *STEPS]) == f"{said} (no step was lost or repeated)"


def test_many_things():
    line = story([REPLAN] * 5 + STEPS)
    assert line is not None and line.count("ran out of GPU memory") == 3 and ", and 2 more" in line


def test_steps_that_were_left_out():
    events = [*STEPS[:2], {"event": "step", "step": 3, "loss": None, "skipped_rows": [4]}]
    assert story(events) == "left out 1 step whose loss was not a number"
    assert story([REPLAN, STEPS[0], STEPS[2]]) == "ran out of GPU memory at step 2 and went on with micro-batch 4 -> 2"
