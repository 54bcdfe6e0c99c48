"""Settings for every test: one thread, no network, GPU tests that skip themselves, runs that land in a fresh folder."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

# Before torch or transformers is imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# A developer's own calibration and traces change no test: an empty folder for the session, which xdist's workers and
# the processes of tests inherit. The first process makes and removes it.
if "FITUNE_TEST_FOLDER" not in os.environ:
    os.environ["FITUNE_TEST_FOLDER"] = _made = tempfile.mkdtemp(prefix="fitune-tests-")
    atexit.register(lambda owner: os.getpid() == owner and shutil.rmtree(_made, ignore_errors=True), os.getpid())
os.environ["FITUNE_CALIBRATION"] = os.path.join(os.environ["FITUNE_TEST_FOLDER"], "calibration")
os.environ["FITUNE_CACHE"] = os.path.join(os.environ["FITUNE_TEST_FOLDER"], "cache")

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"  # present in some checkouts only


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`gpu` and `multi_gpu` tests skip themselves; torch is only imported where there are such tests."""
    wanted = {"gpu": 1, "multi_gpu": 2}
    marked = [(item, needs) for item in items for name, needs in wanted.items() if item.get_closest_marker(name)]
    if not marked:
        return
    import torch

    present = torch.cuda.device_count()
    for item, needs in marked:
        if present < needs:
            item.add_marker(pytest.mark.skip(reason=f"needs {needs} CUDA GPU{'s' * (needs > 1)}, there are {present}"))


@pytest.fixture
def shared() -> Path:
    """The folder `shared` beside the checkout; the test is skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no folder `shared` beside this checkout")
    return SHARED


@pytest.fixture
def fitune_command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`fitune_command("plan", "smollm2", "--json")` runs the real command in an empty folder, without a network."""

    def run(*arguments: str, cwd: Path = tmp_path, timeout: float = 120, **environment: str):
        env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        return subprocess.run(
            [sys.executable, "-m", "fitune", *arguments], cwd=cwd, env=env, capture_output=True, text=True,
            encoding="utf-8", timeout=timeout, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return run
