"""Fit the roofline's constants to measured records. Plain Python: a search along one constant after another.

A record is as `benchmarks/` writes them: `model`, `plan`, `gpu`, `measured.step_s`. Records of one host (the `host`
they name and the commit, else the file they stand in) share one factor on the host's time, since a step of few tokens
is as fast as its host launches kernels. What keeps constants that the records do not determine near their start is a
penalty on log(constant / start), as if each were known to within `PRIOR_SPREAD`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fitune import plan as plans
from fitune.catalog import models
from fitune.speed import constants
from fitune.speed.cards import card_rates
from fitune.speed.constants import Fitted
from fitune.speed.roofline import StepTime, phases_of, predict_step
from fitune.speed.segments import StepWork
from fitune.speed.shape import decoder_of
from fitune.speed.work import step_work

SEARCHED = (
    "gemm_share", "gemm_half_tiles", "grouped_share", "attention_forward_share", "attention_backward_share",
    "memory_share", "unpack_share", "skinny_share", "update_share", "score_bytes", "dropout_bytes", "wide_rotary_bytes",
    "kernel_s", "host_kernel_s", "host_call_s", "host_unpack_s", "host_transfer_s",
)  # fmt: skip
PRIOR_SPREAD = {"host_kernel_s": 0.3, "host_call_s": 1.0, "host_unpack_s": 1.0, "gemm_half_tiles": 0.7, "kernel_s": 0.5,
                "score_bytes": 0.7, "dropout_bytes": 1.0, "wide_rotary_bytes": 1.0, "host_transfer_s": 1.0}  # fmt: skip
OLD_DROPOUT = (None, "05810c7", "39af758")
"""Commits of records whose counter dropout was some forty elementwise kernels; it is one kernel now."""
HOST_SPREAD = 0.25  # of log host factors: seven hosts with an H200 differed by up to 1.7 times (see docs/speed.md)
NOISE, LAUNCH_NOISE = 0.04, 0.12
"""Relative error of a record that counts as one. Runs of one plan on one host differ little where the device is the
limit and by 10 to 15 % where the host is."""
LAUNCH_FLOPS = 2e10  # per kernel: records of less work per launch count as bound by the host
LIMITS = {name: (0.02, 0.97) for name in SEARCHED if name.endswith("_share")}


@dataclass(frozen=True)
class Point:
    """One measured record with its work."""

    name: str
    host: str
    gpu: str
    work: StepWork
    measured_s: float

    @property
    def noise(self) -> float:
        return NOISE if self.work.flops > LAUNCH_FLOPS * self.work.kernels else LAUNCH_NOISE


@dataclass(frozen=True)
class Fit:
    """Fitted constants, the hosts' factors, and the penalised loss they reach."""

    fitted: Fitted
    hosts: dict[str, float]
    loss: float


def points_of(records: Iterable[tuple[str, dict[str, Any]]]) -> tuple[list[Point], list[str]]:
    """(file name, record) pairs as points, and why the others were left out. The newest record of a name counts."""
    found: dict[str, Point] = {}
    skipped = []
    for file, record in records:
        step_s = (record.get("measured") or {}).get("step_s")
        if not step_s or "plan" not in record:
            continue
        shape = models.find(record["model"].removeprefix("random:"))
        if shape is None:
            skipped.append(f"{record['name']}: {record['model']} is not in the catalog")
            continue
        plan = plans.from_dict(record["plan"])
        if record.get("throttled_to_bytes_per_s") or plan.stream_from == "disk":
            skipped.append(f"{record['name']}: bound by a link or a disk that is this run's own")
            continue
        if plan.adapter is not None and plan.adapter.dropout and record.get("commit") in OLD_DROPOUT:
            skipped.append(f"{record['name']}: its dropout ran in kernels that there are no more")
            continue
        host = _host(record, file)
        found[record["name"]] = Point(record["name"], host, record["gpu"]["name"], work_of(record), float(step_s))
    return list(found.values()), skipped


def work_of(record: dict[str, Any]) -> StepWork:
    """Work of a step of the plan of a record, whose model is in the catalog."""
    shape = models.find(record["model"].removeprefix("random:"))
    assert shape is not None, record["model"]
    return step_work(plans.from_dict(record["plan"]), decoder_of(shape))


def _host(record: dict[str, Any], file: str) -> str:
    """What stands for a record's machine. Rented machines have one name: the commit tells one batch of records, and so
    one lease, from the next."""
    host = record.get("host")
    if not host:
        return file
    name = json.dumps(host, sort_keys=True) if isinstance(host, dict) else str(host)
    commit = record.get("commit") or record.get("predicted_commit")
    return f"{name} at {commit[:7]}" if commit else name


