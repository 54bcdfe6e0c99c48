"""What is said about memory while a run goes on, and what is not."""

from __future__ import annotations

import random

from fitune.train.watch import WARM_STEPS, WINDOW, Sample, Watch

GIB, MIB = 1 << 30, 1 << 20


def run(steps: int, **of_step) -> list[str]:
    """Sentences over a run whose fields are functions of the step."""
    watch, said = Watch(), []
    for step in range(1, steps + 1):
        values = dict(rest_bytes=2 * GIB, peak_bytes=5 * GIB, others_bytes=GIB, free_bytes=10 * GIB, host_bytes=4 * GIB,
                      longest_tokens=100, longest_row=step)  # fmt: skip
        values |= {name: function(step) for name, function in of_step.items()}
        said += watch.look(Sample(step, **values))
    return said


def test_a_steady_run_is_silent():
    noise = random.Random(0)
    assert not run(500, peak_bytes=lambda s: int(5 * GIB * noise.uniform(0.5, 1)), host_bytes=lambda s: int(
        4 * GIB * noise.uniform(0.97, 1)), rest_bytes=lambda s: 2 * GIB + noise.randint(0, 4 * MIB))  # fmt: skip


def test_a_leak_is_told_once_with_its_rate():
    said = run(300, rest_bytes=lambda s: 2 * GIB + s * 3 * MIB)
    assert len(said) == 1
    assert said[0].startswith(f"GPU memory at rest grows by 3 MiB a step (from step 1 to {WINDOW}): a leak; at this")


def test_a_leak_of_host_memory():
    said = run(300, host_bytes=lambda s: 4 * GIB + s * 20 * MIB)
    assert len(said) == 1 and "host memory grows by 20 MiB a step" in said[0]
    assert f"from step {WARM_STEPS + 1} to {WARM_STEPS + WINDOW}" in said[0]


def test_growth_that_ends_is_no_leak():
    assert not run(300, rest_bytes=lambda s: 2 * GIB + min(s, 5) * 100 * MIB)


def test_a_long_record_is_named_and_is_no_leak():
    length = dict(longest_tokens=lambda s: 7000 if s == 120 else 90)
    said = run(200, peak_bytes=lambda s: (9 if s == 120 else 5) * GIB, **length)
    assert said == ["step 120 needed 9.00 GiB, the steps before it at most 5.00 GiB: its longest record is row 120, "
                    "7,000 tokens"]  # fmt: skip


def test_another_process():
    said = run(50, others_bytes=lambda s: GIB + (3 * GIB if s >= 30 else 0), free_bytes=lambda s: 2 * GIB)
    assert said == ["after step 30 another process has taken 3.00 GiB of the GPU, 2.00 GiB are free"]


def test_on_the_cpu():
    assert not run(200, rest_bytes=lambda s: None, peak_bytes=lambda s: None, others_bytes=lambda s: None,
                   free_bytes=lambda s: None)  # fmt: skip
