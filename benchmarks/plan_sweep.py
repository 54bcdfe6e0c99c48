"""How far a plan is from the best of all: `python benchmarks/plan_points.py sweep` (see there).

At each of `SWEPT` the combinations of micro-batch, recomputed layers, offloaded inputs, order of accumulation and
layers whose weights stay on the card are timed below the cap, the plan itself first. Passed over is what needs more
memory than one that ran out of it, and what only recomputes more layers than one that ran; a combination whose first
step is far behind the best is not stepped again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import bench
from bench import GIB, Record

if TYPE_CHECKING:
    from plan_points import Point

SWEPT = ("3B-auto@6", "8B-qlora@12", "8B-auto@10")
VARIED = ("micro_batch", "recompute_layers", "accumulation_order", "offload_inputs", "resident_layers")
WORTH_TIMING = 1.3  # a plan whose first step takes longer than this times the best is not stepped again


def sweep(wanted: list[Point], out: bench.Records, seconds: float, host_gib: float) -> None:
    """All combinations at those of the points that are of `SWEPT`, a forked process for each place of the weights; the
    result of each so far is shown."""
    bench.import_before_forks()
    began = time.time()
    for point in wanted:
        if point.name not in SWEPT:
            continue
        for number, (place, plans) in enumerate(grids(point, host_gib)):
            name = f"{point.name}:{place}"
            if name in out.names:
                continue
            if time.time() - began > seconds:
                print("time is up; call again to go on", flush=True)
                return
            best = min((c["step_s"] for c in _combinations(point.name, out) if c.get("step_s")), default=None)
            own = number == 0
            out.add(bench.forked_record(name, lambda n=name, p=point, t=plans, o=own, b=best: swept(n, p, t, o, b)))
            print(name, out.records[-1].get("error", ""), len(out.records[-1].get("combinations", ())), flush=True)
        print(_summary(point.name, out), flush=True)


def _combinations(point: str, out: bench.Records) -> list[dict[str, Any]]:
    """Of a point, the plan itself first."""
    return [c for record in out.records if record.get("point") == point for c in record["combinations"]]


def _summary(point: str, out: bench.Records) -> str:
    found = _combinations(point, out)
    timed = [c for c in found if c.get("step_s")]
    if not timed:
        return f"{point}: nothing ran"
    best, own = min(timed, key=lambda c: c["step_s"]), next(c for c in found if c["is_plan"])
    own_s = own.get("step_s")
    if own_s is None:
        return f"{point}: the plan did not run: {own}"
    behind = f"{own_s / best['step_s'] - 1:+.1%}"
    return f"{point}: plan {own_s:.3f} s, best of {len(found)} {best['step_s']:.3f} s ({behind}): {best}"


def grids(point: Point, host_gib: float) -> Iterator[tuple[str, list[Any]]]:
    """(name, plans) for every place of the weights; the plan's own comes first, and in it the plan itself."""
    from plan_points import machine_of, planned

    plan = planned(point, machine_of(point, host_gib))[1].plan.with_(predicted={}, reasons=())
    for place in _places(plan):
        orders = ("micro-batch-major", "layer-major") if place["stream_from"] != "none" else ("micro-batch-major",)
        found = [plan] if _place(plan) == place else []
        sizes = [n for n in (1, 2, 4, 8) if n <= plan.batch]
        quarters = {share * plan.num_layers // 4 for share in range(5)}
        layers = sorted(quarters | {plan.recompute_layers})
        for rows, order, offload, again in itertools.product(sizes, orders, (False, True), layers):
            if (offload and not again) or (order == "layer-major" and rows == plan.batch):
                continue
            other = plan.with_(**place, micro_batch=rows, accumulation_order=order, offload_inputs=offload,
                               recompute_layers=again)  # fmt: skip
            found += [other] if other != plan else []
        there = place["resident_layers"]
        yield "all resident" if there is None else f"{there} layers resident", found


def _place(plan: Any) -> dict[str, Any]:
    return {"stream_from": plan.stream_from, "resident_layers": plan.resident_layers}


def _places(plan: Any) -> list[dict[str, Any]]:
    """The plan's own place, all resident, and streamed with none, a half and three quarters of the layers there."""
    shares = (0, plan.num_layers // 2, 3 * plan.num_layers // 4)
    found = [_place(plan), {"stream_from": "none", "resident_layers": None}]
    found += [{"stream_from": "pinned", "resident_layers": count} for count in shares]
    return [place for i, place in enumerate(found) if place not in found[:i]]


def swept(name: str, point: Point, plans: list[Any], place_is_own: bool, best: float | None) -> Record:
    """Each plan's step time below the cap; the weights are made once."""
    from fitune.model.source import resolve
    from fitune.train.device import prepare
    from fitune.train.oom import classify

    prepare(plans[0], 0)
    found: list[dict[str, Any]] = []
    built = None
    for number, plan in enumerate(plans):
        shown = {key: getattr(plan, key) for key in VARIED} | {"is_plan": number == 0 and place_is_own}
        if any(_tells(other, shown) for other in found):
            continue
        try:
            if built is None:
                built = bench.filled(resolve(plan.model, weights=True), plan)
            took = _timed(built, plan, best if any("step_s" in c for c in found) else None)  # the first one warms up
        except (RuntimeError, MemoryError) as problem:
            if classify(problem) is None:
                raise
            found.append(shown | {"oom": True})
            if built is None:
                break  # the weights themselves have no room
        else:
            found.append(shown | took)
            best = min([t for t in (best, took.get("step_s")) if t])
        if built is not None:
            bench.forget(built)
    return {**bench.header(name), "point": point.name, "plan": plans[0].as_dict(), "cap_bytes": point.cap_gib * GIB,
            "combinations": found}  # fmt: skip


def _tells(other: dict[str, Any], plan: dict[str, Any]) -> bool:
    """Whether a combination that was tried says that this one need not be: it is as `other` but needs more memory, and
    that one ran out of it; or it recomputes more for the same rows, and that one ran."""
    if any(plan[key] != other[key] for key in VARIED[2:]):
        return False
    rows, again = VARIED[:2]
    if other.get("oom"):
        return bool(plan[rows] >= other[rows] and plan[again] <= other[again])
    return bool(plan[rows] == other[rows] and plan[again] >= other[again])


def _timed(built: Any, plan: Any, best: float | None) -> dict[str, Any]:
    """Seconds of a second step, or of the first one where it is far behind the best."""
    from fitune.engine.engine import Engine

    engine = Engine(built, plan)
    seconds = []
    for step in range(2):
        batches = bench.batches(plan, step, built.model.config.vocab_size)
        started = time.perf_counter()
        engine.step(batches, step=step, lr=1e-4)
        seconds.append(time.perf_counter() - started)
        if best is not None and seconds[0] > WORTH_TIMING * best:
            return {"first_step_s": seconds[0]}
    return {"first_step_s": seconds[0], "step_s": seconds[1]}