def predicted(point: Point, fitted: Fitted, host_factor: float = 1.0) -> StepTime:
    """The prediction for a record's plan. With `host_factor` the host's part is that of the record's host."""
    card = card_rates(point.work.device, point.gpu, fitted=fitted)
    return predict_step(point.work, replace(card, host_factor=card.host_factor * host_factor), fitted)


def fit(points: Sequence[Point], start: Fitted | None = None, rounds: int = 60) -> Fit:
    """Constants with the least penalised squared log error over the points.

    Raises:
        ValueError: no point.
    """
    if not points:
        raise ValueError("no record to fit to")
    start = start or constants.PRIOR
    best, hosts = start, {p.host: 1.0 for p in points}
    loss = _loss(points, best, hosts, start)
    step = 0.3
    for _ in range(rounds):
        before = loss
        for name in SEARCHED:
            for factor in (math.exp(step), math.exp(-step)):
                tried = _moved(best, name, factor)
                value = _loss(points, tried, hosts, start)
                if value < loss:
                    best, loss = tried, value
                    break
        for host in sorted(hosts):
            for factor in (math.exp(step), math.exp(-step)):
                moved = hosts | {host: hosts[host] * factor}
                value = _loss(points, best, moved, start)
                if value < loss:
                    hosts, loss = moved, value
                    break
        if before - loss < 1e-3 * before:
            step /= 2
            if step < 0.005:
                break
    return Fit(_with_errors(points, best, hosts), hosts, loss)


def _moved(fitted: Fitted, name: str, factor: float) -> Fitted:
    low, high = LIMITS.get(name, (0.0, math.inf))
    return replace(fitted, **{name: min(high, max(low, getattr(fitted, name) * factor))})


def _loss(points: Sequence[Point], fitted: Fitted, hosts: dict[str, float], start: Fitted) -> float:
    total = 0.0
    for point in points:
        error = math.log(predicted(point, fitted, hosts[point.host]).step_s / point.measured_s) / point.noise
        total += error * error if abs(error) < 2 else 4 * abs(error) - 4  # Huber: one odd record does not rule
    for name in SEARCHED:
        total += (math.log(getattr(fitted, name) / getattr(start, name)) / PRIOR_SPREAD.get(name, 0.3)) ** 2
    return total + sum((math.log(factor) / HOST_SPREAD) ** 2 for factor in hosts.values())


def _with_errors(points: Sequence[Point], fitted: Fitted, hosts: dict[str, float]) -> Fitted:
    """With the interval (5 to 95 %): hosts' spread and one run's own, and the errors where the device is the limit."""
    logs = [math.log(h) for h in hosts.values()]
    spread = math.hypot(max(HOST_SPREAD, statistics.pstdev(logs) if len(logs) > 1 else 0.0), LAUNCH_NOISE) * 1.645
    errors = [abs(math.log(predicted(p, fitted, hosts[p.host]).step_s / p.measured_s)) for p in points]
    bound = [e for p, e in zip(points, errors, strict=True) if is_device_bound(p, fitted)] or errors
    return replace(
        fitted, host_low=math.exp(-spread), host_high=math.exp(spread), device_error=max(0.06, quantile(bound, 0.95))
    )


def is_device_bound(point: Point, fitted: Fitted) -> bool:
    """Whether the device has more to do than the host in most of the step."""
    card = card_rates(point.work.device, point.gpu, fitted=fitted)
    phases = phases_of(point.work, card, fitted)
    return sum(p.device_s for p in phases) > 1.2 * sum(p.host_s for p in phases)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def block(fit_: Fit, fitted_on: str) -> str:
    """The Python text between the markers of `constants.py`."""
    lines = ["FITTED_ON = (", *(f"    {json.dumps(line)}" for line in _wrapped(fitted_on)), ")"]
    lines += ["HOST_FACTORS = {", *(f"    {json.dumps(h)}: {f:.4g}," for h, f in sorted(fit_.hosts.items())), "}"]
    lines += ["FITTED = Fitted("]
    lines += [f"    {f.name}={getattr(fit_.fitted, f.name):.4g}," for f in dataclasses.fields(Fitted)]
    return "\n".join([*lines, ")"])


def _wrapped(text: str) -> list[str]:
    """Lines of a Python string in several parts, each but the last with the space that joins it to the next."""
    lines = textwrap.wrap(text, 100)
    return [line + " " for line in lines[:-1]] + lines[-1:]
