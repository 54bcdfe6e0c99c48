"""Traces are made once for all tests of this folder: they test the choice, and tracing is most of its time."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def shared_traces():
    from fitune.memory import trace

    made = {}
    real = trace.Tracer

    def remembered(config, plan):
        fixed = ("method", "base_format", "double_quant", "adapter", "device", "precision", "attention", "optimizer",
                 "embedding_place")  # fmt: skip
        key = (id(config), *(getattr(plan, name) for name in fixed))
        if key not in made:
            made[key] = (real(config, plan), config)  # the configuration is kept, so that its id stays its own
        return made[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "Tracer", remembered)
        yield
