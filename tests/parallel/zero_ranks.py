"""ZeRO in the processes of tests; skipped where DeepSpeed is not installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from fitune.model.build import add_adapter, build, fill
from fitune.parallel import zero_disk
from fitune.parallel.group import Group
from fitune.parallel.setup import finish_host_together, make_engine, open_host_together
from fitune.parallel.zero_library import load_deepspeed
from fitune.plan import Plan
from tests import tiny
from tests.house.source import ROOT

MODULE, LOOK = "tests.parallel.zero_ranks", "--look"
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def why_no_async_io() -> str | None:
    """Why optimizer state cannot be on a disk here, in a sentence; None where it can. Nothing is compiled.
    (A process of its own looks: in one of tests somebody may have imported distutils before setuptools.)"""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    done = subprocess.run([sys.executable, "-m", MODULE, LOOK], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _look() -> str | None:
    deepspeed = load_deepspeed("cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    with zero_disk.compiling_in(folder := zero_disk.build_folder()):
        missing = zero_disk.missing_tool(AsyncIOBuilder())
    if missing is not None:
        return missing.why
    if zero_disk.is_compiled(folder) or deepspeed.git_version_info.installed_ops.get(zero_disk.OP):
        return None
    return f"DeepSpeed's async_io is not compiled here (minutes, once): python -m {MODULE}"


def make(group: Group, plan: Plan, architecture: str = "llama", **sizes: Any) -> Any:
    """An engine as a run makes it: stage 3 cuts each weight as soon as it is in its place."""
    built = build(tiny.config_of(architecture, **sizes), plan, "cpu")
    open_host_together(built, plan, group, None)
    fill(built, tiny.reference(architecture, **sizes).state_dict().items(), plan)
    finish_host_together(built, plan, group)
    add_adapter(built, plan)
    return make_engine(built, plan, group)


if __name__ == "__main__":
    if LOOK in sys.argv:
        print(json.dumps(_look()))
    else:
        zero_disk.load_async_io(load_deepspeed("cpu"), print)
