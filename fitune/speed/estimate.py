"""A plan's step time on its device, and the time of a whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fitune.hardware import Machine
from fitune.parallel.world import SAME_RECORDS
from fitune.plan import Plan
from fitune.speed.cards import CardRates, card_rates
from fitune.speed.links import links_of
from fitune.speed.roofline import StepTime, predict_step
from fitune.speed.segments import Workload
from fitune.speed.shape import Decoder, decoder_of
from fitune.speed.together import rank_step
from fitune.speed.work import step_work


def predict(
    plan: Plan,
    config: Any,
    device_name: str | None = None,
    machine: Machine | None = None,
    *,
    workload: Workload | None = None,
    calibration: Mapping[str, Any] | None = None,
    together: tuple[str, ...] = (),
    calibrations: Mapping[str, Mapping[str, Any]] | None = None,
    rank: int | None = None,
) -> StepTime:
    """The time of one optimizer step of a plan.

    Args:
        plan: of one process, or of one of `world_size` ranks: then `batch` are the rank's own records of a step, and
            the tokens of the answer are those of all ranks.
        config: the text model's transformers configuration, a catalog `ModelShape`, or a `Decoder` made of either
            (make it once where many plans are compared).
        device_name: another card than the plan's own.
        machine: its number of processors, and the link negotiated by the card of that name, are used.
        workload: mean length and share of target tokens of the data; without it rows are full and every token counts.
        calibration: this machine's measured rates (`fitune.hardware.calibration.for_planning(...)[0].rates`), which go
            before the catalog's.
        together: names of all cards where a plan is one of several ranks'; without it all are as the plan's own.
        calibrations: the measured rates of each of these cards, by its name; without it `calibration` is all cards'.
        rank: the one of these cards whose own time is meant, which waits for exchanges and not for the others' work.

    Never raises for an unknown card: its basis is "unknown", its interval very wide, its time good for ranking only.
    """
    decoder = config if isinstance(config, Decoder) else decoder_of(config)
    if plan.world_size > 1 and plan.device != "cpu":
        names = together or (device_name or plan.device_name,) * plan.world_size
        known = dict.fromkeys(names, calibration) if calibrations is None else calibrations
        cards = {name: _card(plan, name, machine, known.get(name)) for name in dict.fromkeys(names)}
        links = links_of(names, _host_links(names, machine))
        return rank_step(plan, decoder, [cards[name] for name in names], links, workload, rank)
    work = step_work(plan, decoder, workload)
    time = predict_step(work, _card(plan, device_name or plan.device_name, machine, calibration))
    shares = plan.world_size if plan.parallel not in SAME_RECORDS else 1  # processes on one CPU: exchanges not counted
    return replace(time, tokens=time.tokens * shares)


def _host_links(names: Sequence[str], machine: Machine | None) -> list[float | None]:
    """Each card's link to the host as it was found, None where that is not known."""
    found = {d.name: d.link_bytes_per_s for d in machine.devices} if machine is not None else {}
    return [found.get(name) for name in names]


def _card(plan: Plan, name: str, machine: Machine | None, calibration: Mapping[str, Any] | None) -> CardRates:
    cores = machine.num_cpus if machine is not None else None
    card = card_rates(plan.device, name, calibration, cores)
    measured_link = (calibration or {}).get("host_to_device_bytes_per_s")
    if machine is not None and plan.device != "cpu" and not measured_link:
        links = [d.link_bytes_per_s for d in machine.devices if d.name == name and d.link_bytes_per_s]
        if links:
            card = card.with_link(min(links))
    return card


@dataclass(frozen=True)
class JobTime:
    """Seconds of a whole run: steps and evaluations, each in `parts`."""

    seconds: float
    low_s: float
    high_s: float
    parts: Mapping[str, float]


def job_time(step: StepTime, steps: int, *, num_evals: int = 0, eval_tokens: float = 0.0) -> JobTime:
    """A run's time from one step's.

    Args:
        steps: optimizer steps, all taken to be like `step` (give it the data's mean row length, not the longest).
        num_evals: evaluations of `eval_tokens` tokens each, at the forward pass's rate.

    Leaves out loading, checkpoints, merging and the first step's warm-up (some seconds to minutes).
    """
    parts = {
        "training": step.step_s * steps,
        "evaluation": num_evals * eval_tokens * step.forward_s / step.tokens,
    }
    seconds = sum(parts.values())
    low, high = (seconds * bound / step.step_s for bound in (step.low_s, step.high_s))
    return JobTime(seconds, low, high, parts)
