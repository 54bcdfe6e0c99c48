"""Measures copies between host and device. Needs a GPU; nothing is measured at import."""

from __future__ import annotations

import time
from collections.abc import Callable

COPY_BYTES = 256 * 1024**2
ENOUGH_S = 0.4  # of one direction
SMALLEST_BYTES = 8 * 1024**2


def copy_bytes_per_s(
    index: int, *, to_device: bool, pinned: bool, num_bytes: int = COPY_BYTES, enough_s: float = ENOUGH_S
) -> float:
    """Bytes per second of large copies in one direction, one at a time, on the current stream.

    Args:
        index: the GPU's number.
        pinned: from or to page-locked memory; otherwise ordinary memory, which the driver stages through its own.
        num_bytes: of one copy; halved while the host refuses to pin as much (WSL).

    Raises:
        RuntimeError: the host refuses to pin even 8 MiB.
    """
    import torch

    device = torch.device("cuda", index)
    while True:
        try:
            host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned)
            break
        except RuntimeError:
            if not pinned or num_bytes // 2 < SMALLEST_BYTES:
                raise
            num_bytes //= 2
    card = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target, source = (card, host) if to_device else (host, card)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return num_bytes / seconds_each(copy, lambda: torch.cuda.synchronize(device), enough_s)


def seconds_each(work: Callable[[], None], wait: Callable[[], None], enough_s: float, batch: int = 1) -> float:
    """Seconds of one `work`, from batches that together take `enough_s` or longer, after one batch that warms up.

    `wait` returns when the work that was started is done. The median of the batches is taken, so that a pause of the
    machine does not count.
    """
    times: list[float] = []
    total = 0.0
    for turn in range(10_000):
        started = time.perf_counter()
        for _ in range(batch):
            work()
        wait()
        seconds = time.perf_counter() - started
        if turn == 0:
            continue
        times.append(seconds / batch)
        total += seconds
        if total >= enough_s and len(times) >= 3:
            break
    return sorted(times)[len(times) // 2]
