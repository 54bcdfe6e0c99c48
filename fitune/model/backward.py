"""Backward passes on the thread that asks for them.

Left to itself, autograd runs them on a thread of its own per GPU. Here nothing is gained by that, since the caller
waits; and a second thread that multiplies has a second cuBLAS workspace (32 MiB from Hopper on; see
`fitune.memory.constants`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.autograd.graph import GradientEdge


def on_this_thread() -> AbstractContextManager[None]:
    """Inside, backward passes run on the calling thread."""
    return torch.autograd.set_multithreading_enabled(False)


def forget_failed() -> None:
    """Let go of a backward pass that raised: what it had not come to waits in its thread's queue, with the tensors that
    it holds, until the next one begins. This is one."""
    with on_this_thread(), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).mul(1).backward()


def backward(root: torch.Tensor | GradientEdge, grad: torch.Tensor) -> None:
    """`torch.autograd.backward` from one tensor, or the edge of the graph that made it, whose gradient is `grad`."""
    with on_this_thread():
        torch.autograd.backward(root, grad)
