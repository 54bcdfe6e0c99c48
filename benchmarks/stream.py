"""Measure streamed training against resident training of the same shapes on this GPU, beside the predictions.

    python benchmarks/stream.py --list               # every case, what it is for, the acceptance it belongs to
    python benchmarks/stream.py --budget-s 900       # the cases in their order; run again to go on
    python benchmarks/stream.py --acceptance 5       # those of one acceptance
    python benchmarks/stream.py CASE [CASE ...]
    python benchmarks/stream.py --all                # also the long ones
    python benchmarks/stream.py --tiny               # every case at tiny sizes, without a GPU: that none fails

Weights are random (seeded, made on the GPU). Every case (see `stream_cases.py`) runs in its own forked process; one
that is in the output file already is passed over (use --again), and none is begun after `--budget-s` seconds. Records
have the fields of `gpu_records.py`, and "link": bytes moved per step, the speed reached, the share of the time spent
waiting. Ratios are against the resident case of the same tokens per step.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import bench
import numpy as np
import stream_cases
from bench import GIB
from stream_cases import CASES, EQUALITIES, FULL_3B, FULL_RING, LEAN, RING, Case

_SMALL = dict(method="lora", base_format="bf16", batch=1, seq_len=1024, recompute="all")
_FAMILIES = {
    "equality": bench.LLAMA_8B,
    "equality-qwen3": "random:Qwen/Qwen3-8B",
    "equality-gemma3": "random:google/gemma-3-4b-pt",
    "equality-moe": "random:Qwen/Qwen3-30B-A3B",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/stream.json"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=120.0)
    parser.add_argument("--acceptance", type=int, help="only its cases, and those they are compared with")
    parser.add_argument("--all", action="store_true", help="also the long cases")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, at tiny sizes; nothing is recorded")
    args = parser.parse_args()
    unknown = set(args.cases) - set(CASES) - set(EQUALITIES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if args.list:
        print(listed())
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the equality cases' deterministic products
    names = args.cases or selected(args.acceptance, args.all or args.tiny)
    bench.import_before_forks()
    if args.tiny:
        failed = [name for name in names if not dry(name)]
        raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)
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


def selected(acceptance: int | None, with_long: bool) -> list[str]:
    """Names of cases in their order: all, or an acceptance's with those they are compared with."""
    chosen = {name: case for name, case in CASES.items() if with_long or not case.long}
    equal = {name: int(why.partition(":")[0]) for name, why in EQUALITIES.items()}
    if acceptance is None:
        return [*chosen, *equal]
    own = {name: case for name, case in chosen.items() if case.acceptance == acceptance}
    against = dict.fromkeys(case.against for case in own.values() if case.against)
    return [*against, *own, *(name for name, number in equal.items() if number == acceptance)]


def listed() -> str:
    """A line per case."""
    lines = [f"{name:40} {case.acceptance or '-'}: {case.why}{' (long)' if case.long else ''}"
             for name, case in CASES.items()]  # fmt: skip
    return "\n".join(lines + [f"{name:40} {why}" for name, why in EQUALITIES.items()])


def dry(name: str) -> bool:
    """A case at tiny sizes on the CPU, in a process of its own; whether it ran."""
    started = time.time()
    record = bench.forked_record(name, lambda: work(name, 2, tiny=True))
    print(row(record, [record]), f"[{time.time() - started:.0f} s]", flush=True)
    return "error" not in record


def work(name: str, steps: int, tiny: bool = False) -> dict[str, Any]:
    """The record of a case."""
    if name == "equality-full":
        return equality_full(tiny)
    if name in EQUALITIES:
        return equality(name, tiny)
    case = stream_cases.on_cpu(CASES[name]) if tiny else CASES[name]
    return measure(name, case, steps, tiny)


def _opened(case: Case, tiny: bool) -> tuple[Any, Any, Any, Any]:
    """(recipe, context, plan, source) of a case; the plan's device is the CPU where it is tiny."""
    from fitune.model.source import resolve
    from fitune.train.device import prepare

    config = stream_cases.config_of(case.recipe["model"], case.layers, tiny)
    recipe, context, plan = stream_cases.planned(case, config)
    source = resolve(recipe.model, weights=True)
    if config is not None:
        source = dataclasses.replace(source, config=config)
    if not tiny:
        prepare(plan, 0)
    return recipe, context, plan, source


