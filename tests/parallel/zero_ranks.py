"""ZeRO in the processes of tests; skipped where DeepSpeed is not installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from fitune.model.build import add_adapter, build, fill
from fitune.parallel.group import Group
from fitune.parallel.setup import finish_host_together, make_engine, open_host_together
from fitune.plan import Plan
from tests import tiny

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def make(group: Group, plan: Plan, architecture: str = "llama") -> Any:
    """An engine as a run makes it: stage 3 cuts each weight as soon as it is in its place."""
    built = build(tiny.config_of(architecture), plan, "cpu")
    open_host_together(built, plan, group, None)
    fill(built, tiny.reference(architecture).state_dict().items(), plan)
    finish_host_together(built, plan, group)
    add_adapter(built, plan)
    return make_engine(built, plan, group)
