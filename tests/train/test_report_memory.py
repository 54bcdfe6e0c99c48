"""The report's bars by owner, from what `plan.json` holds."""

from __future__ import annotations

import re

from fitune.train.report_memory import memory_section, owners_chart
from fitune.train.report_text import Words
from fitune.units import GIB

PLAN = {
    "device": "cuda", "base_format": "nf4", "optimizer": "adamw", "budget_bytes": 10 * GIB,
    "predicted": {"phases": {
        "step": {"device_bytes": 8 * GIB, "device": {"context": GIB, "weights": 4 * GIB, "saved": 3 * GIB}},
        "save": {"device_bytes": 5 * GIB, "device": {"context": GIB, "weights": 4 * GIB}},
        "merge": {"device_bytes": None, "device": {}},
    }},
}  # fmt: skip


def widths(html: str) -> list[float]:
    return [float(width) for width in re.findall(r'<i style="width:([\d.]+)%', html)]


def test_segments_are_in_proportion_and_named():
    html = owners_chart(PLAN, Words("en"))
    save_context, save_weights, *_ = widths(html)[3:]
    step = widths(html)[:3]
    assert step[1] == 4 * step[0] and abs(step[2] - 3 * step[0]) < 0.02
    assert (save_context, save_weights) == (step[0], step[1])
    assert "weights (nf4): 4.00 GiB" in html and "activations: 3.00 GiB" in html
    assert 'class="limit"' in html
    assert html.count('class="phase"') == 2, "a phase that is not computed has no bar"


def test_it_is_part_of_the_memory_section_in_both_languages():
    events = [{"event": "phase", "phase": "step", "device_bytes": 8 * GIB}]
    assert "Predicted, by what it is for" in memory_section(PLAN, events, Words("en"))
    assert "激活值: 3.00 GiB" in memory_section(PLAN, events, Words("zh"))


def test_an_older_plan_has_no_such_chart():
    old = PLAN | {"predicted": {"phases": {"step": {"device_bytes": 8 * GIB}}}}
    assert owners_chart(old, Words("en")) == ""
    assert owners_chart({}, Words("en")) == ""
