"""The page of measured figures is what the records say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current():
    assert subprocess.run([sys.executable, "scripts/write_measured.py", "--check"], cwd=ROOT).returncode == 0
