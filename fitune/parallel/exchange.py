"""Exchanges of tensors between all ranks, on the device where the tensors are. On `meta` nothing happens: a traced step
allocates what a real one does, and needs no other rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _Over:
    """An exchange that is over."""

    def wait(self) -> None:
        pass


def all_reduce(tensor: torch.Tensor) -> None:
    """`tensor` becomes the sum of every rank's."""
    if tensor.device.type != "meta":
        dist.all_reduce(tensor)


def broadcast(tensor: torch.Tensor) -> None:
    """`tensor` becomes the first rank's."""
    if tensor.device.type != "meta":
        dist.broadcast(tensor, src=0)


def all_gather(target: torch.Tensor, part: torch.Tensor) -> None:
    """`target` becomes every rank's `part`, in the order of ranks. On CUDA in the current stream's order."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on
    if target.device.type != "meta":
        gather(target, part)


def total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """L2 norm of gradients of which every rank holds others, a scalar."""
    squares = torch.nn.utils.get_total_norm(grads).square()
    all_reduce(squares)
    return squares.sqrt()


def send(tensor: torch.Tensor, peer: int) -> None:
    """Hand a tensor to another rank."""
    if tensor.device.type != "meta":
        dist.send(tensor, dst=peer)


def receive(tensor: torch.Tensor, peer: int) -> None:
    """Fill a tensor with what another rank sends."""
    if tensor.device.type != "meta":
        dist.recv(tensor, src=peer)


def all_to_all(target: torch.Tensor, parts: torch.Tensor) -> None:
    """`target` becomes what each rank has for this one: `parts` and it have a row for every rank."""
    if target.device.type != "meta":
        dist.all_to_all_single(target, parts)


def reduce_scatter(target: torch.Tensor, whole: torch.Tensor) -> Any:
    """`target` becomes this rank's part of the sum of every rank's `whole`, once `wait` of what is returned is over."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the same
    return scatter(target, whole, async_op=True) if target.device.type != "meta" else _Over()
