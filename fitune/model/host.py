"""Host memory of exact size that a GPU can read while it computes.

torch's `pin_memory()` takes blocks from a pool that rounds each up to a power of two. Here a buffer is a private
anonymous mapping of the size that was asked for, registered with the driver (`cudaHostRegister`). The driver may
refuse: WSL 2 and some containers cap pinned memory far below the RAM. The buffer is there all the same, not pinned.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import torch


class HostBuffer:
    """`num_bytes` bytes of host memory as a flat uint8 `tensor`; `pinned` says whether the driver registered it.

    The memory lives as long as the tensor or a view of it; it stays registered as long as this object does.
    """

    def __init__(self, num_bytes: int, pin: bool, memory: torch.Tensor | None = None):
        self.tensor = _mapped(num_bytes) if memory is None else memory
        self.pinned = pin and num_bytes > 0 and _register(self.tensor)
        if self.pinned:
            finalizer = weakref.finalize(self, _unregister, self.tensor.data_ptr())
            finalizer.atexit = False  # the driver lets go of a process that ends

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel()


def _mapped(num_bytes: int) -> torch.Tensor:
    """Pages of our own, begun on a page boundary: no other allocation shares a page that is registered."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if hasattr(mmap, "MAP_ANONYMOUS"):
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = mmap.mmap(-1, num_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _register(tensor: torch.Tensor) -> bool:
    """Whether the driver pinned the tensor's memory. False without CUDA."""
    if not torch.cuda.is_available():
        return False
    torch.cuda.init()
    if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)) == 0:
        return True
    _forget_last_error()
    return False


def _unregister(address: int) -> None:
    # Without this a later mapping at the same address cannot be registered (error 712, "already registered").
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        _forget_last_error()


def _forget_last_error() -> None:
    """The runtime remembers a refusal and torch's next kernel launch would report it as its own; torch has no binding
    of `cudaGetLastError`, so one launch is made for it. (See meta-pytorch/torchstore pull request 178.)"""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
