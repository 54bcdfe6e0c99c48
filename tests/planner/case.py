"""Machines with any amount of memory, a small model's configuration, and plans for them."""

from __future__ import annotations

import functools
from typing import Any

from fitune import recipe as recipes
from fitune.hardware import Device, Machine
from fitune.memory.constants import HEADROOM, overheads
from fitune.planner import DataFacts, PlanResult, make_plan
from fitune.units import GIB, MIB
from tests import tiny

TIGHT = 130 * MIB  # lora on the small model of `config` needs some 75 to 240 MiB of tensors
AMPERE: dict[str, Any] = dict(compute_capability="8.6", bf16=True, flash_attention=True)
TURING: dict[str, Any] = dict(compute_capability="7.5", bf16=False, flash_attention=False)


def card(total_bytes: int = 24 * GIB, **changes: Any) -> Device:
    values = dict(index=0, name="Card", vendor="NVIDIA", total_bytes=total_bytes, free_bytes=total_bytes) | AMPERE
    return Device(**(values | changes))


def machine(*devices: Device, ram_bytes: int | None = None, **changes: Any) -> Machine:
    """Beside cards there is too little RAM for anything to wait in, unless it is given."""
    ram_bytes = ram_bytes or (GIB if devices else 32 * GIB)
    return Machine(devices, ram_bytes, ram_bytes, "machine", 8, ram_bytes // 2, "a guess", **changes)


def card_for(limit_bytes: int, **changes: Any) -> Device:
    """A card on which tensors may take `limit_bytes`."""
    extra = overheads("cuda", (8, 6))
    total = int((limit_bytes + extra.context_bytes + extra.workspace_bytes) / (1 - HEADROOM)) + 1
    return card(total, **changes)


@functools.cache
def config(name: str = "llama", **changes: Any) -> Any:
    """About 30 M parameters in 8 layers: a step's terms are tens of MiB."""
    size = dict(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=8000, max_position_embeddings=4096,
    )  # fmt: skip
    return tiny.config_of(name, **(size | changes))


def recipe(**values: Any) -> Any:
    return recipes.build(dict(model="m", seq_len=256, batch=4) | values)


def plan(
    limit_bytes: int | None = None, *, on: Machine | None = None, conf: Any = None, data: DataFacts | None = None,
    **values: Any,
) -> PlanResult:  # fmt: skip
    """The plan for a card whose limit is given (or a machine), and a small model."""
    where = on or machine(card_for(limit_bytes) if limit_bytes is not None else card())
    return make_plan(recipe(**values), where, config=conf or config(), data=data)


def peak(result: PlanResult) -> int:
    """Bytes of tensors at the highest peak: what the limit is compared with."""
    return result.predicted["peak_allocated_bytes"] - overheads("cuda", (8, 6)).workspace_bytes


def reason(result: PlanResult, decision: str) -> Any:
    (found,) = [r for r in result.reasons if r.decision == decision]
    return found