def _here(plan: Any, tiny: bool) -> Any:
    """The plan as it is run."""
    return plan.with_(device="cpu", device_name="CPU", attention="cpu", budget_bytes=None) if tiny else plan


def measure(name: str, case: Case, steps: int, tiny: bool) -> dict[str, Any]:
    """Load, train some steps; median of the later ones. Then the prediction, so that it costs no measurement."""
    from fitune.engine.engine import Engine
    from fitune.engine.ring import Ring
    from fitune.train.measure import Meter

    limited = leave_ram(case.ram_bytes) if case.ram_bytes else None
    recipe, context, planned, source = _opened(case, tiny)
    plan = _here(planned, tiny)
    meter = Meter(plan.device)
    meter.reset()
    started = time.perf_counter()
    engine = Engine(bench.filled(source, plan), plan)
    _wait(plan)
    phases = {"load": meter.peaks() | {"seconds": time.perf_counter() - started}}
    if case.link_bytes_per_s and not tiny:
        _throttle(engine.driver.weights, case.link_bytes_per_s)
    vocab_size = engine.built.model.config.vocab_size
    seconds, links, losses = [], [], []
    for step in range(case.steps or steps):
        batches = bench.batches(plan, step, vocab_size)
        meter.reset()
        _wait(plan)
        started = time.perf_counter()
        result = engine.step(batches, step=step, lr=1e-4)
        _wait(plan)
        seconds.append(time.perf_counter() - started)
        links.append(result.link)
        losses.append(result.loss)
        phases["first_step" if step == 0 else "step"] = meter.peaks()
    engine.settle()
    if case.evaluates:
        meter.reset()
        engine.evaluate(bench.batches(plan, 0, vocab_size))
        phases["eval"] = meter.peaks()
    step_s = float(np.median(seconds[2:] or seconds[-1:]))
    keys = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes")
    top = {key: max((p[key] or 0) for p in phases.values()) for key in keys}
    link = None
    if links[-1] is not None:
        shares = [x.wait_share(s) for x, s in zip(links, seconds, strict=True)]
        link = {
            "bytes_moved": links[-1].bytes_moved,
            "link_bytes_per_s": links[-1].link_bytes_per_s,
            "wait_share": float(np.median(shares[2:] or shares[-1:])),
        }
    store = engine.built.streamed
    sizes = None
    if isinstance(engine.driver.weights, Ring):
        ring = engine.driver.weights
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
        "why": case.why,
        "acceptance": case.acceptance,
        "cap_bytes": int(case.recipe["vram"] * GIB) if "vram" in case.recipe else None,
        "ram_left": limited,
        "num_trained": sum(p.numel() for _, p in engine.masters.pairs.values()),
        "predicted": predicted(context, planned, case.link_bytes_per_s),
        "against": case.against,
        "throttled_to_bytes_per_s": case.link_bytes_per_s,
        "link": link,
        "store": sizes,
        "measured": {**top, "step_s": step_s, "tokens_per_s": plan.batch * plan.seq_len / step_s, "losses": losses,
                     "seconds": seconds, "phases": phases},
    }  # fmt: skip


def predicted(context: Any, plan: Any, link_bytes_per_s: float | None) -> dict[str, Any]:
    """Peaks per phase and the step's time; where there is none, why."""
    from fitune import speed
    from fitune.errors import UserError
    from fitune.memory.cut import NotRegular
    from fitune.memory.phases import FIELDS
    from fitune.planner.phases import phases_of

    found: dict[str, Any] = {}
    try:
        values = phases_of(context, plan).as_dict()
        found = {key: values[key] for key in (*FIELDS, "peak_at")}
        found["phases"] = {phase: {key: fields[key] for key in FIELDS} for phase, fields in values["phases"].items()}
    except (UserError, NotRegular, AssertionError) as error:
        found["memory_error"] = f"{type(error).__name__}: {error}"
    rates = context.target.calibration.rates if context.target.calibration is not None else {}
    if link_bytes_per_s:
        rates = {**rates, "host_to_device_bytes_per_s": link_bytes_per_s, "device_to_host_bytes_per_s": None}
    load = speed.Workload(context.row_width(plan))
    made = speed.predict(plan, context.decoder, machine=context.machine, calibration=rates, workload=load)
    return found | {"step_s": made.step_s, "tokens_per_s": made.tokens_per_s, "bound": made.bound}


