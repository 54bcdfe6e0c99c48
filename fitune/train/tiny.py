"""A small model of random weights on the real engine: what calibration and benchmarks run when they need a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fitune.engine.engine import Engine, StepResult


def tiny_engine(
    index: int | None,
    *,
    base_format: str,
    num_layers: int = 2,
    hidden_size: int = 1024,
    vocab_size: int = 8192,
    batch: int = 2,
    seq_len: int = 256,
) -> Engine:
    """A llama of this size with LoRA on all linear layers, planned, loaded and ready for steps.

    Half of the layers recompute their activations and a step has two micro-batches, so that every part of a training
    step runs. The allocator is left as it is: whoever wants `expandable_segments` or a cap sets it before.

    Args:
        index: the GPU's number; None is the CPU.
        base_format: `nf4`, `fp4`, `int8` (which need bitsandbytes) or `bf16`, `fp16`, `fp32`.
    """
    import torch
    from transformers import AutoConfig

    from fitune import recipe as recipes
    from fitune.engine.engine import Engine
    from fitune.model.build import add_adapter, build, fill, wanted_weights
    from fitune.model.source import ModelSource
    from fitune.planner import make_plan

    config = AutoConfig.for_model(
        "llama", hidden_size=hidden_size, intermediate_size=hidden_size * 11 // 4, num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64, num_key_value_heads=max(1, hidden_size // 256), vocab_size=vocab_size,
        max_position_embeddings=max(2048, seq_len), tie_word_embeddings=False,
    )  # fmt: skip
    quantised = base_format in recipes.QUANTISED_FORMATS
    recipe = recipes.build(
        dict(
            model="tiny",
            method="qlora" if quantised else "lora",
            base_format=base_format,
            batch=batch,
            micro_batch=max(1, batch // 2),
            seq_len=seq_len,
            recompute=num_layers // 2,
            devices="cpu" if index is None else str(index),
        )
    )
    plan = make_plan(recipe, config=config).plan
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    built = build(config, plan, device)
    source = ModelSource("tiny", "random", None, config, "bf16" if plan.precision == "bf16" else "fp32")
    fill(built, source.iter_weights(set(wanted_weights(built)), device=device), plan)
    add_adapter(built, plan)
    return Engine(built, plan)


def tiny_step(engine: Engine, step: int) -> StepResult:
    """One optimizer step on full rows of random tokens, and the device's work awaited."""
    import numpy as np
    import torch

    from fitune.data.batches import step_batches
    from fitune.data.records import Record

    plan: Any = engine.plan
    rng = np.random.default_rng(step)
    records = []
    for index in range(plan.batch):
        ids = rng.integers(5, engine.built.model.config.vocab_size, plan.seq_len).astype(np.int32)
        records.append(Record(index, ids, ids.copy()))
    batches = step_batches(records, micro_batch=plan.micro_batch, packing=False, seq_len=plan.seq_len, pad_id=0)
    result = engine.step(batches, step=step, lr=1e-4)
    if plan.device == "cuda":
        torch.cuda.synchronize()
    return result
