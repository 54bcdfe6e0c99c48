"""Measure a matrix of configurations on this GPU beside their predictions, and runs at the edge of a memory cap.

    python benchmarks/measure.py predict --gpu h200 --points POINTS.json     # no GPU needed
    python benchmarks/measure.py run --points POINTS.json --out benchmarks/results/NAME.json
    python benchmarks/measure.py list

`predict` writes every point of `matrix.py` with its plan, its prediction and the commit of the code: those of the
matrix, and for every memory cap lengths whose predicted driver-counted peak is a given share of the cap. `run` measures
them, the latter below that cap.

Weights are random (seeded, made on the GPU): right for memory and speed, not for loss. Every group of `matrix.py` runs
in its own forked process, which makes its weights once; each point gets a fresh engine and an emptied cache.
Points that are in the output already are passed over, so that a run can be continued. A record has the format of
`gpu_records.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import time
from pathlib import Path
from typing import Any

import bench
import matrix
import numpy as np
from bench import GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("predict", "run", "list"))
    parser.add_argument("groups", nargs="*", help="names of groups (default: all)")
    parser.add_argument("--points", type=Path, default=Path("benchmarks/points.json"))
    parser.add_argument("--gpu", help="predict for this card")
    parser.add_argument("--commit", help="commit of the code (default: what git says)")
    parser.add_argument("--processes", type=int, default=2, help="that predict at once")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further group after this time")
    args = parser.parse_args()
    if args.what == "list":
        for group in matrix.GROUPS:
            print(group.name, *group.points)
    elif args.what == "predict":
        predict_all(args.groups, args.gpu, args.points, args.processes, args.commit or bench.commit())
    else:
        run_all(args.groups, args.points, args.out, args.seconds)


def predict_all(names: list[str], gpu: str | None, path: Path, processes: int, commit: str) -> None:
    """Write the points with their predictions."""
    points = bench.Records(path)
    jobs = [(group.name, gpu, points.names) for group in matrix.GROUPS if not names or group.name in names]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for name, found in pool.imap_unordered(predict_group, jobs):
            for point in found:
                points.add({"group": name, "commit": commit, **point})
            print(name, len(points.records), flush=True)


def predict_group(job: tuple[str, str | None, set[str]]) -> tuple[str, list[dict[str, Any]]]:
    """All points of a group that are not there yet."""
    name, gpu, there = job
    group = matrix.group(name)
    predict = Predictor(group, gpu)
    found = [predict(point).as_dict() for point in group.points if group.case(point) not in there]
    for cap_gib, family in (b[1:] for b in matrix.BOUNDARY if b[0] == name):
        known: dict[int, Point] = {}
        for share in matrix.BOUNDARY_SHARES:
            case = f"{name}:{family.format('L')}@{cap_gib:g}GiB*{share:g}"
            point = None if case in there else _at_share(predict, family, int(cap_gib * GIB * share), known)
            if point is not None:
                found.append({**dataclasses.replace(point, case=case).as_dict(), "cap_bytes": int(cap_gib * GIB)})
    return name, found


def run_all(names: list[str], points: Path, out_path: Path, seconds: float) -> None:
    """Measure the points of a file, group by group."""
    bench.import_before_forks()
    out = bench.Records(out_path)
    started = time.time()
    by_group: dict[str, list[dict[str, Any]]] = {}
    for values in bench.Records(points).records:
        if values["name"] not in out.names and (not names or values["group"] in names):
            by_group.setdefault(values["group"], []).append(values)
    for name, todo in by_group.items():
        if time.time() - started > seconds:
            print("time is up; call again to continue", flush=True)
            return
        at = time.time()
        for record in bench.forked(name, lambda send, todo=todo: run_group(todo, send)):
            out.add(record)
            print(row(record), flush=True)
        print(f"  -- {name}: {time.time() - at:.0f} s", flush=True)


@dataclasses.dataclass
class Point:
    """One configuration with its prediction."""

    case: str
    recipe: Any
    plan: Any
    predicted: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "name": self.case,
            "calibration": self.case.split(":")[0] in matrix.CALIBRATION and "@" not in self.case,
            "model": plan.model,
            "job": {"batch": plan.batch, "micro_batch": plan.micro_batch, "seq_len": plan.seq_len,
                    "num_layers": plan.num_layers, "lora_r": plan.adapter.r if plan.adapter else None,
                    "lora_targets": list(plan.adapter.targets) if plan.adapter else None},
            "recipe": self.recipe.as_dict(),
            "plan": plan.with_(predicted={}, reasons=()).as_dict(),
            "predicted": slim(self.predicted),
            "cap_bytes": None,
        }  # fmt: skip

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Point:
        from fitune import plan as plans
        from fitune import recipe as recipes

        recipe = recipes.build({k: v for k, v in values["recipe"].items() if v is not None})
        return Point(values["name"], recipe, plans.from_dict(values["plan"]), values["predicted"])


class Predictor:
    """Predicts points of one group, each exactly as its recipe says; the model is traced once."""

    def __init__(self, group: matrix.Group, gpu: str | None):
        from fitune import recipe as recipes
        from fitune.planner.context import open_context

        self.group, self.more = group, {"gpu": gpu} if gpu else {}
        recipe = recipes.build(group.recipe_values(group.points[0]) | self.more)
        self.context = open_context(recipe, reads_data=True)

    def __call__(self, point: str) -> Point:
        from fitune import recipe as recipes
        from fitune.planner.predict import as_given

        recipe = recipes.build(self.group.recipe_values(point) | self.more)
        context = dataclasses.replace(self.context, recipe=recipe, seq_len=recipe.seq_len)
        plan, prediction = as_given(context)
        return Point(self.group.case(point), recipe, plan, prediction.as_dict())


def run_group(todo: list[dict[str, Any]], send: bench.Send) -> None:
    """Build a group's model once and measure each of its points."""
    import torch

    from fitune.model.source import resolve
    from fitune.train.device import prepare
    from fitune.train.measure import Meter

    total = torch.cuda.get_device_properties(0).total_memory
    points = [Point.from_dict(values) for values in todo]
    prepare(points[0].plan, 0)
    torch.cuda.set_per_process_memory_fraction(1.0)
    meter = Meter("cuda")
    meter.reset()
    started = time.perf_counter()
    built = bench.filled(resolve(points[0].recipe.model, weights=True), points[0].plan)
    torch.cuda.synchronize()
    load = {**meter.peaks(), "seconds": time.perf_counter() - started}
    for point, values in zip(points, todo, strict=True):
        torch.cuda.empty_cache()
        if values["cap_bytes"]:  # the cap is the driver's: what lies outside torch's allocator is taken off
            outside = values["predicted"]["device_bytes"] - values["predicted"]["peak_reserved_bytes"]
            torch.cuda.set_per_process_memory_fraction((values["cap_bytes"] - outside) / total)
            measured = _at_cap(point, built, values["cap_bytes"])
            torch.cuda.set_per_process_memory_fraction(1.0)
        else:
            try:
                measured = {"measured": _measured(point, built, {"load": load})}
            except torch.OutOfMemoryError as error:
                measured = {"error": f"OutOfMemoryError: {error}"}
        send({**values, **bench.header(point.case), **measured})
        bench.forget(built)