def _wait(plan: Any) -> None:
    if plan.device == "cuda":
        import torch

        torch.cuda.synchronize()


def leave_ram(num_bytes: int) -> str:
    """Leave this process so much host memory; says how. In a control group of its own where one can be made; else
    another process takes up the rest (the first to be killed if memory runs out)."""
    import re

    own = re.search(r"^0::(.*)$", Path("/proc/self/cgroup").read_text(), re.M)
    group = Path("/sys/fs/cgroup") / (own[1].strip("/") if own else "") / f"stream-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.max").write_text(str(num_bytes))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        return f"control group of {num_bytes / GIB:.0f} GiB"
    except OSError:
        return _taken_up(num_bytes)


def _taken_up(left_bytes: int) -> str:
    import mmap
    import threading

    from fitune.hardware.host import memory as host_memory

    taken = host_memory(Path("/")).available_bytes - left_bytes
    if taken <= 0:
        return "there is no more"
    ready, told = os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        Path("/proc/self/oom_score_adj").write_text("1000")
        part = -(-taken // 16 // mmap.PAGESIZE) * mmap.PAGESIZE
        rooms = [mmap.mmap(-1, part) for _ in range(16)]
        fill = [threading.Thread(target=_touch, args=(room,)) for room in rooms]
        for thread in fill:
            thread.start()
        for thread in fill:
            thread.join()
        os.write(told, b".")
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(0)
    os.read(ready, 1)
    return f"another process holds {taken / GIB:.0f} GiB"


def _touch(room: Any) -> None:
    view = np.frombuffer(room, np.uint8)
    for start in range(0, len(view), 2**28):  # numpy lets other threads run meanwhile
        view[start : start + 2**28] = 1


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


def equality(name: str, tiny: bool) -> dict[str, Any]:
    """Loss and adapter gradients of two steps, streamed against resident, with deterministic kernels: bit for bit.
    Four layers of a shape, NF4 and bf16; kept, recomputed, offloaded; a head in tiles within its own noise."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    found = {}
    for base in ("nf4", "bf16"):
        recipe = _SMALL | dict(model=_FAMILIES[name], base_format=base)
        resident = _steps(recipe, {}, tiny)
        variants = {
            "twice the same": {},
            "ring of 2": RING,
            "ring of 3, 3 layers resident": RING | dict(ring_buffers=3, resident_layers=3),
            "inputs offloaded": RING | dict(offload_inputs=True),
            "nothing recomputed": RING | dict(recompute_layers=0),
            "pageable": RING | dict(stream_from="pageable"),
            "head in tiles": LEAN,
        }
        for way, changes in variants.items():
            found[f"{base}, {way}"] = _difference(resident, _steps(recipe, changes, tiny))
    return {**bench.header(name), "differences": found}


def equality_full(tiny: bool) -> dict[str, Any]:
    """Masters after three clipped updates of full fine-tuning (two layers of the 3B shape, one micro-batch, so that
    gradients are the same), in host memory against on the device: within fp32 rounding with fp32 state; 8-bit state
    against its own on the device."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    found = {}
    plain = dict(loss_chunk=FULL_RING["loss_chunk"])  # products of the same shapes
    for optimizer in ("adamw", "adamw8bit"):
        resident = _masters(optimizer, plain, tiny)
        for place in ("host", "streamed"):
            other = _masters(optimizer, FULL_RING | dict(optimizer_place=place), tiny)
            found[f"{optimizer}, {place}"] = _difference(resident, other)
        found[f"{optimizer}, twice the same"] = _difference(resident, _masters(optimizer, plain, tiny))
    return {**bench.header("equality-full"), "differences": found}


def _masters(optimizer: str, changes: dict[str, Any], tiny: bool) -> tuple[list[float], dict[str, Any]]:
    """Losses of three steps, and how far every master has moved in them."""
    engine, plan = _small(FULL_3B | dict(optimizer=optimizer, batch=1, seq_len=512), changes, 2, tiny)
    before = {name: tensor.clone() for name, tensor in engine.trained_tensors().items()}
    losses = []
    for step in range(3):
        batches = bench.batches(plan, step, engine.built.model.config.vocab_size)
        losses.append(engine.step(batches, step=step, lr=1e-4).loss)
    moved = {f"0|{name}": tensor - before[name] for name, tensor in engine.trained_tensors().items()}
    _let_go(engine)
    return losses, moved


def _small(recipe: dict[str, Any], changes: dict[str, Any], layers: int, tiny: bool) -> tuple[Any, Any]:
    """(engine, plan) of some layers of a shape."""
    from fitune.engine.engine import Engine

    case = Case("", recipe, changes, layers=layers)
    _, _, plan, source = _opened(stream_cases.on_cpu(case) if tiny else case, tiny)
    plan = _here(plan, tiny)
    return Engine(bench.filled(source, plan), plan), plan


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


def _steps(recipe: dict[str, Any], changes: dict[str, Any], tiny: bool) -> tuple[list[float], dict[str, Any]]:
    engine, plan = _small(recipe, changes, 4, tiny)
    found = _caught(engine, plan)
    _let_go(engine)
    return found


def _caught(engine: Any, plan: Any) -> tuple[list[float], dict[str, Any]]:
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
    """What a person reads of a record."""
    if "error" in record:
        return f"{record['name']:40} ERROR {record['error'][:300]}\n{record.get('traceback', '')[-1500:]}"
    if "differences" in record:
        lines = [f"  {name:36} {'identical' if d['bit_identical'] else 'DIFFERENT'}  {d['largest_relative']:.2e}"
                 f"  losses {d['losses']}" for name, d in record["differences"].items()]  # fmt: skip
        return f"{record['name']}\n" + "\n".join(lines)
    measured, said = record["measured"], record["predicted"]
    lines = [
        f"{record['name']:40} {measured['tokens_per_s']:7.0f} tok/s  step {measured['step_s']:.3f} s"
        f" ({_beside(said['step_s'], measured['step_s'])})  loss {measured['losses'][-1]:.4f}  {record['why']}"
    ]
    by_phase = ", ".join(f"{name} {(fields['peak_allocated_bytes'] or 0) / GIB:.3f}"
                         for name, fields in measured["phases"].items())  # fmt: skip
    sizes = []
    for key in ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes"):
        beside = _beside(said.get(key), measured[key])
        sizes.append(f"{key.removesuffix('_bytes')} {measured[key] / GIB:.3f} ({beside})")
    lines.append(f"    GiB: {', '.join(sizes)}; {by_phase}; load {measured['phases']['load']['seconds']:.0f} s")
    if "memory_error" in said:
        lines.append(f"    no prediction: {said['memory_error']}")
    other = next((r for r in records if r["name"] == record["against"] and "measured" in r), None)
    text = ""
    if other is not None:
        text += f"  {measured['tokens_per_s'] / other['measured']['tokens_per_s'] * 100:.1f} % of {record['against']}"
    if record["link"]:
        link = record["link"]
        text += (f"  {link['bytes_moved'] / 1e9:.1f} GB at {(link['link_bytes_per_s'] or 0) / 1e9:.1f} GB/s, "
                 f"waits {link['wait_share'] * 100:.1f} %")  # fmt: skip
    if record["ram_left"]:
        text += f"  {record['ram_left']}"
    return "\n".join([*lines, f"  {text}"] if text else lines)


def _beside(said: float | None, measured: float | None) -> str:
    """By how much a prediction is off."""
    return f"predicted {said / measured - 1:+.1%}" if said and measured else "not predicted"


if __name__ == "__main__":
    main()
