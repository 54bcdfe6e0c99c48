"""Measure streamed training against resident training of the same shapes on this GPU.

    python benchmarks/stream.py                      # the cases of the first two minutes
    python benchmarks/stream.py --all --budget-s 900
    python benchmarks/stream.py CASE [CASE ...]
    python benchmarks/stream.py --list

Weights are random (seeded, made on the GPU). Every case runs in its own forked process; a case that is in the output
file already is passed over (use --again), and none is begun after `--budget-s` seconds, so that the script can be run
again and again. Records have the fields of `gpu_records.py`, and "link": bytes moved per step, the speed reached, the
share of the time spent waiting. Ratios are against the resident case of the same tokens per step.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import bench
import numpy as np
from bench import GIB, LLAMA_8B

RING = dict(stream_from="pinned", resident_layers=0, ring_buffers=2)
LEAN = dict(**RING, head_place="host", embedding_place="host", offload_inputs=True, loss_chunk=1024)
LEANEST = LEAN | dict(mlp_tiles=4, loss_chunk=512)
MAJOR = dict(accumulation_order="layer-major")
_ALL = dict(recompute="all")
_8B = dict(model=LLAMA_8B, method="qlora", seq_len=2048, **_ALL)
_BF16 = _8B | dict(method="lora")
# masters and state of adapters in host memory, updated there
LEAST = LEANEST | dict(optimizer_place="host", mlp_tiles=8, loss_chunk=256)
# full fine-tuning: 16 micro-batches of 2,048 tokens pass a layer together
_FULL = _8B | dict(method="full", batch=16, micro_batch=1, optimizer="adamw8bit")
_FULL_3B = _FULL | dict(model="random:meta-llama/Llama-3.2-3B", optimizer="adamw")
FULL_RING = dict(**RING, **MAJOR, offload_inputs=True, loss_chunk=256)


def _case(
    recipe: dict[str, Any], against: str | None = None, link_bytes_per_s: float | None = None, **changes: Any
) -> dict[str, Any]:
    return {"recipe": recipe, "changes": changes, "against": against, "link_bytes_per_s": link_bytes_per_s}


# name: recipe, changes of the plan, the resident case its speed is compared with
CASES: dict[str, dict[str, Any]] = {
    "8b-nf4-1x2048-resident": _case(_8B | dict(batch=1)),
    "8b-nf4-1x2048-ring": _case(_8B | dict(batch=1), "8b-nf4-1x2048-resident", **RING),
    "8b-nf4-1x2048-lean": _case(_8B | dict(batch=1), "8b-nf4-1x2048-resident", **LEAN),
    "8b-nf4-1x2048-leanest": _case(
        _8B | dict(batch=1, optimizer="adamw8bit"), "8b-nf4-1x2048-resident", **LEANEST
    ),
    "8b-nf4-4x2048-resident": _case(_8B | dict(batch=4)),
    "8b-nf4-4x2048-by-1-major-lean": _case(
        _8B | dict(batch=4, micro_batch=1), "8b-nf4-4x2048-resident", **LEAN, **MAJOR
    ),
    "8b-bf16-4x2048-by-1-major-lean": _case(
        _BF16 | dict(batch=4, micro_batch=1), "8b-nf4-4x2048-resident", **LEAN, **MAJOR
    ),
    "8b-bf16-1x2048-leanest": _case(
        _BF16 | dict(batch=1, optimizer="adamw8bit"), "8b-nf4-1x2048-resident", **LEANEST
    ),
}  # fmt: skip
CASES |= {
    "8b-nf4-1x2048-least": _case(_8B | dict(batch=1), "8b-nf4-1x2048-resident", **LEAST),
    "8b-full-16x2048-resident": _case(_FULL),
    "8b-full-16x2048-streamed-8bit": _case(
        _FULL, "8b-full-16x2048-resident", **FULL_RING, optimizer_place="streamed"
    ),
}  # fmt: skip
FIRST = (*CASES, "equality", "equality-full")
MORE: dict[str, dict[str, Any]] = {
    "3b-full-16x2048-resident": _case(_FULL_3B),
    "3b-full-16x2048-host-fp32": _case(_FULL_3B, "3b-full-16x2048-resident", **FULL_RING, optimizer_place="host"),
    "3b-full-16x2048-streamed-fp32": _case(
        _FULL_3B, "3b-full-16x2048-resident", **FULL_RING, optimizer_place="streamed"
    ),
    "3b-full-16x2048-host-fp32-unclipped": _case(
        _FULL_3B | dict(clip=0), "3b-full-16x2048-resident", **FULL_RING, optimizer_place="host"
    ),
    "8b-nf4-1x2048-least-streamed-8bit": _case(
        _8B | dict(batch=1, optimizer="adamw8bit"), "8b-nf4-1x2048-resident",
        **LEAST | dict(optimizer_place="streamed"),
    ),
    "8b-nf4-1x2048-ring-3": _case(_8B | dict(batch=1), "8b-nf4-1x2048-resident", **RING | dict(ring_buffers=3)),
    "8b-nf4-1x2048-half-resident": _case(
        _8B | dict(batch=1), "8b-nf4-1x2048-resident", **RING | dict(resident_layers=16)
    ),
    "8b-nf4-4x2048-ring-12gb-s": _case(
        _8B | dict(batch=4), "8b-nf4-4x2048-resident", **RING, link_bytes_per_s=12e9
    ),
    "8b-nf4-1x2048-ring-25gb-s": _case(
        _8B | dict(batch=1), "8b-nf4-1x2048-resident", **RING, link_bytes_per_s=25e9
    ),
    "8b-bf16-4x2048-ring-25gb-s": _case(
        _BF16 | dict(batch=4), "8b-nf4-4x2048-resident", **RING, link_bytes_per_s=25e9
    ),
    "8b-nf4-1x2048-pageable": _case(
        _8B | dict(batch=1), "8b-nf4-1x2048-resident", **RING | dict(stream_from="pageable")
    ),
    "8b-nf4-1x2048-disk": _case(_8B | dict(batch=1), "8b-nf4-1x2048-resident", **RING | dict(stream_from="disk")),
    "8b-nf4-1x2048-ring-keep": _case(
        _8B | dict(batch=1, recompute="none"), "8b-nf4-1x2048-resident", **RING
    ),
    "8b-nf4-4x2048-ring": _case(_8B | dict(batch=4), "8b-nf4-4x2048-resident", **RING),
    "8b-nf4-4x2048-by-1-ring": _case(_8B | dict(batch=4, micro_batch=1), "8b-nf4-4x2048-resident", **RING),
    "8b-bf16-4x2048-ring": _case(_BF16 | dict(batch=4), "8b-nf4-4x2048-resident", **RING),
    "8b-nf4-1x65536-leanest": _case(
        _8B | dict(batch=1, seq_len=65536, optimizer="adamw8bit"), None, **LEANEST | dict(mlp_tiles=32)
    ),
    "70b-nf4-1x4096-leanest": _case(
        _8B | dict(model="random:meta-llama/Llama-3.1-70B", batch=1, seq_len=4096, optimizer="adamw8bit"), None,
        **LEANEST | dict(mlp_tiles=8),
    ),
    "qwen3-30b-a3b-nf4-1x2048-attention": _case(
        _8B | dict(model="random:Qwen/Qwen3-30B-A3B", batch=1, lora_targets=["q_proj", "k_proj", "v_proj", "o_proj"]),
        None, **LEAN,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/stream.json"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=120.0)
    parser.add_argument("--all", action="store_true", help="also the longer cases")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    names = args.cases or [*FIRST, *(MORE if args.all else ())]
    if args.list:
        print("\n".join([*FIRST, *MORE]))
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the equality case's deterministic products
    bench.import_before_forks()
    out = bench.Records(args.out)
    began = time.time()
    for name in names:
        if name in out.names and not args.again:
            print(row(next(r for r in out.records if r["name"] == name), out.records), flush=True)
            continue
        if time.time() - began > args.budget_s:
            print(f"{name}: not begun, {args.budget_s:.0f} s are over; run again to go on")
            continue
        started = time.time()
        record = bench.forked_record(name, lambda name=name: work(name, args.steps))
        out.add(record)
        print(row(record, out.records), f"[{time.time() - started:.0f} s]", flush=True)


def work(name: str, steps: int) -> dict[str, Any]:
    """The record of a case."""
    whole = {"equality": equality, "equality-full": equality_full}
    return whole[name]() if name in whole else measure(name, steps)


def _plan(case: dict[str, Any]) -> tuple[Any, Any]:
    from fitune import recipe as recipes
    from fitune.planner import make_plan
    from fitune.train.device import prepare

    recipe = recipes.build(dict(case["recipe"]))
    plan = make_plan(recipe).plan.with_(**case["changes"])
    prepare(plan, 0)
    return recipe, plan


def measure(name: str, steps: int) -> dict[str, Any]:
    """Load, train some steps; median of the later ones."""
    import torch

    from fitune.engine.ring import Ring
    from fitune.train.measure import Meter

    case = CASES.get(name) or MORE[name]
    recipe, plan = _plan(case)
    meter = Meter("cuda")
    meter.reset()
    started = time.perf_counter()
    engine = bench.engine_of(recipe, plan)
    phases = {"load": meter.peaks() | {"seconds": time.perf_counter() - started}}
    if case["link_bytes_per_s"]:
        _throttle(engine.driver.weights, case["link_bytes_per_s"])
    vocab_size = engine.built.model.config.vocab_size
    seconds, links, losses = [], [], []
    for step in range(steps):
        batches = bench.batches(plan, step, vocab_size)
        meter.reset()
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = engine.step(batches, step=step, lr=1e-4)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        links.append(result.link)
        losses.append(result.loss)
        phases["first_step" if step == 0 else "step"] = meter.peaks()
    meter.reset()
    engine.evaluate(bench.batches(plan, 0, vocab_size))
    phases["eval"] = meter.peaks()
    step_s = float(np.median(seconds[2:] or seconds))
    keys = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes")
    top = {key: max(p[key] for p in phases.values()) for key in keys}
    link = None
    if links[-1] is not None:
        link = {
            "bytes_moved": links[-1].bytes_moved,
            "link_bytes_per_s": links[-1].link_bytes_per_s,
            "wait_share": float(np.median([x.wait_share(s) for x, s in zip(links, seconds, strict=True)][2:] or [0])),
        }
    ring = engine.driver.weights
    sizes = None
    if isinstance(ring, Ring):
        store = engine.built.streamed
        sizes = {"ring_bytes": len(ring.slots) * ring.buffer_bytes,
                 "layer_bytes": store.largest_bytes if store else 0,
                 "store_bytes": store.total_bytes if store else 0,
                 "refused": store.refusals() if store else []}  # fmt: skip
    return {
        **bench.header(name),
        "model": plan.model,
        "job": {"batch": plan.batch, "micro_batch": plan.micro_batch, "seq_len": plan.seq_len,
                "num_layers": plan.num_layers, "lora_r": plan.adapter.r if plan.adapter else None,
                "lora_targets": list(plan.adapter.targets) if plan.adapter else None},
        "recipe": recipe.as_dict(),
        "plan": plan.with_(predicted={}, reasons=()).as_dict(),
        "cap_bytes": None,
        "predicted": None,
        "against": case["against"],
        "throttled_to_bytes_per_s": case["link_bytes_per_s"],
        "link": link,
        "store": sizes,
        "measured": {**top, "step_s": step_s, "tokens_per_s": plan.batch * plan.seq_len / step_s, "losses": losses,
                     "seconds": seconds, "phases": phases},
    }  # fmt: skip


def _throttle(ring: Any, bytes_per_s: float) -> None:
    """Make the link as slow as another machine's: after each copy its stream sleeps for the rest of the time that the
    copy would take there. (The recorded link speed stays that of the copies themselves.)"""
    import torch

    fetch = ring._fetch
    cycles_per_s = _clock()
    own = _copy_speed(ring)

    def slow(item: Any, slot: Any) -> None:
        fetch(item, slot)
        num_bytes = ring._origin(item).num_bytes
        missing_s = num_bytes / bytes_per_s - num_bytes / own
        with torch.cuda.stream(ring._stream):
            torch.cuda._sleep(int(max(0.0, missing_s) * cycles_per_s))
        slot.ready.record(ring._stream)

    ring._fetch = slow


def _clock() -> float:
    """Cycles per second of `torch.cuda._sleep`."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        torch.cuda._sleep(100_000_000)
        end.record()
        torch.cuda.synchronize()
    return 100_000_000 / (begin.elapsed_time(end) / 1e3)


