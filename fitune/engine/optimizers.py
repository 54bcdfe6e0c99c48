"""Optimizers by name, their state without values for the memory trace, and fp32 masters of 16-bit parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fitune.errors import UserError

NEEDS_CUDA = ("paged_adamw", "paged_adamw8bit")
EIGHT_BIT = ("adamw8bit", "paged_adamw8bit", "lion8bit")
_BNB_MIN_8BIT = 4096  # bitsandbytes keeps fp32 state for tensors with fewer elements (min_8bit_size)
_BNB_BLOCK = 256  # values per scale of its 8-bit state


def build_optimizer(
    name: str, parameters: list[torch.Tensor], *, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """An optimizer over fp32 tensors on one device.

    Raises:
        UserError: the optimizer needs a GPU, or its library is missing.
    """
    device = parameters[0].device.type
    if name in NEEDS_CUDA and device != "cuda":
        raise UserError(
            f"optimizer {name} cannot run here",
            "paged state needs an NVIDIA GPU's unified memory",
            "use --optimizer adamw or adamw8bit",
        )
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)
    if name == "adafactor":
        return torch.optim.Adafactor(parameters, lr=lr, weight_decay=weight_decay)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay)
    try:
        import bitsandbytes.optim as bnb
    except ImportError as error:
        raise UserError(f"optimizer {name} needs bitsandbytes", str(error), "pip install bitsandbytes") from None
    kinds = {
        "adamw8bit": bnb.AdamW8bit,
        "paged_adamw": bnb.PagedAdamW,
        "paged_adamw8bit": bnb.PagedAdamW8bit,
        "lion": bnb.Lion,
        "lion8bit": bnb.Lion8bit,
    }
    if name not in kinds:
        raise UserError(f"unknown optimizer {name!r}", "", f"one of: adamw, adafactor, sgd, {', '.join(kinds)}")
    return kinds[name](parameters, lr=lr, weight_decay=weight_decay)


def abstract_state(name: str, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The optimizer's state on `meta`: what the first step adds to device memory. Paged state is not on the device.

    Sources: torch.optim (two fp32 moments and a step scalar per tensor for AdamW; factored second moment for
    Adafactor), bitsandbytes 0.50 (uint8 moments with one fp32 scale per 256 values, two code tables per process).
    """
    made: list[torch.Tensor] = []

    def empty(count: int, dtype: torch.dtype = torch.float32) -> None:
        made.append(torch.empty(count, dtype=dtype, device="meta"))

    moments = {"adamw": 2, "adamw8bit": 2, "lion": 1, "lion8bit": 1}.get(name, 0)
    for p in parameters:
        if name == "adafactor":
            empty(1)
            if p.dim() > 1:
                empty(p.shape[:-1].numel())
                empty(p.shape[:-2].numel() * p.shape[-1])
            else:
                empty(p.numel())
            continue
        for _ in range(moments):
            if name in EIGHT_BIT and p.numel() >= _BNB_MIN_8BIT:
                empty(p.numel(), torch.uint8)
                empty(-(-p.numel() // _BNB_BLOCK))
            else:
                empty(p.numel())
        if name == "adamw":
            empty(1)
    if name in EIGHT_BIT:
        empty(256)
        empty(256)
    return made


class Masters:
    """fp32 copies of trained parameters that compute in 16 bit; a fp32 parameter is its own master.

    Gradients are added to the master in fp32 as soon as a part of the backward pass has made them, so that neither
    accumulation over micro-batches nor over loss chunks happens in 16 bit.
    """

    def __init__(self, trainable: dict[str, nn.Parameter]):
        self.pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, p in trainable.items():
            own = p.dtype == torch.float32
            self.pairs[name] = (p, p if own else nn.Parameter(p.detach().float(), requires_grad=True))

    def parameters(self) -> list[nn.Parameter]:
        return [master for _, master in self.pairs.values()]

    def collect(self, names: Iterable[str]) -> None:
        """Move new 16-bit gradients of these parameters into their masters."""
        for name in names:
            p, master = self.pairs[name]
            if p is master or p.grad is None:
                continue
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad += p.grad
            p.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters that compute."""
        for p, master in self.pairs.values():
            if p is not master:
                p.copy_(master)


def flatten_state(optimizer: torch.optim.Optimizer, names: list[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimizer's state as tensors ("parameter|key") and plain numbers, for saving without pickle."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{names[index]}|{key}"] = value.detach().cpu().contiguous()
            elif isinstance(value, (int, float, bool)):
                numbers[f"{names[index]}|{key}"] = value
    return tensors, numbers


def restore_state(
    optimizer: torch.optim.Optimizer, names: list[str], tensors: dict[str, torch.Tensor], numbers: dict[str, Any]
) -> None:
    """Inverse of `flatten_state` on an optimizer built over the same parameters in the same order."""
    index_of = {name: index for index, name in enumerate(names)}
    whole = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for flat, value in {**tensors, **numbers}.items():
        name, _, key = flat.rpartition("|")
        state.setdefault(index_of[name], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})
