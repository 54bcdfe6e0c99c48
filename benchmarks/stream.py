"""Measure streamed training against resident training of the same shapes on this GPU, beside the predictions.

    python benchmarks/stream.py --list               # every case, what it is for, the acceptance it belongs to
    python benchmarks/stream.py --list --acceptance 6  # with the predicted sizes
    python benchmarks/stream.py --budget-s 900       # the cases in their order; run again to go on
    python benchmarks/stream.py --acceptance 5       # those of one acceptance
    python benchmarks/stream.py CASE [CASE ...]
    python benchmarks/stream.py --all                # also the long ones
    python benchmarks/stream.py --predict            # beforehand, without a GPU: what an H200 should need, into POINTS
    python benchmarks/stream.py --tiny               # every case at tiny sizes, without a GPU: that none fails
    python benchmarks/stream.py --profile FOLDER CASE [CASE ...]  # where a step's time goes; nothing is recorded

Weights are random (seeded, made on the GPU). Every case (see `stream_cases.py`) runs in its own forked process; one
that is in the output file already is passed over (use --again), and none is begun after `--budget-s` seconds. Records
have the fields of `gpu_records.py`, and "link": bytes moved per step, the speed reached, the share of the time spent
waiting. Cases that were not predicted beforehand are predicted after they have run.

Ratios are against the resident case of the same tokens per step, in the same process: both take steps by turns, since
the processor of a rented machine may be half as fast a few seconds later. Memory is measured before the other is there.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import bench
import numpy as np
import stream_cases
import stream_equal
import stream_killed
import stream_profile
from bench import GIB
from stream_cases import CASES, EQUALITIES, Case, here, opened
from stream_limits import leave_ram, throttle

STEPS_OF_A_TURN = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/stream.json"))
    parser.add_argument(
        "--points", type=Path, default=Path("benchmarks/stream-points.json"), help="what --predict wrote"
    )
    parser.add_argument("--predict", action="store_true", help="only write what the cases should need")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=4, help="of each side where two take steps by turns")
    parser.add_argument("--budget-s", type=float, default=120.0)
    parser.add_argument("--acceptance", type=int, help="only its cases, and those they are compared with")
    parser.add_argument("--all", action="store_true", help="also the long cases")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true", help="with cases or --acceptance: also what they should need")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="a text per case, and no record")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, at tiny sizes; nothing is recorded")
    args = parser.parse_args()
    unknown = set(args.cases) - set(CASES) - set(EQUALITIES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if args.list:
        names = args.cases or (selected(args.acceptance, args.all) if args.acceptance is not None else [])
        print("\n".join(predicted_lines(names)) if names else listed())
        return
    names = args.cases or selected(args.acceptance, args.all or args.tiny)
    bench.import_before_forks()
    if args.tiny:
        failed = [name for name in names if not dry(name)]
        raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)
    if args.profile:
        profile([name for name in names if name in CASES and not CASES[name].killed], args.profile)
        return
    known = bench.Records(args.points)
    if args.predict:
        predict([name for name in names if name in CASES], known)
        return
    before = {record["name"]: record for record in known.records}
    out = bench.Records(args.out)
    began = time.time()
    for name in names:
        if name in out.names and not args.again:
            print(row(next(r for r in out.records if r["name"] == name)), flush=True)
            continue
        if time.time() - began > args.budget_s:
            print(f"{name}: not begun, {args.budget_s:.0f} s are over; run again to go on")
            continue
        started = time.time()
        record = bench.forked_record(name, lambda name=name: work(name, args, before=before.get(name)))
        out.add(record)
        print(row(record), f"[{time.time() - started:.0f} s]", flush=True)


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


def predicted_lines(names: list[str]) -> list[str]:
    """Of each case what it is for, and what of a card and of RAM it is predicted to need."""
    lines = []
    for name in names:
        case = CASES.get(name)
        lines.append(f"{name:40} {EQUALITIES[name] if case is None else case.why}")
        if case is not None:
            lines.append(f"{'':40} {stream_cases.expected(case)}")
    return lines


def predict(names: list[str], out: bench.Records) -> None:
    """Write what each case should need on an H200."""
    for name in names:
        started = time.time()
        case = stream_cases.on_h200(CASES[name])
        _, context, plan = stream_cases.planned(case, stream_cases.config_of(case.recipe["model"], case.layers, False))
        out.add({"name": name, "commit": bench.commit(), "plan": bench.decided(plan.as_dict()),
                 "predicted": predicted(context, plan, case.link_bytes_per_s)})  # fmt: skip
        said = out.records[-1]["predicted"]
        print(f"{name:40} {(said.get('peak_allocated_bytes') or 0) / GIB:.3f} GiB, step {said['step_s'] or 0:.3f} s"
              f" [{time.time() - started:.0f} s]", flush=True)  # fmt: skip


def profile(names: list[str], folder: Path) -> None:
    """Where the time of each case's fourth step goes."""
    for name in names:
        print(bench.forked_record(name, lambda name=name: profiled_case(name, folder / f"{name}.txt")), flush=True)


def profiled_case(name: str, path: Path) -> dict[str, Any]:
    """The seconds of each step, the last under the profiler."""
    from fitune.engine.engine import Engine

    _, _, planned, source = opened(CASES[name], tiny=False)
    engine = Engine(bench.filled(source, planned), planned)
    seconds = [timed(engine, step)[0] for step in range(3)]
    stream_profile.profiled(lambda: seconds.append(timed(engine, 3)[0]), path)
    return {"name": name, "seconds": [round(s, 4) for s in seconds], "file": str(path)}


