"""Real processes with gloo between them, each running a function of a test; and small jobs for them."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any

PRELOADED = ["torch", "torch.distributed", "transformers", "transformers.models.llama.modeling_llama", "bitsandbytes",
             "fitune.engine.engine", "fitune.parallel.group", "fitune.parallel.replicated", "tests.tiny"]  # fmt: skip
WAIT_S = 240.0  # for machines that do much else


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(size: int, work: Callable[..., Any], *arguments: Any, timeout_s: float = 150) -> list[Any]:
    """`work(group, *arguments)` on every rank; what each returned, by rank. The first failure is raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    channels = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_rank, args=(rank, size, port, channels[rank][1], work, arguments, timeout_s))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, end in channels:
        end.close()
    try:
        return [_result(rank, channel) for rank, (channel, _) in enumerate(channels)]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _result(rank: int, channel: Any) -> Any:
    assert channel.poll(WAIT_S), f"rank {rank} says nothing for {WAIT_S:.0f} s"
    try:
        result, error = pickle.loads(channel.recv_bytes())  # not through shared memory, which ends with the sender
    except EOFError:
        raise AssertionError(f"rank {rank} ended without a word") from None
    assert error is None, f"rank {rank}:\n{error}"
    return result


def _rank(
    rank: int, size: int, port: int, channel: Any, work: Callable[..., Any], arguments: Sequence[Any], timeout_s: float
) -> None:  # fmt: skip
    import torch

    from fitune.parallel.group import Group
    from fitune.parallel.world import World

    torch.set_num_threads(1)
    try:
        group = Group(World(rank, size, rank, size, "127.0.0.1", port), "cpu", timeout_s)
        channel.send_bytes(pickle.dumps((work(group, *arguments), None)))
        group.close()
    except BaseException:
        channel.send_bytes(pickle.dumps((None, traceback.format_exc())))
        raise
