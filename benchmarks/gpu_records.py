"""Measure training steps of true model shapes on this GPU and record them beside their predictions.

    python benchmarks/gpu_records.py CASE [CASE ...] --out benchmarks/results/NAME.json
    python benchmarks/gpu_records.py --list

Weights are random (seeded, made on the GPU): right for memory and speed, not for loss. Every case runs in its own
forked process, so that its peaks are its own. A record holds the job, the plan, predicted and measured peaks per phase,
versions and date. Cases that are in the output file already are passed over (use --again).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import bench
import numpy as np
from bench import GIB, LLAMA_8B

_ALL = dict(recompute="all")
CASES: dict[str, dict[str, Any]] = {
    "8b-nf4-1x2048": dict(model=LLAMA_8B, method="qlora", batch=1, seq_len=2048, **_ALL),
    "8b-nf4-4x512": dict(model=LLAMA_8B, method="qlora", batch=4, seq_len=512, **_ALL),
    "8b-nf4-4x2048": dict(model=LLAMA_8B, method="qlora", batch=4, seq_len=2048, **_ALL),
    "8b-nf4-1x2048-keep": dict(model=LLAMA_8B, method="qlora", batch=1, seq_len=2048, recompute="none"),
    "8b-nf4-4x2048-keep16": dict(model=LLAMA_8B, method="qlora", batch=4, seq_len=2048, recompute="16"),
    "8b-nf4-2x2048-by-1": dict(model=LLAMA_8B, method="qlora", batch=2, micro_batch=1, seq_len=2048, **_ALL),
    "8b-bf16-1x2048": dict(model=LLAMA_8B, method="lora", batch=1, seq_len=2048, **_ALL),
    "8b-bf16-4x2048": dict(model=LLAMA_8B, method="lora", batch=4, seq_len=2048, **_ALL),
    "8b-bf16-4x512-keep": dict(model=LLAMA_8B, method="lora", batch=4, seq_len=512, recompute="none"),
    "8b-int8-1x2048": dict(model=LLAMA_8B, method="qlora", base_format="int8", batch=1, seq_len=2048, **_ALL),
    "8b-fp4-1x2048-8bit": dict(
        model=LLAMA_8B, method="qlora", base_format="fp4", double_quant=False, batch=1, seq_len=2048,
        optimizer="adamw8bit", **_ALL,
    ),
    "llama2-7b-10gib-bf16": dict(recipe="examples/qlora-7b-10gb.yaml", cap_gib=10),
    "llama2-7b-10gib-fp16": dict(recipe="examples/qlora-7b-10gb.yaml", cap_gib=10, precision="fp16"),
    "qwen3-0.6b-full-4x1024": dict(model="random:Qwen/Qwen3-0.6B", method="full", batch=4, seq_len=1024),
    "gemma2-2b-lora-2x1024": dict(model="random:google/gemma-2-2b", method="lora", batch=2, seq_len=1024, **_ALL),
    "gemma3-1b-lora-2x2048": dict(model="random:google/gemma-3-1b-it", method="lora", batch=2, seq_len=2048, **_ALL),
    "qwen2.5-7b-nf4-2x1024-dropout": dict(
        model="random:Qwen/Qwen2.5-7B", method="qlora", batch=2, seq_len=1024, lora_dropout=0.05, **_ALL
    ),
    "qwen3-30b-a3b-nf4-1x2048": dict(
        model="random:Qwen/Qwen3-30B-A3B", method="qlora", batch=1, seq_len=2048, **_ALL
    ),
    "mistral-7b-nf4-1x8192": dict(
        model="random:mistralai/Mistral-7B-v0.3", method="qlora", batch=1, seq_len=8192, **_ALL
    ),
    "phi4-nf4-1x2048": dict(model="random:microsoft/phi-4", method="qlora", batch=1, seq_len=2048, **_ALL),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        print("\n".join(["overheads", *CASES]))
        return
    bench.import_before_forks()
    out = bench.Records(args.out)
    for name in args.cases or ["overheads", *CASES]:
        if name in out.names and not args.again:
            continue
        started = time.time()
        record = bench.forked_record(name, lambda name=name: work(name, args.steps))
        out.add(record)
        print(_row(record), f"[{time.time() - started:.0f} s]", flush=True)


def work(name: str, steps: int) -> dict[str, Any]:
    """The record of a case."""
    if name.startswith("profile:"):
        return profile(name.removeprefix("profile:"))
    return overheads() if name == "overheads" else measure(name, steps)


def overheads() -> dict[str, Any]:
    """What a process holds besides tensors: driver context and kernels, cuBLAS workspaces."""
    import torch

    free, total = torch.cuda.mem_get_info()
    context_first = total - free - torch.cuda.memory_reserved()
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = a @ a
    torch.nn.functional.linear(a, a, a[0])
    torch.addmm(result, a[:, :16].contiguous(), a[:16].contiguous())
    torch.cuda.synchronize()
    workspace = torch.cuda.memory_allocated() - before - result.untyped_storage().nbytes()
    free, total = torch.cuda.mem_get_info()
    return {**bench.header("overheads"), "context_at_start_bytes": context_first, "workspace_bytes": workspace,
            "context_bytes": total - free - torch.cuda.memory_reserved()}  # fmt: skip


def measure(name: str, steps: int) -> dict[str, Any]:
    """One case: plan, load, train a few steps, evaluate."""
    import torch

    from fitune import recipe as recipes
    from fitune.memory.constants import overheads as overheads_of
    from fitune.planner import make_plan
    from fitune.train.device import prepare
    from fitune.train.measure import Meter

    case = dict(CASES[name])
    cap_gib = case.pop("cap_gib", None)
    file = case.pop("recipe", None)
    values = recipes.load(Path(file)) if file else {}
    if file:
        values["model"] = f"random:{values['model']}"
    recipe = recipes.build(values | case | ({"vram": cap_gib} if cap_gib else {}))
    outside = max(bench.context_bytes(), overheads_of("cuda", torch.cuda.get_device_capability(0)).context_bytes)
    result = make_plan(recipe)
    prepare(result.plan, 0)
    if cap_gib:  # the cap is the driver's: what this process holds outside torch's allocator is taken off
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((cap_gib * GIB - outside) / total)
    meter = Meter("cuda")
    meter.reset()
    engine = bench.engine_of(recipe, result.plan)
    phases = {"load": meter.peaks()}
    seconds = []
    for step in range(steps):
        batches = bench.batches(result.plan, step, engine.built.model.config.vocab_size)
        meter.reset()
        torch.cuda.synchronize()
        started = time.perf_counter()
        outcome = engine.step(batches, step=step, lr=1e-4)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        phases["first_step" if step == 0 else "step"] = meter.peaks()
    meter.reset()
    engine.evaluate(bench.batches(result.plan, 0, engine.built.model.config.vocab_size))
    phases["eval"] = meter.peaks()
    step_s = float(np.median(seconds[2:]))
    top = {key: max(p[key] for p in phases.values()) for key in next(iter(phases.values()))}
    plan = result.plan
    return {
        **bench.header(name),
        "model": plan.model,
        "job": {"batch": plan.batch, "micro_batch": plan.micro_batch, "seq_len": plan.seq_len,
                "num_layers": plan.num_layers, "lora_r": plan.adapter.r if plan.adapter else None,
                "lora_targets": list(plan.adapter.targets) if plan.adapter else None},
        "recipe": recipe.as_dict(),
        "plan": plan.with_(predicted={}, reasons=()).as_dict(),
        "fits": result.fits,
        "cap_bytes": int(cap_gib * GIB) if cap_gib else None,
        "predicted": result.predicted,
        "measured": {**top, "step_s": step_s, "tokens_per_s": plan.batch * plan.seq_len / step_s, "loss": outcome.loss,
                     "phases": phases},
    }  # fmt: skip


def profile(name: str) -> dict[str, Any]:
    """Where the time of one step goes: GPU-busy seconds against wall seconds, and the costliest kernels."""
    import torch
    from torch.profiler import ProfilerActivity

    from fitune import recipe as recipes
    from fitune.planner import make_plan
    from fitune.train.device import prepare

    recipe = recipes.build(dict(CASES[name]))
    plan = make_plan(recipe).plan
    prepare(plan, 0)
    engine = bench.engine_of(recipe, plan)
    batches = bench.batches(plan, 0, engine.built.model.config.vocab_size)
    for step in range(3):
        engine.step(batches, step=step, lr=1e-4)
    torch.cuda.synchronize()
    started = time.perf_counter()
    engine.step(batches, step=3, lr=1e-4)
    torch.cuda.synchronize()
    wall_s = time.perf_counter() - started
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        engine.step(batches, step=4, lr=1e-4)
        torch.cuda.synchronize()
    rows = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    rows.sort(key=lambda e: -e.self_device_time_total)
    print(f"{name}: wall {wall_s:.3f} s, GPU busy {sum(e.self_device_time_total for e in rows) / 1e6:.3f} s, "
          f"{sum(e.count for e in rows if 'Memcpy' not in e.key)} kernels")  # fmt: skip
    for e in rows[:24]:
        print(f"  {e.self_device_time_total / 1e3:8.1f} ms {e.count:6d}  {e.key[:110]}")
    return {
        **bench.header(f"profile {name}"),
        "wall_s": wall_s,
        "busy_s": sum(e.self_device_time_total for e in rows) / 1e6,
    }


def _row(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"{record['name']:32} ERROR {record['error'][:300]}\n{record.get('traceback', '')[-1500:]}"
    if "wall_s" in record:
        return f"{record['name']}: wall {record['wall_s']:.3f} s, GPU busy {record['busy_s']:.3f} s"
    if record["name"] == "overheads":
        context, workspace = record["context_bytes"] / 2**20, record["workspace_bytes"] / 2**20
        return f"overheads: context {context:.0f} MiB, workspace {workspace:.1f} MiB"
    measured, cells = record["measured"], []
    for phase, fields in measured["phases"].items():
        predicted = record["predicted"]["phases"][phase]["peak_allocated_bytes"]
        actual = fields["peak_allocated_bytes"]
        cells.append(f"{phase} {actual / GIB:.3f} ({predicted / GIB:.3f}, {(predicted / actual - 1) * 100:+.2f} %)")
    reserved, device = measured["peak_reserved_bytes"] / GIB, measured["device_bytes"] / GIB
    speed = f"{measured['tokens_per_s']:8.0f} tok/s  reserved {reserved:.2f} device {device:.2f}"
    return f"{record['name']:30} {speed}  " + "  ".join(cells)


if __name__ == "__main__":
    main()
