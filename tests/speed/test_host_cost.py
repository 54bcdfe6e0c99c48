"""The script that measures what a step costs the host."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def script():
    spec = importlib.util.spec_from_file_location("host_cost", ROOT / "scripts" / "host_cost.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_of_two_layers(tmp_path, capsys):
    host_cost = script()
    out = tmp_path / "cost.json"
    host_cost.main(["--layers", "2", "--steps", "2", "--cases", "resident", "layer-major", "--out", str(out)])
    resident, major = json.loads(out.read_text(encoding="utf-8"))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["case", "resident", "layer-major"]
    for part in ("forward", "backward", "tail"):
        found = resident["parts"][part]
        assert 0 < found["launches"] < found["ops"] and found["ms"] > 0 and found["python_calls"] > 0
    # four micro-batches pass a layer, and one rounding of all its adapters each
    assert major["parts"]["forward"]["launches"] > 3.5 * resident["parts"]["forward"]["launches"]
    assert resident["ops"]["forward"]["aten._foreach_copy_.default"] == 2
    assert resident["ops"]["forward"]["bitsandbytes.dequantize_4bit.default"] == 2 * 7
    assert resident["step_ms"] >= 2 * (resident["parts"]["forward"]["ms"] + resident["parts"]["backward"]["ms"])


def test_views_and_room_launch_nothing():
    launches = script()._launches
    assert launches("aten.mm.default") and launches("aten._to_copy.default") and launches("bitsandbytes.x.default")
    assert not any(map(launches, ("aten.view.dtype", "aten.t.default", "aten.empty.memory_format")))
