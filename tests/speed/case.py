"""Plans of catalog models for tests of the step-time model."""

from __future__ import annotations

import functools
from typing import Any

from fitune.catalog import models
from fitune.plan import Adapter, Plan
from fitune.speed.shape import Decoder, decoder_of

LLAMA = "meta-llama/Llama-3.1-8B"
LORA = Adapter(r=16, alpha=32, dropout=0.0, bias="none", targets=("all-linear",))
LEAN: dict[str, Any] = dict(
    stream_from="pinned", resident_layers=0, head_place="host", offload_inputs=True, loss_chunk=4096
)


@functools.cache
def decoder(name: str = LLAMA) -> Decoder:
    shape = models.find(name)
    assert shape is not None
    return decoder_of(shape)


def plan(batch: int = 4, seq_len: int = 2048, model: str = LLAMA, **changes: Any) -> Plan:
    """NF4 LoRA on an H200, everything recomputed, one micro-batch."""
    layers = len(decoder(model).layers)
    values: dict[str, Any] = dict(
        model=model, num_layers=layers, method="lora", base_format="nf4", double_quant=True, adapter=LORA,
        device="cuda", device_name="NVIDIA H200", precision="bf16", loss_scaling=False, embedding_place="host",
        attention="flash", seq_len=seq_len, batch=batch, micro_batch=batch, accumulation_order="micro-batch-major",
        packing=False, recompute_layers=layers, loss_chunk=256, optimizer="adamw", lr=1e-4, schedule="constant",
        warmup=0.0, weight_decay=0.0, clip=1.0, seed=0, budget_bytes=None,
    )  # fmt: skip
    return Plan(**(values | changes))
