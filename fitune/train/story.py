"""What a run went through, in one line that a person understands."""

from __future__ import annotations

from typing import Any

from fitune.train.died import UNCHANGED
from fitune.train.oom import PLACES

MOST_TOLD = 3


def story(events: list[dict[str, Any]]) -> str | None:
    """One line about failures that the run survived, or None for one that went as planned.

    Args:
        events: of the run, the oldest first.
    """
    told = [text for event in events if (text := _sentence(event)) is not None]
    skipped = sum(1 for event in events if event.get("event") == "step" and event.get("skipped_rows"))
    if skipped:
        told.append(f"left out {skipped} step{'s' * (skipped > 1)} whose loss was not a number")
    if not told:
        return None
    more = f", and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
    text = "; ".join(told[:MOST_TOLD]) + more
    steps = [event.get("step") for event in events if event.get("event") == "step"]
    whole = bool(steps) and steps == list(range(1, len(steps) + 1)) and not skipped
    return text + (" (no step was lost or repeated)" if whole else "")


def _sentence(event: dict[str, Any]) -> str | None:
    if event.get("event") == "restart":
        change = event.get("change")
        changed = f" with {change}" if change not in (None, UNCHANGED) else ""
        begin = event.get("from_step")
        place = f"step {begin}" if begin else "the beginning"
        return f"died after step {event.get('step')} ({event.get('cause')}) and went on from {place}{changed}"
    if event.get("event") != "replan" or event.get("phase") == "restart":
        return None
    step, change = event.get("step"), event.get("change")
    if event.get("phase") == "resume":
        what = "shared the work another way" if event.get("where") == "layout" else "moved to another device"
        return f"{what} after step {step} ({change})"
    place = PLACES.get(str(event.get("where")), "memory")
    work = {"eval": f"in an evaluation before step {step}", "load": "while the model was loaded"}.get(
        str(event.get("phase")), f"at step {step}")  # fmt: skip
    return f"ran out of {place} {work} and went on with {change}"
