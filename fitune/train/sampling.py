"""Answers of a model under training, by transformers' own generation on the very modules that train."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fitune.engine.ring import WeightSource, source_of
from fitune.model.build import Built
from fitune.model.experts import PackedExperts


@contextmanager
def generating(built: Built) -> Iterator[None]:
    """Ready the layers for plain forward calls: no document boundaries or dropout; streamed weights on the device and
    fused experts unpacked while their layer runs."""
    context = built.context
    before = context.token_keys, context.doc_lengths, context.cu_seqlens
    context.token_keys = context.doc_lengths = context.cu_seqlens = None
    handles = []
    source = source_of(built)
    for index, layer in enumerate(built.layers):
        experts = built.experts_of(index)
        if experts or built.streamed is not None:
            stack = ExitStack()
            enter = functools.partial(_enter, source, index, built, experts, stack)
            handles.append(layer.register_forward_pre_hook(enter))
            handles.append(layer.register_forward_hook(functools.partial(_close, stack)))
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
        context.token_keys, context.doc_lengths, context.cu_seqlens = before


def _enter(
    source: WeightSource, index: int, built: Built, experts: list[PackedExperts], stack: ExitStack, *hook: Any
) -> None:
    stack.enter_context(source.layer(index))
    for packed in experts:
        stack.enter_context(packed.unpacked(built.compute_dtype))


def _close(stack: ExitStack, *hook: Any) -> None:
    stack.close()


def answer(
    built: Built, tokenizer: Any, prompt_ids: list[int], *, max_tokens: int, stop: Callable[[], bool] | None = None
) -> str:  # fmt: skip
    """Greedy continuation of `prompt_ids`, decoded without special tokens; deterministic.

    Args:
        stop: called after every token; True ends the answer there.
    """
    from transformers import GenerationConfig, StoppingCriteriaList

    stops = {built.model.generation_config.eos_token_id, tokenizer.eos_token_id, built.model.config.eos_token_id}
    flat = {i for s in stops for i in (s if isinstance(s, list) else [s]) if i is not None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(flat), 0)
    stretch = getattr(built.model.config, "attention_chunk_size", None)  # see `fitune.model.attention`
    fits = stretch is None or len(prompt_ids) + max_tokens <= stretch
    config = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=sorted(flat) or None, pad_token_id=pad, use_cache=fits
    )
    ids = torch.tensor([prompt_ids], device=built.device)
    criteria: Any = StoppingCriteriaList([] if stop is None else [lambda ids, scores, **rest: stop()])
    with generating(built):
        out = built.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config,
                                   stopping_criteria=criteria)  # fmt: skip
    return tokenizer.decode(out[0, len(prompt_ids) :], skip_special_tokens=True).strip()
