"""Where a step's time goes on the GPU: what each stream does, which kernels take it, where the computing stream waits.

    python benchmarks/stream.py --profile FOLDER CASE [CASE ...]

writes one text per case. The profiler slows the host, so waits of a step that the host bounds are longer than without;
sums of kernels are not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROWS = 30


@dataclass(frozen=True)
class Span:
    """What one stream did, in microseconds from any zero."""

    stream: int
    name: str
    begin: float
    end: float


def profiled(step: Callable[[], object], path: Path) -> None:
    """Run a step under torch's profiler, and write what it did on the GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize()
    results = prof.profiler.kineto_results  # type: ignore[union-attr]
    spans = [
        Span(e.device_resource_id(), e.name(), e.start_ns() / 1e3, (e.start_ns() + e.duration_ns()) / 1e3)
        for e in results.events()
        if e.device_type() == torch.autograd.DeviceType.CUDA and not getattr(e, "is_user_annotation", bool)()
    ]
    host = prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=ROWS, max_name_column_width=60)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table(spans) + "\n\n" + host + "\n", encoding="utf-8")


def table(spans: Iterable[Span]) -> str:
    """Streams by the time they were busy, kernels by theirs, and the first stream's gaps by what is around them."""
    by_stream: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: s.begin):
        by_stream[span.stream].append(span)
    if not by_stream:
        return "nothing ran on a GPU"
    streams = sorted(by_stream.items(), key=lambda pair: -len(pair[1]))  # most kernels: it computes
    begin, end = (of(x for row in by_stream.values() for x in (row[0].begin, row[-1].end)) for of in (min, max))
    lines = [f"from the first to the last of all: {(end - begin) / 1e3:.1f} ms"]
    for stream, row in streams:
        lines.append(f"stream {stream}: busy {sum(s.end - s.begin for s in row) / 1e3:.1f} ms, {len(row)} kernels")
    computes = streams[0][1]
    for stream, row in streams:
        lines += ["", f"stream {stream}, kernels", *_sums((_short(s.name), s.end - s.begin) for s in row)]
    lines += ["", "gaps of the computing stream, before -> after", *_sums(gaps(computes))]
    return "\n".join(lines)


def gaps(row: list[Span]) -> Iterable[tuple[str, float]]:
    """(what is around it, microseconds) of each time in which nothing ran; `row` by begin."""
    until, before = row[0].end, row[0]
    for span in row[1:]:
        if span.begin > until:
            yield f"{_short(before.name, 36)} -> {_short(span.name, 36)}", span.begin - until
        if span.end > until:
            until, before = span.end, span


def _sums(pairs: Iterable[tuple[str, float]]) -> list[str]:
    found: dict[str, list[float]] = defaultdict(list)
    for name, value in pairs:
        found[name].append(value)
    rows = sorted(found.items(), key=lambda pair: -sum(pair[1]))
    total = f"{sum(map(sum, found.values())) / 1e3:9.2f} ms in all"
    return [total] + [
        f"{sum(v) / 1e3:9.2f} ms {len(v):6d} x {sum(v) / len(v):9.1f} us  {name}" for name, v in rows[:ROWS]
    ]


def _short(name: str, width: int = 96) -> str:
    """A kernel's name without what all of them have."""
    name = re.sub(r"\(anonymous namespace\)::|at::native::|void |c10::|std::", "", name)
    return name if len(name) <= width else name[: width - 1] + "…"
