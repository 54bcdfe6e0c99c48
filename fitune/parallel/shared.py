"""One copy of the frozen weights per node: memory that the first rank of a node fills and all of them map and read.

Each GPU then streams from the same pages; on CUDA every process registers its own mapping of them with the driver.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fitune.errors import UserError
from fitune.hardware.host import memory as host_memory
from fitune.model.build import Built, wanted_weights
from fitune.model.host import HostBuffer
from fitune.model.streamed import Layout, RamBacking
from fitune.parallel.world import Single
from fitune.plan import Plan
from fitune.units import format_bytes


def shared_buffer(group: Single, num_bytes: int, pin: bool) -> HostBuffer:
    """A buffer in memory that all ranks of the node map; all of them call this together.

    The memory has no name that could be left behind (`memfd_create`, Linux), and is not limited by the size of
    /dev/shm; elsewhere it is a file that is unlinked as soon as everyone has opened it.
    """
    made: tuple[int, int, str] | None = None
    if group.leads_node:
        made = _create(num_bytes)
    pid, descriptor, path = group.of_node(made)  # type: ignore[misc]
    mine = descriptor if group.leads_node else os.open(path or f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    memory = mmap.mmap(mine, num_bytes)
    group.barrier()  # everyone has it: what kept it reachable can go
    os.close(mine)
    if group.leads_node and path:
        os.unlink(path)
    return HostBuffer(num_bytes, pin, torch.frombuffer(memory, dtype=torch.uint8))


def _create(num_bytes: int) -> tuple[int, int, str]:
    """(pid, open file, its path where it has one) of `num_bytes` of shared memory."""
    path = ""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("fitune-weights")
    else:
        descriptor, path = tempfile.mkstemp(prefix="fitune-weights-")
    os.ftruncate(descriptor, num_bytes)
    return os.getpid(), descriptor, path


class SharedBacking(RamBacking):
    """Layers in memory that the node's ranks share. Only the first of them packs weights and writes."""

    def __init__(self, layouts: dict[int, Layout], pin: bool, group: Single):
        self._group = group
        self.reused = not group.leads_node
        self.buffers = {layer: shared_buffer(group, layout.num_bytes, pin) for layer, layout in layouts.items()}

    def write(self, layer: int, piece: Any, tensor: torch.Tensor) -> None:
        if not self.reused:
            super().write(layer, piece, tensor)


def open_shared(built: Built, plan: Plan, group: Single) -> None:
    """Room in shared memory for everything that waits on the host; before the first weight is read.

    Raises:
        UserError: not enough RAM for one copy.
    """
    pin = built.device.type == "cuda" and plan.stream_from != "pageable"
    provided: set[str] = set()
    if built.host_head is not None:
        built.host_head.allocate(pin, lambda num_bytes, pinned: shared_buffer(group, num_bytes, pinned))
        provided.add(_name(built, built.host_head))
    if built.host_embedding is not None:
        provided.add(_name(built, built.host_embedding))
    if built.streamed is not None and plan.stream_from in ("pinned", "pageable"):
        needed, available = built.streamed.total_bytes, host_memory(Path("/")).available_bytes
        if needed > available:
            raise UserError(
                "not enough RAM for the weights that wait outside the GPUs",
                f"one copy for all GPUs takes {format_bytes(needed)}, {format_bytes(available)} are available",
                "close other programs, use a smaller base (--method qlora), or stream from disk",
            )
        built.streamed.backing = SharedBacking(built.streamed.layouts, pin and plan.stream_from == "pinned", group)
        if pin and plan.stream_from == "pinned":
            built.notes += built.streamed.refusals()
    if not group.leads_node:
        built.provided = frozenset(provided & wanted_weights(built).keys())
    built.host_opened = True


def close_shared(built: Built, group: Single) -> None:
    """After the weights are in place: the embedding's table moves to shared memory too, then all see all of it."""
    if built.host_embedding is not None:
        inner: Any = built.host_embedding.inner
        if built.tied_on_host:
            assert built.host_head is not None
            table = built.host_head.weight
        else:
            weight = inner.weight
            buffer = shared_buffer(group, weight.numel() * weight.element_size(), pin=False)
            table = buffer.tensor.view(weight.dtype).view(weight.shape)
            if group.leads_node:
                table.copy_(weight.detach())
        inner.weight = nn.Parameter(table, requires_grad=False)
    group.barrier()


def _name(built: Built, wanted: nn.Module) -> str:
    return next(f"{name}.weight" for name, module in built.model.named_modules() if module is wanted)
