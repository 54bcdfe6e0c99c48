"""Which decoders can be driven layer by layer, and which of their linear layers become `BaseLinear`: the others stay as
their class made them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fitune.errors import UserError
from fitune.model.linear import BaseLinear
from fitune.model.random_weights import owner_of

if TYPE_CHECKING:
    from fitune.model.build import Built

_LIKE = "such as Llama, Qwen, Mistral, Gemma 3, the larger Gemma 4, Phi, OLMo or GLM"
_READ = re.compile(r"\bself\.(\w+)\.weight\b(?!\[|\.shape)")


def check_layers(model: Any, layers: nn.ModuleList) -> None:
    """Before anything is replaced.

    Raises:
        UserError: decoder layers have more in common than hidden states and positions, while each is loaded, run and
            recomputed by itself here.
    """
    config = model.config
    shared = getattr(config, "num_kv_shared_layers", 0)
    owners: dict[int, int] = {}
    weights = [(index, id(p)) for index, layer in enumerate(layers) for p in layer.parameters()]
    why = None
    if shared:
        why = f"its last {shared} layers read the keys and values of earlier ones"
    elif getattr(config, "hidden_size_per_layer_input", 0):
        why = "each of its layers reads an embedding of its own beside the hidden states"
    elif any(owners.setdefault(key, index) != index for index, key in weights):
        why = "some of its layers are one and the same weights"
    if why is not None:
        raise UserError(
            f"cannot train {type(model).__name__}",
            f"{why}, and fitune runs layers one by one",
            f"use a model whose layers stand alone, {_LIKE}",
        )


def check_attention(config: Any) -> None:
    """For a model that keeps its own attention.

    Raises:
        UserError: its class knows no fused one (Bloom, MPT, GPT-Neo), or is none of attention at all (Mamba).
    """
    from transformers import AutoModelForCausalLM

    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is not None and not model_class._supports_sdpa:
        raise UserError(
            f"cannot train {model_class.__name__}",
            "its class in transformers has no fused attention",
            f"use another model, {_LIKE}",
        )


def set_buffers(model: Any, path: str, module: nn.Module, names: Collection[str]) -> None:
    """Give a module's buffers their values on the CPU, by the model's own initialiser; those that come with the weights
    may be open still.

    The initialiser runs over NaN, or twice over different numbers where a type has none: what it leaves out shows.

    Raises:
        UserError: it leaves one out, so that nobody knows its values.
    """
    found = []
    for number in (0, 1):
        for name in names:
            buffer = module._buffers[name]
            assert buffer is not None
            unset = float("nan") if buffer.is_floating_point() else number
            module._buffers[name] = torch.full_like(buffer, unset, device="cpu")
        owner_of(model, path)._init_weights(module)
        found.append({name: buffer for name in names if (buffer := module._buffers[name]) is not None})
        if all(buffer.is_floating_point() for buffer in found[0].values()):
            break
    for name in found[0].keys() & module._non_persistent_buffers_set:
        first, last = found[0][name], found[-1][name]
        if bool(last.isnan().any()) or not (last.is_floating_point() or torch.equal(first, last)):
            raise UserError(
                f"cannot train {type(model).__name__}",
                f"its class does not say what {path}.{name} holds when a model is made layer by layer",
                f"use another model, {_LIKE}",
            )


def replace_linears(built: Built) -> None:
    """Put a `BaseLinear` in the place of every linear layer of the decoder that is called and nothing more."""
    from transformers.pytorch_utils import Conv1D

    parents = dict(built.model.named_modules())
    for name, module in list(built.model.named_modules()):
        if not name.startswith(built.layers_prefix + ".") or not isinstance(module, (nn.Linear, Conv1D)):
            continue
        if type(module) not in (nn.Linear, Conv1D) and {"__init__", "forward"} <= vars(type(module)).keys():
            continue  # it is more than its product: the routers of Llama 4 and Phi-MoE
        parent, _, leaf = name.rpartition(".")
        owner: Any = type(parents[parent])
        if leaf in weights_read(owner):
            continue
        rows, cols = module.weight.shape
        transposed = isinstance(module, Conv1D)
        out_features, in_features = (cols, rows) if transposed else (rows, cols)
        linear = BaseLinear(name, in_features, out_features, built.context, transposed=transposed)
        if module.bias is not None:
            linear.bias = nn.Parameter(module.bias, requires_grad=False)
        setattr(parents[parent], leaf, linear)
        built.linears[name] = linear


@functools.lru_cache(maxsize=1024)
def weights_read(cls: Any) -> frozenset[str]:
    """Names of the linear layers whose weight a class reads itself, by its source: routers that compute in their
    weight's dtype or with a copy of it (HunYuan-MoE, LongCat), projections whose weight goes into a kernel of a
    state-space layer (Mamba; peft does not adapt those either). They keep a weight of their own, have no adapter and
    are not quantised.

    Slices and shapes do not count: Bloom asks for them where it repeats its training's rounding, which is off in all
    that is published.
    """
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__ not in _PLAIN:
            with contextlib.suppress(OSError, TypeError):  # made at run time: a weight that is read is missed loudly
                found.update(_READ.findall(inspect.getsource(base)))
    return frozenset(found)


_PLAIN = ("builtins", "torch.nn.modules.module", "torch.nn.modules.container", "transformers.modeling_layers")
