"""Seeded random weights of any shape, made module by module: the real commands without a file."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fitune.model.weights import tensor_names

if TYPE_CHECKING:
    import torch


def stream(model: Any, seed: int, dtype: torch.dtype, device: Any, names_wanted: set[str] | None) -> Iterator:
    """(name, tensor) for every tensor of ``model`` (on meta), in its order, initialised as transformers initialises it.

    Each module has a generator of its own, seeded by (seed, module's name), so a tensor does not depend on which others
    were asked for, nor on their order. CPU and CUDA generators differ: the values depend on the kind of device.
    """
    modules = dict(model.named_modules())
    made: dict[str, torch.Tensor] = {}
    for name in tensor_names(model):
        if names_wanted is not None and name not in names_wanted:
            continue
        if name not in made:
            path = name.rpartition(".")[0]
            made = _initialised(model, modules[path], path, seed, dtype, device)  # the module before it is let go
        yield name, made.pop(name)


def _initialised(model: Any, module: Any, path: str, seed: int, dtype: torch.dtype, device: Any) -> dict:
    """The module's own tensors (not its children's), by full name."""
    import torch

    own = copy.copy(module)  # shallow: its children stay on meta
    own._parameters = {key: _empty(p, dtype, device) for key, p in module._parameters.items()}
    own._buffers = {key: _empty(b, b.dtype, device) if b is not None else None for key, b in module._buffers.items()}
    kind = torch.device(device)
    with torch.random.fork_rng(devices=[kind] if kind.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{path}".encode()).digest()[:8], "little") >> 1)
        owner_of(model, path)._init_weights(own)
        _fill_untouched(own, getattr(model.config, "initializer_range", 0.02))
    tensors = {**own._parameters, **{k: b for k, b in own._buffers.items() if k not in own._non_persistent_buffers_set}}
    prefix = f"{path}." if path else ""
    return {prefix + key: tensor.detach() for key, tensor in tensors.items() if tensor is not None}


def _empty(tensor: Any, dtype: torch.dtype, device: Any) -> Any:
    """Room for the tensor, filled with NaN so that what an initialiser leaves out can be found."""
    import torch

    if tensor is None:
        return None
    if not tensor.dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    filled = torch.full(tensor.shape, float("nan"), dtype=dtype, device=device)
    return torch.nn.Parameter(filled, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else filled


def owner_of(model: Any, path: str) -> Any:
    """The innermost PreTrainedModel that holds the module: its `_init_weights` is the right one."""
    owner, here = model, model
    for part in path.split(".") if path else ():
        here = getattr(here, part)
        if hasattr(here, "_init_weights"):
            owner = here
    return owner


def _fill_untouched(module: Any, std: float) -> None:
    """Parameters the model's initialiser does not know: matrices normal(0, std), vectors zero."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is None or tensor.is_meta or not tensor.is_floating_point():
            continue
        if bool(tensor.flatten()[-1:].isnan().any()):
            if tensor.dim() >= 2:
                tensor.normal_(0.0, std)
            else:
                tensor.zero_()
