"""What a run streamed, from the events of its steps: weights that crossed the link, how fast, and the waiting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fitune.train.events import number


@dataclass(frozen=True)
class LinkSums:
    """Sums over steps. With several GPUs of the first process, as in the events.

    Attributes:
        num_bytes: of weights, host to device.
        copy_s: time that their copies took; 0 where nothing was moved.
        wait_s: time that the computation stood still for them.
        step_s: time of these steps.
    """

    num_bytes: int
    copy_s: float
    wait_s: float
    step_s: float

    @property
    def bytes_per_s(self) -> float | None:
        """The speed that copies reached; None where nothing was moved."""
        return self.num_bytes / self.copy_s if self.copy_s > 0 else None

    @property
    def wait_share(self) -> float:
        """Part of the steps' time spent waiting."""
        return self.wait_s / self.step_s if self.step_s > 0 else 0.0


def link_sums(events: Iterable[dict[str, Any]]) -> LinkSums | None:
    """Over all steps that say what they streamed; None when there is none. Steps that do not (a batch that was left
    out, a plan before or after without streaming) count for nothing."""
    num_bytes, copy_s, wait_s, step_s, found = 0, 0.0, 0.0, 0.0, False
    for event in events:
        if event.get("event") != "step" or number(event.get("link_bytes")) is None:
            continue
        found = True
        seconds = number(event.get("step_s")) or 0.0
        num_bytes += int(event["link_bytes"])
        rate = number(event.get("link_bytes_per_s"))
        copy_s += event["link_bytes"] / rate if rate else 0.0
        wait_s += (number(event.get("link_wait_share")) or 0.0) * seconds
        step_s += seconds
    return LinkSums(num_bytes, copy_s, wait_s, step_s) if found else None


def link_fields(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sums in the fields of a step's event; nothing for a run that streamed nothing."""
    sums = link_sums(events)
    if sums is None:
        return {}
    return {"link_bytes": sums.num_bytes, "link_bytes_per_s": sums.bytes_per_s, "link_wait_share": sums.wait_share}
