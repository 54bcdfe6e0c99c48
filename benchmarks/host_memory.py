"""Host memory of real runs, phase by phase: what `fitune.memory.host` is measured with and held to.

    python benchmarks/host_memory.py                  every case on the CPU, to benchmarks/results/host-cpu-<date>.json
    python benchmarks/host_memory.py --device cuda    the same on a GPU, to host-cuda-<date>.json
    python benchmarks/host_memory.py --only tiny      the cases whose name has this in it, printed and not stored

Each case is a process of its own: `fitune.train` with seeded weights, then a merge in a second process. The highest
resident set of each phase is the kernel's high-water mark (VmHWM), reset between phases through /proc/self/clear_refs:
Linux only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TINY = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=49152, max_position_embeddings=2048,
)  # fmt: skip
SMALL = TINY | dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8)
JOB = dict(eval_share=0.1, steps=3, batch=4, seq_len=256, eval_every=3, save_every=3)
RECORDS = 40  # of plain text, so that no sample answers are written, each longer than `seq_len`
# Name -> (configuration of the model, settings).
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny lora fp32": (TINY, dict(method="lora", precision="fp32")),
    "tiny lora bf16": (TINY, dict(method="lora", precision="bf16")),
    "small lora bf16": (SMALL, dict(method="lora", precision="bf16")),
    "small lora fp32 all kept": (SMALL, dict(method="lora", precision="fp32", recompute="none", micro_batch=4)),
    "small lora bf16 recompute": (SMALL, dict(method="lora", precision="bf16", recompute="all", micro_batch=2)),
    "small nf4": (SMALL, dict(method="qlora", precision="bf16")),
    "small full fp32": (SMALL, dict(method="full", precision="fp32", micro_batch=1)),
    "small full bf16": (SMALL, dict(method="full", precision="bf16", micro_batch=1, recompute="all")),
    "small full bf16 adafactor": (SMALL, dict(method="full", precision="bf16", micro_batch=1, optimizer="adafactor")),
}


class HighWater:
    """The process' highest resident set since `reset`, in bytes."""

    def read(self) -> int:
        text = Path("/proc/self/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", text)
        assert found is not None, "this kernel tells no VmHWM"
        return int(found[1]) * 1024

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")


def run_case(config: dict[str, Any], settings: dict[str, Any], device: str, folder: Path) -> dict[str, Any]:
    """Train and report the high-water mark of each phase; called in a process of its own."""
    import fitune

    model = folder / "config.json"
    model.write_text(json.dumps(config))
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"record {i}: " + "memory " * 400}) + "\n" for i in range(RECORDS)))
    out = folder / "run"
    water, peaks = HighWater(), {}

    def on_event(event: dict[str, Any]) -> None:
        """What came since the last event is the phase that this event ends."""
        kind = event["event"]
        ended = {"plan": "prepare", "start": "load", "eval": "eval", "sample": "sample", "checkpoint": "save"}.get(kind)
        if kind == "step":
            ended = "step" if "first_step" in peaks else "first_step"
        if ended is not None:
            peaks[ended] = max(peaks.get(ended, 0), water.read())
            water.reset()

    water.reset()
    place = dict(devices="cpu") if device == "cpu" else {}
    result = fitune.train(
        f"random:{model}", data=str(data), out=str(out), on_event=on_event, **JOB, **place, **settings
    )
    peaks["result"] = water.read()
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    saved = [line["bytes"] for line in lines if line["event"] == "checkpoint"]
    adapter = sum(f.stat().st_size for f in (out / "adapter").rglob("*.safetensors"))
    data = next(line["lengths"] for line in lines if line["event"] == "data")
    return {"phases": peaks, "status": result["status"], "plan": json.loads((out / "plan.json").read_text()),
            "checkpoint_bytes": max(saved), "adapter_bytes": adapter, "tokens": data["tokens"]}  # fmt: skip


def run_merge(folder: Path) -> dict[str, Any]:
    """`fitune export --merged` of the run, in a process of its own."""
    from fitune.export import export_run
    from fitune.train.run_folder import RunFolder

    water = HighWater()
    water.reset()
    written = export_run(RunFolder.open_existing(folder / "run"), merged=True, out=folder / "merged")
    return {"phases": {"merge": water.read()}, "merged_bytes": written.size_bytes}


def measure(name: str, device: str) -> dict[str, Any]:
    """One case as a record, from child processes."""
    config, settings = CASES[name]
    with tempfile.TemporaryDirectory() as temp:
        record = child("case", name, device, temp)
        if settings["method"] != "full":
            merged = child("merge", name, device, temp)
            record["phases"] |= merged.pop("phases")
            record |= merged
    plan = record.pop("plan") | {"model": "random:config.json", "predicted": {}, "reasons": []}
    return {
        "name": name, "model": config, "job": JOB, "recipe": settings, "plan": plan,
        "platform": f"{platform.system()} {platform.machine()}", "device": device, "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "measured": {"phases": {k: {"host_bytes": v} for k, v in record.pop("phases").items()}, **record},
    }  # fmt: skip


def child(what: str, name: str, device: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", what, "--only", name, "--device", device, "--folder", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def versions() -> dict[str, str]:
    import importlib.metadata as meta

    import fitune

    return {"fitune": fitune.__version__, **{n: meta.version(n) for n in ("torch", "transformers", "safetensors")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder = Path(options.folder)
        made = run_merge(folder) if options.child == "merge" else run_case(*CASES[options.only], options.device, folder)
        print(json.dumps(made))
        return
    records = []
    for name in CASES:
        if options.only in name:
            records.append(measure(name, options.device))
            phases = records[-1]["measured"]["phases"]
            print(name, {k: round(v["host_bytes"] / 1024**2) for k, v in phases.items()}, flush=True)
    if not options.only:
        path = RESULTS / f"host-{options.device}-{datetime.date.today().isoformat()}.json"
        path.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