def _steps(point: Point, built: Any, num_steps: int, phases: dict[str, Any]) -> tuple[list[float], float]:
    import torch

    from fitune.engine.engine import Engine
    from fitune.train.measure import Meter

    meter = Meter("cuda")
    meter.reset()
    engine = Engine(built, point.plan)
    if "load" in phases:  # an engine makes the masters of what is trained
        phases["load"] = {k: max(v, phases["load"].get(k, 0)) for k, v in meter.peaks().items()}
    vocab_size = built.model.config.get_text_config().vocab_size
    seconds = []
    loss = float("nan")
    for step in range(num_steps):
        batches = bench.batches(point.plan, step, vocab_size)
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = engine.step(batches, step=step, lr=1e-4).loss
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        if step == 0:
            phases["first_step"] = meter.peaks()
            meter.reset()
    phases["step"] = meter.peaks()
    meter.reset()
    engine.evaluate(bench.batches(point.plan, 0, vocab_size)[:1])
    phases["eval"] = meter.peaks()
    return seconds, loss


def _measured(point: Point, built: Any, phases: dict[str, Any]) -> dict[str, Any]:
    """Three or more steps of one point; the first is not timed."""
    import torch

    num_steps = 3 if point.plan.seq_len * point.plan.batch >= 4096 else 6
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    seconds, loss = _steps(point, built, num_steps, phases)
    step_s = float(np.median(seconds[1:]))
    top = {key: max(p[key] for p in phases.values()) for key in phases["step"]}
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - retries
    tokens = point.plan.batch * point.plan.seq_len
    return {**top, "step_s": step_s, "tokens_per_s": tokens / step_s, "loss": loss, "phases": phases,
            "num_alloc_retries": retries}  # fmt: skip


