"""Traces are made once for all tests of this folder: they test the choice, and tracing is most of its time."""

from __future__ import annotations

import pytest

from fitune.memory.variant import variant_of


@pytest.fixture(autouse=True, scope="session")
def shared_traces(tmp_path_factory):
    from fitune.memory import trace

    made = {}
    real = trace.Tracer

    def remembered(config, plan, irregular=False):
        key = id(config), variant_of(plan), plan.optimizer
        if key not in made:
            made[key] = (
                real(config, plan, irregular),
                config,
            )  # the configuration is kept, so that its id stays its own
        return made[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "Tracer", remembered)
        patch.setenv("FITUNE_CACHE", str(tmp_path_factory.mktemp("cache")))  # not the person's own
        yield
