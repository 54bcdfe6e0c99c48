"""What a built model holds on its device before a step, and the optimizer state that its first step makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fitune.engine.optimizers import Masters, abstract_state
from fitune.engine.ring import Ring
from fitune.memory.in_host import Ends, InHost
from fitune.memory.pieces import BUFFER, MASTER, Held, Tensor, Trained
from fitune.memory.states import Dims
from fitune.model.build import Built

_MOMENTS = {"adamw": ("first moment", "second moment"), "lion": ("moment",), "adafactor": (), "sgd": ()}
_TABLE_VALUES = 256  # of bitsandbytes' 8-bit codes, shared by all tensors


def device_tensors(built: Built) -> list[tuple[str, torch.Tensor]]:
    """Everything a built model holds on its device, by name, in the order of its modules (in which weights arrive)."""
    tensors = [*built.model.named_parameters(), *built.model.named_buffers()]
    for name, linear in built.linears.items():
        if linear.packed is None:  # another rank's
            continue
        tensors += [(f"{name}.{key}", t) for key, t in linear.packed.tensors.items()]
    for experts in built.experts:
        for name, packed in experts.packed.items():
            tensors += [(f"{experts.prefix}.{name}.{key}", t) for key, t in packed.tensors.items()]
    order = {name: index for index, (name, _) in enumerate(built.model.named_modules())}
    tensors.sort(key=lambda entry: order[_module_of(entry[0], order)])  # stable: a module's own stay as they are
    if built.context.scratch is not None:
        tensors.append(("scratch", built.context.scratch.buffer))
    return tensors


def _module_of(name: str, modules: Mapping[str, int]) -> str:
    """The module that a tensor belongs to: "a.b" for "a.b.weight", and for "a.b.gate_up.codes" of fused experts."""
    module = name.rpartition(".")[0]
    while module not in modules:
        module = module.rpartition(".")[0]
    return module


def ring_of(built: Built) -> Ring | None:
    """The device's buffers for weights that wait in host memory."""
    return built.source if isinstance(built.source, Ring) else None


@dataclass(frozen=True)
class State:
    """A tensor of optimizer state, in the order in which the optimizer makes them. `shared`: once for all tensors."""

    label: str
    numel: int
    dtype: torch.dtype
    shared: bool = False

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def state_of(optimizer: str, parameter: torch.Tensor) -> list[State]:
    """Optimizer state that the first update makes for one trained tensor.

    Sources: torch.optim 2.11 (`_init_group`: AdamW makes the step, then both moments) and bitsandbytes 0.50
    (`init_state`: code tables when the first 8-bit tensor is met, moments, then their scales).
    """
    made = abstract_state(optimizer, [parameter])
    moments = _MOMENTS[optimizer.removeprefix("paged_").removesuffix("8bit")]
    if optimizer == "adamw":
        first, second, step = made
        return [
            State("step count of", step.numel(), step.dtype),
            *(State(f"{m} of", t.numel(), t.dtype) for m, t in zip(moments, (first, second), strict=True)),
        ]
    if optimizer == "adafactor":
        words = ["step count of", *["factor of the second moment of"] * (len(made) - 1)]
        return [State(word, t.numel(), t.dtype) for word, t in zip(words, made, strict=True)]
    wide = [t for t in made if t.numel() == parameter.numel() and t.dtype != torch.float32]
    coded = optimizer.endswith("8bit") and len(made) > len(moments)
    if not coded:
        return [State(f"{m} of", t.numel(), t.dtype) for m, t in zip(moments, made, strict=False)]
    scales = [t for t in made[: len(made) - len(moments)] if t.dtype == torch.float32]
    tables = [State("code table of 8-bit state", _TABLE_VALUES, torch.float32, shared=True)] * len(moments)
    named = [State(f"{m} of", t.numel(), t.dtype) for m, t in zip(moments, wide, strict=False)]
    return [*tables, *named, *(State("scales of a moment of", t.numel(), t.dtype) for t in scales)]


def layer_of(name: str, prefix: str) -> tuple[int, str]:
    """("model.layers.3.mlp.up.weight", "model.layers") is layer 3's "mlp.up.weight"; -1 and the name outside them."""
    if not name.startswith(f"{prefix}."):
        return -1, name
    index, _, rest = name.removeprefix(f"{prefix}.").partition(".")
    return int(index), rest


def places_of(names: Iterable[str], prefix: str) -> list[tuple[int | str, str]]:
    """Where each name of a model's tensors, in its order, belongs: a layer's number, or "before" or "after" the layers;
    and its name there."""
    found: list[tuple[int | str, str]] = []
    outside = "before"
    for name in names:
        layer, rest = layer_of(name, prefix)
        outside = "after" if layer >= 0 else outside
        found.append((layer if layer >= 0 else outside, rest))
    return found


