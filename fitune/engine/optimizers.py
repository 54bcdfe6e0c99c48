"""Optimizers by name, their state without values for the memory trace, and fp32 masters of 16-bit parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fitune.errors import UserError
from fitune.model.formats import load_bitsandbytes

NEEDS_CUDA = ("paged_adamw", "paged_adamw8bit")
EIGHT_BIT = ("adamw8bit", "paged_adamw8bit", "lion8bit")
_BNB_MIN_8BIT = 4096  # bitsandbytes keeps fp32 state for tensors with fewer elements (min_8bit_size)
_BNB_BLOCK = 256  # values per scale of its 8-bit state
_BNB_MIN_PAGED = 100_000  # its paged optimizers keep the state of smaller tensors on the device
_BNB_TABLES = ("qmap1", "qmap2")  # code tables of 8-bit state: constants that all tensors share


def require_device(name: str, device: str) -> None:
    """Raises UserError when this optimizer does not run on this kind of device (cpu, cuda)."""
    if name in NEEDS_CUDA and device != "cuda":
        raise UserError(
            f"optimizer {name} cannot run here",
            "paged state needs an NVIDIA GPU's unified memory",
            "use --optimizer adamw or adamw8bit",
        )


def build_optimizer(
    name: str, parameters: list[torch.Tensor], *, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """An optimizer over fp32 tensors on one device.

    Raises:
        UserError: the optimizer needs a GPU, or its library is missing.
    """
    require_device(name, parameters[0].device.type)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)
    if name == "adafactor":
        # An update's root mean square is at most lr, as in transformers' Adafactor(scale_parameter=False): scaled by
        # the parameter's own size (torch's default), adapters that start at zero would hardly move. One tensor at a
        # time: torch's grouped implementation holds a copy of all gradients.
        return torch.optim.Adafactor(parameters, lr=lr, weight_decay=weight_decay, eps=(None, 1.0), foreach=False)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay, fused=True)  # no copy of the gradients
    try:
        bnb = load_bitsandbytes().optim
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
    Adafactor), bitsandbytes 0.50 (uint8 moments with one fp32 scale per 256 values, a code table per moment that all
    tensors share; paged moments only for tensors of 100,000 elements and more).
    """
    made: list[torch.Tensor] = []

    def empty(count: int, dtype: torch.dtype = torch.float32) -> None:
        made.append(torch.empty(count, dtype=dtype, device="meta"))

    kind = name.removeprefix("paged_")
    moments = {"adamw": 2, "adamw8bit": 2, "lion": 1, "lion8bit": 1}.get(kind, 0)
    has_tables = False
    for p in parameters:
        if name == "adafactor":
            empty(1)
            if p.dim() > 1:
                empty(p.shape[:-1].numel())
                empty(p.shape[:-2].numel() * p.shape[-1])
            else:
                empty(p.numel())
            continue
        paged = name.startswith("paged_") and p.numel() >= _BNB_MIN_PAGED
        in_8bit = name in EIGHT_BIT and p.numel() >= _BNB_MIN_8BIT
        has_tables |= in_8bit
        for _ in range(moments):
            if not paged:
                empty(p.numel(), torch.uint8 if in_8bit else torch.float32)
            if in_8bit:
                empty(-(-p.numel() // _BNB_BLOCK))
        if name == "adamw":
            empty(1)
    for _ in range(moments if has_tables else 0):
        empty(256)
    return made


def update_peak_bytes(name: str, parameters: Iterable[torch.Tensor]) -> int:
    """What an update allocates besides state: Adafactor's fp32 copy of the largest tensor; the others work in place."""
    return max((p.numel() * 4 for p in parameters), default=0) if name == "adafactor" else 0


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

    def forget(self) -> None:
        """Drop all gradients."""
        for p, master in self.pairs.values():
            p.grad = master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters that compute."""
        for p, master in self.pairs.values():
            if p is not master:
                p.copy_(master)


def _by_name(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, torch.Tensor]:
    return dict(zip(names, (p for group in optimizer.param_groups for p in group["params"]), strict=True))


def flatten_state(optimizer: torch.optim.Optimizer, names: list[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimizer's state as tensors ("parameter|key") and plain numbers, for saving without pickle.

    The tensors are the optimizer's own, where they are: save them before the next step. They are read from the
    optimizer itself, since bitsandbytes' `state_dict` nests some of them.
    """
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for name, p in _by_name(optimizer, names).items():
        for key, value in optimizer.state.get(p, {}).items():
            if key in _BNB_TABLES:
                continue
            if isinstance(value, torch.Tensor):
                tensors[f"{name}|{key}"] = value.detach()
            elif isinstance(value, (int, float, bool)):
                numbers[f"{name}|{key}"] = value
            else:
                raise TypeError(f"optimizer state {key} of {name} is a {type(value).__name__}, which cannot be saved")
    return tensors, numbers


class Picked(Mapping[str, torch.Tensor]):
    """Some saved tensors under other names, each read when it is asked for.

    Args:
        names: each tensor's name here, and what it is saved as.
        form: what becomes of a tensor that was read, from its name here and itself.
    """

    def __init__(
        self, saved: Mapping[str, torch.Tensor], names: Mapping[str, str],
        form: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
    ):  # fmt: skip
        self._saved, self._names, self._form = saved, names, form

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._form(name, self._saved[self._names[name]])

    def __contains__(self, name: object) -> bool:
        return name in self._names  # a mapping's own would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def restore_state(
    optimizer: torch.optim.Optimizer, names: list[str], tensors: Mapping[str, torch.Tensor], numbers: dict[str, Any]
) -> None:
    """Inverse of `flatten_state` on an optimizer built over the same parameters in the same order. Tensors are asked
    for one by one, and each is put where it stays before the next.

    Raises:
        UserError: the state is of other parameters or another optimizer.
    """
    index_of = {name: index for index, name in enumerate(names)}
    saved: dict[int, dict[str, str]] = {}
    for flat in (*tensors, *numbers):
        name, _, key = flat.rpartition("|")
        if name not in index_of:
            raise _other_state(f"it holds optimizer state of {name}, which is not trained here")
        saved.setdefault(index_of[name], {})[key] = flat

    def value(flat: str) -> Any:
        return tensors[flat] if flat in tensors else numbers[flat]

    if hasattr(optimizer, "get_state_buffer"):
        _restore_bitsandbytes(optimizer, saved, value)
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {index: {key: _moved(value(flat), parameters[index]) for key, flat in keys.items()}
             for index, keys in saved.items()}  # fmt: skip
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _moved(value: Any, parameter: torch.Tensor) -> Any:
    """State on its parameter's device; numbers that an optimizer keeps on the host (0-D) it moves itself."""
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value


@torch.no_grad()
def _restore_bitsandbytes(optimizer: Any, state: dict[int, dict[str, str]], read: Callable[[str], Any]) -> None:
    """Into state that the optimizer makes itself, so that paged state is paged again and code tables are shared.

    Args:
        state: by parameter: what `read` is asked for to get each of its values.
    """
    (group,) = optimizer.param_groups
    for index, saved in state.items():
        p = group["params"][index]
        optimizer.state[p].clear()
        optimizer.init_state(group, p, 0, index)
        made = optimizer.state[p]
        if p.device.type == "cuda":
            torch.cuda.synchronize(p.device)  # paged memory is written below by the CPU, after the GPU's zeros
        if set(made) - set(_BNB_TABLES) != set(saved):
            raise _other_state(f"it holds {', '.join(sorted(saved))} per parameter")
        for key, flat in saved.items():
            value = read(flat)
            if isinstance(value, torch.Tensor):
                made[key].copy_(value)
            else:
                made[key] = value
            del value


def _other_state(why: str) -> UserError:
    return UserError("the checkpoint does not fit this run", why, "resume with the settings the run was started with")
