"""Measures what a process holds on a GPU besides tensors, and how much host memory can be pinned. Needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fitune.units import GIB, MIB

PIN_CHUNK_BYTES = 256 * MIB
MOST_PINNED_BYTES = 16 * GIB  # the probe goes no further: pinning takes about 0.2 s per GiB


def free_bytes(index: int) -> int:
    """What the driver says is free on a card: from NVML, which needs no context, else from CUDA, which makes one."""
    from fitune import hardware

    device = next((d for d in hardware.probe().devices if d.index == index), None)
    if device is not None:
        return device.free_bytes
    import torch

    return int(torch.cuda.mem_get_info(index)[0])


def outside_bytes(index: int, free_before_bytes: int) -> int:
    """What this process holds on the card outside torch's allocator: driver context, kernels, libraries.

    Args:
        free_before_bytes: `free_bytes` before this process touched the card. What other processes take or give back in
            between counts as ours.
    """
    import torch

    torch.cuda.synchronize(index)
    return max(0, free_before_bytes - free_bytes(index) - torch.cuda.memory_reserved(index))


def kept_bytes(index: int) -> int:
    """What stays allocated once every tensor is gone: workspaces that cuBLAS and others keep for the process."""
    import gc

    import torch

    gc.collect()
    torch.cuda.synchronize(index)
    return int(torch.cuda.memory_allocated(index))


@dataclass(frozen=True)
class Pinned:
    """`num_bytes` were pinned at once; `is_limit`: more was refused, else the probe stopped there by itself."""

    num_bytes: int
    is_limit: bool


def probe_pinned(available_bytes: int, registrar: Any | None = None, chunk_bytes: int = PIN_CHUNK_BYTES) -> Pinned:
    """Pins host memory chunk by chunk until the driver refuses, half of the available memory, or 16 GiB; lets it go.

    Args:
        available_bytes: RAM that can be had without swapping.
        registrar: an object with `pin(num_bytes) -> handle | None`, `unpin(handle)` and `make_room()`, which is called
            once before; None is CUDA's own.
    """
    registrar = registrar or CudaRegistrar()
    registrar.make_room()
    most = min(available_bytes // 2, MOST_PINNED_BYTES)
    handles: list[Any] = []
    refused = False
    try:
        while (len(handles) + 1) * chunk_bytes <= most:
            handle = registrar.pin(chunk_bytes)
            if handle is None:
                refused = True
                break
            handles.append(handle)
    finally:
        for handle in handles:
            registrar.unpin(handle)
    return Pinned(len(handles) * chunk_bytes, refused)


class CudaRegistrar:
    """Pins anonymous memory of exact sizes through `cudaHostRegister` (pin_memory rounds up to powers of two)."""

    def make_room(self) -> None:
        """Gives back what torch has pinned and cached (builds without CUDA have no such call)."""
        import torch

        give_back = getattr(torch._C, "_host_emptyCache", None)
        if give_back is not None:
            give_back()

    def pin(self, num_bytes: int) -> Any:
        import torch

        memory = torch.empty(num_bytes, dtype=torch.uint8)
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)) != 0:
            self._forget_error()
            return None
        return memory

    def unpin(self, memory: Any) -> None:
        import torch

        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def _forget_error(self) -> None:
        """CUDA keeps the last error for whoever asks next; the first kernel after a refusal asks, and is told it."""
        import contextlib

        import torch

        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
