"""An optimizer's state from the shapes of what is trained, so that one trace serves every optimizer. Plain Python.

The same sizes as `engine.optimizers.abstract_state`, in the order and under the names of `memory.held.state_of`, which
need torch; a test compares them for every optimizer on both sides of every threshold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fitune.memory.events import rounded
from fitune.memory.pieces import STREAMED, Held, Tensor, Trained
from fitune.memory.replay import StepTerms
from fitune.memory.script import Script

Dims = tuple[int, ...]

# bitsandbytes 0.50: the smallest tensor with 8-bit state, values per scale of it, the smallest tensor with paged state.
MIN_8BIT, BLOCK, MIN_PAGED = 4096, 256, 100_000
TABLE_BYTES = 256 * 4  # of a code table of 8-bit state
_MOMENTS = {"adamw": ("first moment", "second moment"), "lion": ("moment",), "adafactor": (), "sgd": ()}


@dataclass(frozen=True)
class TrainedDims:
    """Shapes of what is trained, in the order of a script's `Held.trained`: per kind of layer, before and after."""

    layers: dict[str, tuple[Dims, ...]]
    before: tuple[Dims, ...]
    after: tuple[Dims, ...]


def dims_of(tracer: Any) -> TrainedDims:
    """Of a live tracer (`memory.trace.Tracer`); of one whose masters are in host memory nothing."""
    from fitune.memory.held import places_of
    from fitune.memory.trace import layer_kinds

    groups: dict[Any, list[Dims]] = {}
    pairs = {} if tracer.in_host else tracer.dry.engine.masters.pairs
    places = places_of(pairs, tracer.dry.built.layers_prefix)
    for (where, _), (_, master) in zip(places, pairs.values(), strict=True):
        groups.setdefault(where, []).append(tuple(master.shape))
    layers = {kind: tuple(groups.get(i, ())) for i, kind in enumerate(layer_kinds(tracer.config))}
    return TrainedDims(layers, tuple(groups.get("before", ())), tuple(groups.get("after", ())))


def state_of(optimizer: str, dims: Dims) -> tuple[list[tuple[str, int]], bool]:
    """((what, bytes) of each tensor of state on the device that the first update makes, whether the tensor is in 8 bits
    with shared code tables) for one trained tensor in fp32."""
    numel = math.prod(dims)
    if optimizer == "adafactor":
        factors = [numel] if len(dims) < 2 else [math.prod(dims[:-1]), math.prod(dims[:-2]) * dims[-1]]
        return [("step count", 4), *(("factor of the second moment", 4 * n) for n in factors)], False
    kind = optimizer.removeprefix("paged_").removesuffix("8bit")
    moments = _MOMENTS[kind]
    coded = optimizer.endswith("8bit") and numel >= MIN_8BIT
    paged = optimizer.startswith("paged_") and numel >= MIN_PAGED
    made = [] if paged else [(moment, numel * (1 if coded else 4)) for moment in moments]
    if optimizer == "adamw":
        made.insert(0, ("step count", 4))
    if coded:
        made += [("scales of a moment", 4 * -(-numel // BLOCK))] * len(moments)
    return made, coded


def update_bytes(optimizer: str, dims: Iterable[Dims]) -> int:
    """What an update allocates besides state, as `engine.optimizers.update_peak_bytes`."""
    return max((4 * math.prod(d) for d in dims), default=0) if optimizer == "adafactor" else 0


def tables(optimizer: str, dims: Iterable[Dims]) -> tuple[Tensor, ...]:
    """Code tables that all tensors in 8 bits share."""
    if not any(state_of(optimizer, d)[1] for d in dims):
        return ()
    moments = _MOMENTS[optimizer.removeprefix("paged_").removesuffix("8bit")]
    return (Tensor("optimizer", "code table of 8-bit state", TABLE_BYTES),) * len(moments)


def with_optimizer(script: Script, dims: TrainedDims, optimizer: str) -> Script:
    """The script of the same step with another optimizer."""

    def held(of: Held, shapes: Sequence[Dims]) -> Held:
        return Held(of.tensors, tuple(trained(t, d) for t, d in zip(of.trained, shapes, strict=True)))

    def trained(tensor: Trained, shape: Dims) -> Trained:
        made, coded = state_of(optimizer, shape)
        name = _label(tensor)
        return Trained(tensor.name, tensor.numel,
                       tuple(Tensor("optimizer", f"{what} of {name}", size) for what, size in made), coded)  # fmt: skip

    return replace(
        script,
        layers={kind: held(of, dims.layers[kind]) for kind, of in script.layers.items()},
        before=held(script.before, dims.before),
        after=held(script.after, dims.after),
        shared_state=tables(optimizer, _all(dims)),
        update_bytes=update_bytes(optimizer, _all(dims)),
        narrow=None if script.narrow is None else with_optimizer(script.narrow, dims, optimizer),
        _cache={},
    )


def _label(tensor: Trained) -> str:
    """The tensor's full name, with `{layer}` for its layer's number, from the label of its (AdamW's) state."""
    return tensor.state[0].label.removeprefix("step count of ")


def terms_with_optimizer(terms: StepTerms, dims: TrainedDims, optimizer: str, granule: int) -> StepTerms:
    """The terms of the same step with another optimizer, every tensor rounded to the granule."""

    def state_bytes(shapes: Iterable[Dims]) -> int:
        return sum(rounded(size, granule) for shape in shapes for _, size in state_of(optimizer, shape)[0])

    shared = sum(rounded(t.num_bytes, granule) for t in tables(optimizer, _all(dims)))
    return replace(
        terms,
        layers={
            kind: replace(t, state_bytes=state_bytes(dims.layers[kind.removesuffix(STREAMED)]))
            for kind, t in terms.layers.items()
        },
        other_state_bytes=state_bytes(dims.before) + state_bytes(dims.after) + shared,
        optimizer_peak_bytes=update_bytes(optimizer, _all(dims)),
    )


def _all(dims: TrainedDims) -> list[Dims]:
    return [d for group in (*dims.layers.values(), dims.before, dims.after) for d in group]