def dry(name: str) -> bool:
    """A case at tiny sizes on the CPU, in a process of its own; whether it ran."""
    started = time.time()
    args = argparse.Namespace(steps=2, turns=2)
    record = bench.forked_record(name, lambda: work(name, args, tiny=True))
    print(row(record), f"[{time.time() - started:.0f} s]", flush=True)
    return "error" not in record


def work(
    name: str, args: argparse.Namespace, tiny: bool = False, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The record of a case. `before`: what was predicted of it beforehand."""
    if name in EQUALITIES:  # deterministic products; it also changes what cuBLAS holds
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if name == "equality-full":
        return stream_equal.equality_full(tiny)
    if name in EQUALITIES:
        return stream_equal.equality(name, tiny)
    if CASES[name].killed:
        return stream_killed.measure(name, CASES[name], tiny)
    case = stream_cases.on_cpu(CASES[name]) if tiny else CASES[name]
    return measure(name, case, args, tiny, before)


def measure(
    name: str, case: Case, args: argparse.Namespace, tiny: bool, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Load, train some steps; median of the later ones. A prediction that is missing follows and costs no time."""
    from fitune.engine.engine import Engine
    from fitune.engine.ring import Ring
    from fitune.train.measure import Meter

    limited = leave_ram(case.ram_bytes) if case.ram_bytes else None
    recipe, context, planned, source = opened(case, tiny)
    plan = here(planned, tiny)
    meter = Meter(plan.device)
    meter.reset()
    started = time.perf_counter()
    engine = Engine(bench.filled(source, plan), plan)
    _wait(plan)
    phases = {"load": meter.peaks() | {"seconds": time.perf_counter() - started}}
    if case.link_bytes_per_s and not tiny:
        throttle(engine.driver.weights, case.link_bytes_per_s)
    seconds, links, losses = [], [], []
    for step in range(case.steps or args.steps):
        meter.reset()
        took, result = timed(engine, step)
        seconds.append(took)
        links.append(result.link)
        losses.append(result.loss)
        phases["first_step" if step == 0 else "step"] = meter.peaks()
    engine.settle()
    if case.evaluates:
        meter.reset()
        engine.evaluate(bench.batches(plan, 0, engine.built.model.config.vocab_size))
        phases["eval"] = meter.peaks()
    beside = by_turns(engine, case, case.turns or args.turns, tiny) if case.against else None
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
    is_same = before is not None and bench.decided(before["plan"]) == bench.decided(planned.as_dict())
    said = before["predicted"] if before is not None and is_same else None
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
        "predicted": said or predicted(context, planned, case.link_bytes_per_s),
        "predicted_commit": before["commit"] if said and before else None,
        "against": case.against,
        "beside": beside,
        "throttled_to_bytes_per_s": case.link_bytes_per_s,
        "link": link,
        "store": sizes,
        "measured": {**top, "step_s": step_s, "tokens_per_s": plan.batch * plan.seq_len / step_s, "losses": losses,
                     "seconds": seconds, "phases": phases},
    }  # fmt: skip


def timed(engine: Any, step: int) -> tuple[float, Any]:
    """Seconds of a step on full rows, and its result."""
    batches = bench.batches(engine.plan, step, engine.built.model.config.vocab_size)
    _wait(engine.plan)
    started = time.perf_counter()
    result = engine.step(batches, step=step, lr=1e-4)
    _wait(engine.plan)
    return time.perf_counter() - started, result


def some_steps(engine: Any) -> float:
    """Seconds per step of some in a row, the last one with the updates in RAM that would go on beside the next step
    (else the other one's would be slowed by them)."""
    batches = [
        bench.batches(engine.plan, step, engine.built.model.config.vocab_size) for step in range(STEPS_OF_A_TURN)
    ]
    _wait(engine.plan)
    started = time.perf_counter()
    for step, each in enumerate(batches):
        engine.step(each, step=step, lr=1e-4)
    engine.settle()
    _wait(engine.plan)
    return (time.perf_counter() - started) / STEPS_OF_A_TURN


def by_turns(engine: Any, case: Case, turns: int, tiny: bool) -> dict[str, Any]:
    """The case's steps and those of the resident case that it is compared with, `STEPS_OF_A_TURN` after as many of the
    other's: seconds per step of each turn."""
    from fitune.engine.engine import Engine

    other = CASES[case.against or ""]
    if not tiny:
        import torch

        torch.cuda.set_per_process_memory_fraction(1.0)
    _, _, planned, source = opened(stream_cases.on_cpu(other) if tiny else other, tiny)
    plan = here(planned, tiny)
    resident = Engine(bench.filled(source, plan), plan)
    for step in range(2):
        timed(resident, step)
    own, theirs = [], []
    for turn in range(turns):
        order = [(engine, own), (resident, theirs)]
        for which, seconds in order if turn % 2 else order[::-1]:
            seconds.append(some_steps(which))
    rate, their_rate = (e.plan.batch * e.plan.seq_len for e in (engine, resident))
    ratios = [(rate / a) / (their_rate / b) for a, b in zip(own, theirs, strict=True)]
    return {
        "steps_of_a_turn": STEPS_OF_A_TURN,
        "seconds": own,
        "resident_seconds": theirs,
        "tokens_per_s_ratio": float(np.median(ratios)),
    }


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


def row(record: dict[str, Any]) -> str:
    """What a person reads of a record."""
    if "error" in record:
        return f"{record['name']:40} ERROR {record['error'][:300]}\n{record.get('traceback', '')[-1500:]}"
    if "killed" in record:
        return stream_killed.row(record)
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
    text = ""
    if record.get("beside"):
        text += f"  {record['beside']['tokens_per_s_ratio'] * 100:.1f} % of {record['against']}, by turns"
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