def _copy_speed(ring: Any) -> float:
    """Bytes per second of the real link, from one layer's copy."""
    import torch

    buffer = ring.streamed.backing.flat(next(iter(ring.streamed.layouts))).tensor
    target = ring.slots[0].buffer[: buffer.numel()]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        begin.record()
        target.copy_(buffer, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
    return buffer.numel() / (begin.elapsed_time(end) / 1e3)


def equality() -> dict[str, Any]:
    """Loss and adapter gradients of two steps, streamed against resident, with deterministic kernels: bit for bit.
    Four layers of the 8B shape, NF4 and bf16; kept, recomputed, offloaded; a head in tiles within its own noise."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    found = {}
    for base in ("nf4", "bf16"):
        resident = _steps(base, {})
        again = _steps(base, {})
        variants = {
            "twice the same": again,
            "ring of 2": _steps(base, RING),
            "ring of 3, 3 layers resident": _steps(base, RING | dict(ring_buffers=3, resident_layers=3)),
            "inputs offloaded": _steps(base, RING | dict(offload_inputs=True)),
            "nothing recomputed": _steps(base, RING | dict(recompute_layers=0)),
            "pageable": _steps(base, RING | dict(stream_from="pageable")),
            "head in tiles": _steps(base, LEAN),
        }
        for name, other in variants.items():
            found[f"{base}, {name}"] = _difference(resident, other)
    return {**bench.header("equality"), "differences": found}


def equality_full() -> dict[str, Any]:
    """Masters after three clipped updates of full fine-tuning (two layers of the 3B shape), in host memory against on
    the device: within fp32 rounding with fp32 state; 8-bit state against its own on the device."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    found = {}
    for optimizer in ("adamw", "adamw8bit"):
        resident = _masters(optimizer, {})
        for place in ("host", "streamed"):
            other = _masters(optimizer, FULL_RING | dict(optimizer_place=place))
            found[f"{optimizer}, {place}"] = _difference(resident, other)
        found[f"{optimizer}, twice the same"] = _difference(resident, _masters(optimizer, {}))
    return {**bench.header("equality-full"), "differences": found}


def _masters(optimizer: str, changes: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Losses of three steps, and how far every master has moved in them."""
    engine, recipe, plan = _small(_FULL_3B | dict(optimizer=optimizer, batch=4, seq_len=512), changes, layers=2)
    before = {name: tensor.clone() for name, tensor in engine.trained_tensors().items()}
    losses = []
    for step in range(3):
        batches = bench.batches(plan, step, engine.built.model.config.vocab_size)
        losses.append(engine.step(batches, step=step, lr=1e-4).loss)
    moved = {f"0|{name}": tensor - before[name] for name, tensor in engine.trained_tensors().items()}
    _let_go(engine)
    return losses, moved


def _small(recipe: dict[str, Any], changes: dict[str, Any], layers: int) -> tuple[Any, Any, Any]:
    """(engine, recipe, plan) of some layers of a shape."""
    from fitune.engine.engine import Engine
    from fitune.model.source import resolve

    made, plan = _plan({"recipe": recipe, "changes": {}})
    plan = plan.with_(num_layers=layers, recompute_layers=layers).with_(**changes)
    source = resolve(made.model, weights=True)
    source.config.num_hidden_layers = layers
    return Engine(bench.filled(source, plan), plan), made, plan


def _let_go(engine: Any) -> None:
    """Before the next model is made."""
    import gc

    import torch

    if engine.built.streamed is not None:
        engine.built.source.close()
    engine.driver.ready = None
    del engine
    gc.collect()
    torch.cuda.empty_cache()


def _steps(base: str, changes: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    recipe = _BF16 | dict(batch=1, base_format=base, seq_len=1024)
    engine, made, plan = _small(recipe, changes, layers=4)
    found = _caught(engine, made, plan)
    _let_go(engine)
    return found


def _caught(engine: Any, recipe: Any, plan: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses of two steps, and the gradients before each update."""
    losses: list[float] = []
    caught: dict[str, Any] = {}
    update = engine._update

    def catch(lr: float, norm: Any) -> None:
        for name, (_, master) in engine.masters.pairs.items():
            caught[f"{len(losses)}|{name}"] = master.grad.to("cpu", copy=True)
        update(lr, norm)

    engine._update = catch
    for step in range(2):
        batches = bench.batches(plan, step, engine.built.model.config.vocab_size)
        losses.append(engine.step(batches, step=step, lr=1e-3).loss)
    del engine._update  # the engine and the function hold each other
    return losses, caught


def _difference(one: tuple[list[float], dict[str, Any]], other: tuple[list[float], dict[str, Any]]) -> dict[str, Any]:
    """Both steps must be identical to the bit; where they are not, the first step's gradients say by how much (Adam's
    first update makes steps of full size of the smallest differences)."""
    import torch

    same = one[0] == other[0] and all(torch.equal(g, other[1][n]) for n, g in one[1].items())
    first = {n: (g, other[1][n]) for n, g in one[1].items() if n.startswith("0|") and bool(g.any())}
    largest = max(float((a - b).norm() / a.norm()) for a, b in first.values())
    return {"bit_identical": same, "losses": [one[0], other[0]], "largest_relative": largest}


def row(record: dict[str, Any], records: list[dict[str, Any]]) -> str:
    if "error" in record:
        return f"{record['name']:34} ERROR {record['error'][:300]}\n{record.get('traceback', '')[-1500:]}"
    if "differences" in record:
        lines = [f"  {name:36} {'identical' if d['bit_identical'] else 'DIFFERENT'}  {d['largest_relative']:.2e}"
                 f"  losses {d['losses']}" for name, d in record["differences"].items()]  # fmt: skip
        return "equality\n" + "\n".join(lines)
    measured = record["measured"]
    peak = measured["peak_allocated_bytes"] / GIB
    text = (f"{record['name']:34} {measured['tokens_per_s']:7.0f} tok/s  peak {peak:.3f}"
            f" reserved {measured['peak_reserved_bytes'] / GIB:.2f} device {measured['device_bytes'] / GIB:.2f}"
            f" host {measured['host_bytes'] / GIB:.1f} GiB  loss {measured['losses'][-1]:.4f}")  # fmt: skip
    by_phase = {name: fields["peak_allocated_bytes"] for name, fields in measured["phases"].items()}
    text += "  (" + ", ".join(f"{name} {peak / GIB:.3f}" for name, peak in by_phase.items()) + ")"
    other = next((r for r in records if r["name"] == record["against"] and "measured" in r), None)
    if other is not None:
        text += f"  {measured['tokens_per_s'] / other['measured']['tokens_per_s'] * 100:.1f} % of resident"
    if record["link"]:
        link = record["link"]
        text += (f"  {link['bytes_moved'] / 1e9:.1f} GB at {(link['link_bytes_per_s'] or 0) / 1e9:.1f} GB/s, "
                 f"waits {link['wait_share'] * 100:.1f} %")  # fmt: skip
    return text


if __name__ == "__main__":
    main()
