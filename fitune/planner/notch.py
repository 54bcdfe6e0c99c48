"""The next smaller plan when one ran out of memory after all: one notch, the same mathematics, the same batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fitune.memory.layouts import REPLICATED
from fitune.plan import OWN, Plan
from fitune.planner.ladder import SMALLEST_CHUNK

Change = tuple[dict[str, Any], str]
# Ways of sharing a step (`Plan.parallel`) in which layer inputs, the head, and layers can wait in host RAM.
_INPUTS_IN_RAM = frozenset({"none", "ddp", "streamed", "cp", "fsdp2", "tp"})
_HEAD_IN_RAM = frozenset({"none", "ddp", "streamed", "cp", "fsdp2"})
_LAYERS_IN_RAM = frozenset({"none", "ddp", "streamed", "cp"})


def next_notch(
    plan: Plan, fixed: frozenset[str] = frozenset(), *, where: str = "device", phase: str = "step",
    rank: int | None = None,
) -> tuple[Plan, str] | None:  # fmt: skip
    """A plan that needs less of the memory that ran out, and what changed in words; None when no exact notch is left.

    Device memory, in order: half the micro-batch (the rest is accumulated), half of the layers that keep their
    activations recompute, then all; layer inputs move to host RAM; a smaller loss chunk; frozen weights stream. Pinned
    memory: pageable instead. Host memory: layer inputs stay on the device; on the CPU the device's notches. None of
    them changes which records make a step, their order or the loss but for rounding. Approximate changes (a quantised
    base, 8-bit optimizer state) are never taken here, nor what the plan's way of sharing a step (`parallel`) refuses.

    Args:
        fixed: settings that the person gave: they stay.
        where: ``device``, ``pinned`` or ``host``.
        phase: ``step``; ``eval`` leaves out what only the backward pass needs, ``load`` all but where weights lie.
        rank: where GPUs that work apart from each other have shares of their own, the one whose memory ran out: what it
            can change alone it does alone. None: nobody knows, each changes what it can.
    """
    if not plan.shares or plan.parallel not in REPLICATED:
        found = _first(plan, fixed, where, phase)
        return None if found is None else (plan.changed(found[0]), found[1])
    told, together = [], None
    for one in range(plan.world_size) if rank is None else (rank,):
        found = _first(plan.of_rank(one), fixed, where, phase)
        if found is not None and found[0].keys() <= set(OWN):
            plan = plan.changed(found[0], one)
            told.append(f"GPU {one} ({plan.shares[one].card}): {found[1]}")
        else:  # it has come to what all can only change together
            together = together or found
    if told:
        return plan, "; ".join(told)
    return None if together is None else (plan.changed(together[0]), together[1])


def _first(plan: Plan, fixed: frozenset[str], where: str, phase: str) -> Change | None:
    """The first change that is not of something fixed."""
    if where == "device" or (where == "host" and plan.device == "cpu"):
        changes = _device_changes(plan, phase)
    else:
        changes = _host_changes(plan, where)
    return next(((values, words) for values, words in changes
                 if not fixed.intersection(_SETTINGS.get(name, name) for name in values)), None)  # fmt: skip


_SETTINGS = {"recompute_layers": "recompute"}  # a plan's field where the recipe has another name


def _device_changes(plan: Plan, phase: str) -> Iterator[Change]:
    if phase != "load" and plan.micro_batch > 1:
        half = -(-plan.micro_batch // 2)
        # where gradients leave for RAM, several micro-batches that send theirs apart would take more of it
        order = {"accumulation_order": "layer-major"} if plan.masters_in_host else {}
        yield {"micro_batch": half, **order}, f"micro-batch {plan.micro_batch} -> {half}"
    if phase == "step" and plan.recompute_layers < plan.num_layers:
        half = -(-plan.num_layers // 2)
        more = half if plan.recompute_layers < half else plan.num_layers
        yield {"recompute_layers": more}, f"recomputed layers {plan.recompute_layers} -> {more}"
    on_gpu = plan.device != "cpu"
    if phase == "step" and on_gpu and not plan.offload_inputs and plan.parallel in _INPUTS_IN_RAM:
        yield {"offload_inputs": True}, "inputs of recomputed layers kept in host RAM"
    if phase != "load" and plan.loss_chunk > SMALLEST_CHUNK:
        yield {"loss_chunk": SMALLEST_CHUNK}, f"loss chunk {plan.loss_chunk} -> {SMALLEST_CHUNK} tokens"
    if on_gpu and plan.method == "lora":
        yield from _stream_more(plan)


def _stream_more(plan: Plan) -> Iterator[Change]:
    """Frozen weights leave the device: half of the layers, all, then the head."""
    streams = plan.stream_from != "none" and plan.resident_layers is not None
    resident = plan.resident_layers if streams and plan.resident_layers is not None else plan.num_layers
    source = plan.stream_from if streams else "pinned"
    if resident > 0 and plan.parallel in _LAYERS_IN_RAM:
        fewer = plan.num_layers // 2 if resident > plan.num_layers // 2 else 0
        words = f"frozen layers on the GPU {resident} -> {fewer}, the others stream from host RAM"
        yield {"stream_from": source, "resident_layers": fewer}, words
    elif resident == 0 and plan.head_place == "device" and plan.parallel in _HEAD_IN_RAM:
        yield {"head_place": "host"}, "the output head streams from host RAM"


def _host_changes(plan: Plan, where: str) -> Iterator[Change]:
    if plan.stream_from == "pinned":
        yield {"stream_from": "pageable"}, "frozen weights in pageable instead of pinned RAM"
    if plan.offload_inputs:
        yield {"offload_inputs": False}, "inputs of recomputed layers stay on the GPU"
    if where == "host" and plan.stream_from == "pageable" and not plan.masters_in_host:  # what is trained stays in RAM
        yield {"stream_from": "disk"}, "frozen weights are read from disk"
