"""A loss or a gradient that is no number: which records it comes from, or which weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fitune.data.records import Record
    from fitune.engine.engine import Engine
    from fitune.train.loop import Run

MOST_SHOWN = 8
MOST_SKIPPED = 10  # steps in a row; then it is not the data


def broken_records(active: Run, engine: Engine, records: Sequence[Record]) -> list[Record]:
    """Those whose own loss is not finite, each computed alone; none when only the gradients are not finite. All ranks
    ask together and learn the same: in pp only the last one has the loss, in cp each that of its tokens."""

    def loss_of(record: Record) -> float:
        return active.group.sums([engine.evaluate(active.batches([record]))[0]])[0]

    return [r for r in records if r.num_targets and not math.isfinite(loss_of(r))]


def broken_weight(engine: Engine) -> str | None:
    """The first weight that holds a NaN or an infinity, or None."""
    import torch

    for name, tensor in engine.built.model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and tensor.device.type != "meta" and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def describe(active: Run, engine: Engine, records: Sequence[Record]) -> tuple[str, list[int]]:
    """(where it comes from in words, the rows of the data, from 1)."""
    broken = broken_records(active, engine, records)
    rows = sorted({r.source_row + 1 for r in broken or records})
    shown = ", ".join(map(str, rows[:MOST_SHOWN])) + (" ..." if len(rows) > MOST_SHOWN else "")
    listed = f"row{'s' * (len(rows) > 1)} {shown}"
    if len(broken) == sum(1 for r in records if r.num_targets):
        weight = broken_weight(engine)
        if weight is not None:
            return f"the weight {weight} holds values that are not finite, so every record gives it", rows
        return f"every record of the step gives it ({listed} of the data)", rows
    if broken:
        return f"it comes from {listed} of the data", rows
    return f"no record alone gives it; the step holds {listed} of the data", rows
