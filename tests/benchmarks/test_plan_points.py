"""The points at which plans are run as they are made, and the combinations they are compared with."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import plan_points
import plan_sweep

from fitune.catalog import models


def test_thirty_points_with_every_cap_shape_and_method_at_least_three_times():
    points = plan_points.points()
    assert len(points) == len({point.name for point in points}) == 30
    for field, values in (("cap_gib", plan_points.BY_CAP), ("size", plan_points.MODELS),
                          ("method", ("full", "lora", "qlora", "auto"))):  # fmt: skip
        found = Counter(getattr(point, field) for point in points)
        assert set(found) == set(values) and min(found.values()) >= 3, found
    assert all(models.find(name) is not None for name in plan_points.MODELS.values())
    assert set(plan_sweep.SWEPT) <= {point.name for point in points}


def test_a_point_asks_for_nothing_but_model_method_and_cap():
    values = plan_points.points()[0].recipe_values()
    assert values == {"model": "random:Qwen/Qwen2.5-0.5B", "method": "full", "vram": 6.0}


def test_what_another_combination_tells():
    ran = {"micro_batch": 2, "recompute_layers": 8, "accumulation_order": "micro-batch-major", "offload_inputs": False,
           "resident_layers": 4}  # fmt: skip
    out = ran | {"oom": True}
    tells = plan_sweep._tells
    assert tells(out, ran | {"micro_batch": 4, "recompute_layers": 6})
    assert not tells(out, ran | {"recompute_layers": 9}) and not tells(out, ran | {"micro_batch": 1})
    assert tells(ran, ran | {"recompute_layers": 9})
    assert not tells(ran, ran | {"micro_batch": 4, "recompute_layers": 9}), "more rows may be faster"
    assert not tells(out, ran | {"offload_inputs": True}) and not tells(ran, ran | {"resident_layers": 8})


def test_the_plan_is_compared_with_the_best_that_ran():
    own = {"is_plan": True, "step_s": 1.05}
    records = [{"point": "p", "combinations": [own, {"is_plan": False, "oom": True}]},
               {"point": "p", "combinations": [{"is_plan": False, "step_s": 1.0}]},
               {"point": "other", "combinations": [{"is_plan": False, "step_s": 0.1}]}]  # fmt: skip
    said = plan_sweep._summary("p", SimpleNamespace(records=records))
    assert said.startswith("p: plan 1.050 s, best of 3 1.000 s (+5.0%)")