@dataclass(frozen=True)
class Holdings:
    """What is held per layer, before and after the layers in the model's order, and state shared by all tensors."""

    layers: dict[int, Held]
    before: Held
    after: Held
    shared: tuple[Tensor, ...]


def holdings(built: Built, masters: Masters | None, optimizer: str) -> Holdings:
    """Of a built and filled model, the scratch buffer left out (its size depends on the loss chunk).

    Args:
        masters: None: they are in host memory with the optimizer's state, and nothing of them is on the device.
    """
    prefix = built.layers_prefix
    tensors: dict[Any, list[Tensor]] = {}
    trained: dict[Any, list[Trained]] = {}
    seen: set[int] = set()
    buffers = {name for name, _ in built.model.named_buffers()}
    on_device = device_tensors(built)
    places = places_of((name for name, _ in on_device), prefix)
    for (name, tensor), (where, rest) in zip(on_device, places, strict=True):
        if name == "scratch" or tensor.untyped_storage()._cdata in seen:
            continue
        seen.add(tensor.untyped_storage()._cdata)
        in_layer = isinstance(where, int)
        label = f"{prefix}.{{layer}}.{rest}" if in_layer else name
        label += BUFFER if name in buffers and in_layer else ""
        owner = "adapters" if ".lora_" in name or name.endswith("magnitude") else "weights"
        tensors.setdefault(where, []).append(Tensor(owner, label, tensor.untyped_storage().nbytes()))
    shared: tuple[Tensor, ...] = ()
    pairs = masters.pairs if masters is not None else {}
    places = places_of(pairs, prefix)
    for (name, (parameter, master)), (where, rest) in zip(pairs.items(), places, strict=True):
        label = f"{prefix}.{{layer}}.{rest}" if isinstance(where, int) else name
        if master is not parameter:
            tensors.setdefault(where, []).append(Tensor("weights", MASTER + label, master.numel() * 4))
        states = state_of(optimizer, master)
        shared = shared or tuple(Tensor("optimizer", s.label, s.num_bytes) for s in states if s.shared)
        own = tuple(Tensor("optimizer", f"{s.label} {label}", s.num_bytes) for s in states if not s.shared)
        coded = any(s.shared for s in states)
        trained.setdefault(where, []).append(Trained(rest, master.numel(), own, coded))

    def of(where: Any) -> Held:
        return Held(tuple(tensors.get(where, ())), tuple(trained.get(where, ())))

    layers = {i: of(i) for i in range(len(built.layers))}
    return Holdings(layers, of("before"), of("after"), shared)


def in_host_of(built: Built, masters: Masters, kinds: tuple[str, ...], traced: tuple[str, ...]) -> InHost:
    """What is trained of a model of layers of `kinds`, from one with a layer of each kind (`traced`)."""
    head, embedding = built.model.get_output_embeddings(), built.model.get_input_embeddings()
    plain = {"before": None, "after": None}  # tables whose gradients are made in parts (model.trained_ends)
    if type(embedding) is nn.Embedding and embedding.max_norm is None:
        plain["before"] = embedding.weight
    if type(head) is nn.Linear:
        plain["after"] = head.weight
    layers: dict[Any, list[Dims]] = {}
    sides: dict[tuple[Any, bool], list[Dims]] = {}
    places = places_of(masters.pairs, built.layers_prefix)
    for (where, _), (parameter, master) in zip(places, masters.pairs.values(), strict=True):
        found = layers.setdefault(where, []) if isinstance(where, int) else None
        found = sides.setdefault((where, parameter is plain.get(str(where))), []) if found is None else found
        found.append(tuple(master.shape))
    tied = tuple(head.weight.shape) if head is not None and head.weight is embedding.weight else None
    if tied is not None:
        sides.setdefault(("after", plain["after"] is not None), []).append(tied)

    def side(name: str) -> Ends:
        return Ends(tuple(sides.get((name, True), ())), tuple(sides.get((name, False), ())))

    each = {kind: tuple(layers.get(i, ())) for i, kind in enumerate(traced)}
    return InHost(kinds, each, side("before"), side("after"), tied)


def largest_weight(built: Built) -> int:
    """Bytes of the widest unpacked tensor that is on the device while weights load."""
    sizes = [lin.in_features * lin.out_features for lin in built.linears.values()]
    sizes += [torch.Size(shape).numel() for e in built.experts for shape in e.shapes.values()]
    return max(sizes, default=0) * built.compute_dtype.itemsize