def slim(predicted: dict[str, Any]) -> dict[str, Any]:
    """A prediction's numbers, without what can be made again from it."""
    from fitune.memory.phases import FIELDS

    keep = (*FIELDS, "step_s", "tokens_per_s", "step_s_low", "step_s_high", "peak_at")
    phases = {name: {f: values.get(f) for f in FIELDS} for name, values in predicted["phases"].items()}
    return {key: predicted.get(key) for key in keep} | {"phases": phases}


def _at_share(predict: Predictor, family: str, wanted_bytes: int, known: dict[int, Point]) -> Point | None:
    """The length (a multiple of 8) whose predicted driver-counted peak is within 0.4 % of `wanted_bytes`.

    Args:
        known: lengths / 8 that were predicted already; added to. Between two of them the peak is about linear.
    """

    def device_bytes(eighths: int) -> int:
        if eighths not in known:
            known[eighths] = predict(family.format(8 * eighths))
        return int(known[eighths].predicted["device_bytes"])

    low, high = 8, 4096
    if not device_bytes(low) <= wanted_bytes <= device_bytes(high):
        return None
    for _ in range(8):
        low = max(n for n in known if device_bytes(n) <= wanted_bytes)
        high = min(n for n in known if device_bytes(n) > wanted_bytes)
        best = min(low, high, key=lambda n: abs(device_bytes(n) - wanted_bytes))
        if abs(device_bytes(best) / wanted_bytes - 1) < 0.002 or high - low <= 1:
            break
        share = (wanted_bytes - device_bytes(low)) / (device_bytes(high) - device_bytes(low))
        device_bytes(min(max(low + round((high - low) * share), low + 1), high - 1))
    return known[best] if abs(device_bytes(best) / wanted_bytes - 1) < 0.004 else None


def _at_cap(point: Point, built: Any, cap_bytes: int) -> dict[str, Any]:
    import torch

    before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    phases: dict[str, Any] = {}
    outcome = "ran"
    try:
        _steps(point, built, 2, phases)
    except torch.OutOfMemoryError as error:
        outcome = f"OOM: {str(error)[:160]}"
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - before
    top = {key: max(p[key] for p in phases.values()) for key in phases["step"]} if "step" in phases else {}
    return {
        "predicted_fits": point.predicted["device_bytes"] <= cap_bytes,
        "outcome": outcome,
        "measured": {**top, "phases": phases, "num_alloc_retries": retries},
    }


def row(record: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in record:
        return f"{record['name']:36} ERROR {record['error'][:400]}\n{record.get('traceback', '')[-1500:]}"
    measured, predicted = record["measured"], record["predicted"]
    if record["cap_bytes"]:
        share = predicted["device_bytes"] / record["cap_bytes"]
        return (f"{record['name']:44} {share:.4f} {'fits' if record['predicted_fits'] else 'does not'} -> "
                f"{record['outcome'][:40]} retries {measured['num_alloc_retries']}")  # fmt: skip
    cells = []
    for phase, fields in measured["phases"].items():
        for field, short in (("peak_allocated_bytes", "a"), ("peak_reserved_bytes", "r")):
            guess = predicted["phases"][phase][field]
            if guess:
                cells.append(f"{phase[:5]}.{short} {fields[field] / GIB:.3f} {(guess / fields[field] - 1) * 100:+.2f}%")
    times = f"{measured['step_s']:.3f}s"
    if predicted.get("step_s"):
        times += f" ({predicted['step_s'] / measured['step_s'] - 1:+.0%})"
    return f"{record['name']:34} {measured['tokens_per_s']:7.0f} tok/s {times} " + " ".join(cells)


if __name__ == "__main__":
    main()
