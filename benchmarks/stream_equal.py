"""The cases of `stream.py` that compare bits: streamed and resident, masters in host memory and on the device."""

from __future__ import annotations

from typing import Any

import bench
import stream_cases
from stream_cases import FULL_3B, FULL_RING, LEAN, RING, Case, here, opened

_SMALL = dict(method="lora", base_format="bf16", batch=1, seq_len=1024, recompute="all")
_FAMILIES = {
    "equality": bench.LLAMA_8B,
    "equality-qwen3": "random:Qwen/Qwen3-8B",
    "equality-gemma3": "random:google/gemma-3-4b-pt",
    "equality-moe": "random:Qwen/Qwen3-30B-A3B",
}


def equality(name: str, tiny: bool) -> dict[str, Any]:
    """Loss and adapter gradients of two steps, streamed against resident, with deterministic kernels: bit for bit.
    Four layers of a shape, NF4 and bf16; kept, recomputed, offloaded; a head in tiles within its own noise."""
    _deterministic(flash=name != "equality-moe")
    found = {}
    for base in ("nf4", "bf16"):
        recipe = _SMALL | dict(model=_FAMILIES[name], base_format=base)
        resident = _steps(recipe, {}, tiny)
        variants = {
            "twice the same": {},
            "ring of 2": RING,
            "ring of 3, 3 layers resident": RING | dict(ring_buffers=3, resident_layers=3),
            "inputs offloaded": RING | dict(offload_inputs=True),
            "nothing recomputed": RING | dict(recompute_layers=0),
            "pageable": RING | dict(stream_from="pageable"),
            "head in tiles": LEAN,
        }
        for way, changes in variants.items():
            found[f"{base}, {way}"] = _difference(resident, _steps(recipe, changes, tiny))
    return {**bench.header(name), "differences": found}


def equality_full(tiny: bool) -> dict[str, Any]:
    """Masters of full fine-tuning (two layers of the 3B shape, one micro-batch, so that gradients are the same) after a
    clipped update and after three, in host memory against on the device: the first within fp32 rounding with fp32
    state, 8-bit state against its own on the device. After it 16-bit weights may round to the other side here and
    there, and gradients are those of slightly different weights."""
    _deterministic()
    found = {}
    plain = dict(loss_chunk=FULL_RING["loss_chunk"])  # products of the same shapes
    for optimizer in ("adamw", "adamw8bit"):
        resident = _masters(optimizer, plain, tiny)
        for place in ("host", "streamed"):
            other = _masters(optimizer, FULL_RING | dict(optimizer_place=place), tiny)
            found[f"{optimizer}, {place}"] = _difference(resident, other)
        found[f"{optimizer}, twice the same"] = _difference(resident, _masters(optimizer, plain, tiny))
    return {**bench.header("equality-full"), "differences": found}


def _deterministic(flash: bool = True) -> None:
    """The same bits from run to run. `flash`: of attention too, which torch asks of nothing that has only a warning;
    grouped products of experts have no such kernel and then end in an error."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=not flash)
    torch.utils.deterministic.fill_uninitialized_memory = False


def _masters(optimizer: str, changes: dict[str, Any], tiny: bool) -> tuple[list[float], dict[str, Any]]:
    """Losses of three steps, and how far every master has moved in the first of them and in all."""
    engine, plan = _small(FULL_3B | dict(optimizer=optimizer, batch=1, seq_len=512), changes, 2, tiny)
    before = {name: tensor.clone() for name, tensor in engine.trained_tensors().items()}
    losses: list[float] = []
    moved: dict[str, Any] = {}
    for step in range(3):
        batches = bench.batches(plan, step, engine.built.model.config.vocab_size)
        losses.append(engine.step(batches, step=step, lr=1e-4).loss)
        if step != 1:
            moved |= {f"{step}|{name}": tensor - before[name] for name, tensor in engine.trained_tensors().items()}
    _let_go(engine)
    return losses, moved


def _small(recipe: dict[str, Any], changes: dict[str, Any], layers: int, tiny: bool) -> tuple[Any, Any]:
    """(engine, plan) of some layers of a shape."""
    from fitune.engine.engine import Engine

    case = Case("", recipe, changes, layers=layers)
    _, _, plan, source = opened(stream_cases.on_cpu(case) if tiny else case, tiny)
    plan = here(plan, tiny)
    return Engine(bench.filled(source, plan), plan), plan


def _let_go(engine: Any) -> None:
    """Before the next model is made."""
    import gc

    import torch

    if engine.built.streamed is not None:
        engine.built.source.close()
    engine.driver.ready = None
    del engine
    gc.collect()
    torch.cuda.empty_cache()


def _steps(recipe: dict[str, Any], changes: dict[str, Any], tiny: bool) -> tuple[list[float], dict[str, Any]]:
    engine, plan = _small(recipe, changes, 4, tiny)
    found = _caught(engine, plan)
    _let_go(engine)
    return found


def _caught(engine: Any, plan: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses of two steps, and the gradients before each update."""
    losses: list[float] = []
    caught: dict[str, Any] = {}
    update = engine._update

    def catch(lr: float, norm: Any) -> None:
        for name, (_, master) in engine.masters.pairs.items():
            caught[f"{len(losses)}|{name}"] = master.grad.to("cpu", copy=True)
        update(lr, norm)

    engine._update = catch
    for step in range(2):
        batches = bench.batches(plan, step, engine.built.model.config.vocab_size)
        losses.append(engine.step(batches, step=step, lr=1e-3).loss)
    del engine._update  # the engine and the function hold each other
    return losses, caught


def _difference(one: tuple[list[float], dict[str, Any]], other: tuple[list[float], dict[str, Any]]) -> dict[str, Any]:
    """Both steps must be identical to the bit; where they are not, the first step's gradients say by how much (Adam's
    first update makes steps of full size of the smallest differences)."""
    import torch

    same = one[0] == other[0] and all(torch.equal(g, other[1][n]) for n, g in one[1].items())
    found = {"bit_identical": same, "losses": [one[0], other[0]]}
    for prefix, key in (("0|", "largest_relative"), ("2|", "largest_relative_after_three")):
        pairs = [(g, other[1][n]) for n, g in one[1].items() if n.startswith(prefix) and bool(g.any())]
        if pairs:
            found[key] = max(float((a - b).norm() / a.norm()) for a, b in pairs)
    return found
