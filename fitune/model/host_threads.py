"""A thread for small work on the CPU beside a GPU, with few threads of torch's own behind it.

torch splits each operation among as many threads as there are cores. Those sleep while the GPU computes, and waking
sixteen for a megabyte takes longer than the work: on 16 cores of an H200's host rounding one layer's adapters took 0.15
ms with 8 threads and 0.55 ms with 16, and gathering 1,024 rows of an embedding up to 4 ms with 16.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

FEW = 8


def thread_with_few(name: str, begin: Callable[[], None]) -> ThreadPoolExecutor:
    """One thread whose operations are split among at most `FEW`; `begin` is called in it first. All other threads keep
    the number they have."""
    number = torch.get_num_threads()

    def start() -> None:
        begin()
        torch.get_num_threads()  # a thread takes the process' number when it is first asked
        torch.set_num_threads(min(FEW, number))

    thread = ThreadPoolExecutor(1, name, start)
    thread.submit(int).result()
    torch.set_num_threads(number)  # new threads begin with what was set last
    return thread
