"""A model's shape for the other tools: from the catalog, from a configuration, or from the bare columns of a published
table."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fitune.catalog.models import ModelShape
from fitune.errors import UserError
from fitune.memory.stacks.settings import StackShape

# What bare columns leave out, by the model's name: published configurations of these families (config.json on their
# hubs). The first pattern that occurs wins; without one it is a decoder like Llama's.
_NEOX: dict[str, Any] = dict(norm="layer", parallel_residual=True)
_ONE_NORM: dict[str, Any] = dict(_NEOX, norms_per_layer=1, shared_norm=True)
FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"gemma-?2-", dict(head_dim=256, norms_per_layer=4, softcap=True)),
    (r"gemma-?[34]", dict(head_dim=256, norms_per_layer=4, qk_norm=True)),
    (r"gemma", dict(head_dim=256)),
    (r"qwen-?3", dict(head_dim=128, qk_norm=True)),
    (r"qwen-?2|qwen-?1\.5|qwen", dict(qkv_bias=True)),
    (r"falcon", _ONE_NORM),
    (r"phi-?(1|2)", dict(_ONE_NORM, qkv_bias=True)),
    (r"stablelm-(base|tuned)-alpha|pythia|neox|redpajama|dolly", _NEOX),
    (r"stablelm", dict(norm="layer")),
    (r"santacoder|starcoder|bigcode|gpt2|opt-", dict(norm="layer", qkv_bias=True)),
)

_NOT_MODELLED = {"moe": "mixtures of experts", "mla": "latent attention", "linear_attention": "linear attention"}
_LAYER = StackShape("", 1, 1, 1, 1, 1, 1, 1, tied=False)
# model_type of transformers to what its layers have besides sizes (transformers 5.24, models/*/modeling_*.py). Phi-3
# fuses its projections, which changes no tensor that is counted here.
LAYERS = {
    "llama": _LAYER, "mistral": _LAYER, "smollm3": _LAYER, "granite": _LAYER, "phi3": _LAYER, "gemma": _LAYER,
    "qwen2": replace(_LAYER, qkv_bias=True),
    "qwen3": replace(_LAYER, qk_norm=True),
    "gemma2": replace(_LAYER, norms_per_layer=4, softcap=True),
    "gemma3_text": replace(_LAYER, norms_per_layer=4, qk_norm=True),
}  # fmt: skip


def from_columns(
    name: str, *, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, tied: bool,
    params_b: float | None = None,
) -> StackShape:  # fmt: skip
    """The shape behind a row of a published table.

    Head size and kind of norm follow from the family's name; whether the MLP is gated from the parameter count
    (``params_b``, billions): of the two possible counts the nearer one. Without a count it is gated.
    """
    bare = StackShape(name, hidden, layers, heads, kv_heads, hidden // heads, intermediate, vocab, tied)
    family = next((fields for pattern, fields in FAMILIES if re.search(pattern, name.lower())), {})
    shape = replace(bare, **family)
    plain = replace(shape, gated=False)
    if params_b and abs(plain.params / 1e9 - params_b) < abs(shape.params / 1e9 - params_b):
        return plain
    return shape


def from_catalog(model: ModelShape) -> StackShape:
    """The shape of a catalog model.

    Raises:
        UserError: a mixture of experts, latent or linear attention: how the other tools run them is not modelled.
    """
    unknown = next((words for field, words in _NOT_MODELLED.items() if getattr(model, field) is not None), None)
    if unknown or model.intermediate_size is None:
        raise UserError(
            f"cannot predict {model.id} with another tool",
            f"the other tools' memory for {unknown or 'models without an MLP width'} is not modelled",
            "predict it with fitune (no --stack), or name a dense model",
        )
    named = from_columns(
        model.id, hidden=model.hidden_size, layers=model.num_hidden_layers, heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads, intermediate=model.intermediate_size, vocab=model.vocab_size,
        tied=model.tie_word_embeddings,
    )  # fmt: skip
    return replace(
        named,
        head_dim=model.head_dim,
        gated=model.mlp == "gated",
        norms_per_layer=model.norms_per_layer,
        qkv_bias=model.attention_bias != "none",
        qk_norm=model.qk_norm != "none",
    )


def from_config(config: Any, name: str) -> StackShape:
    """The shape of a model outside the catalog.

    Args:
        config: of transformers, or an object with the same attributes.

    Raises:
        UserError: an architecture whose layers are not modelled.
    """
    layer = LAYERS.get(config.model_type)
    if layer is None:
        raise UserError(
            f"cannot predict {name} with another tool",
            f"the other tools' memory for the architecture {config.model_type} is not modelled",
            f"predict it with fitune (no --stack), or name a model of one of these: {', '.join(LAYERS)}",
        )
    heads = config.num_attention_heads
    return replace(
        layer, name=name, hidden=config.hidden_size, layers=config.num_hidden_layers, heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=config.intermediate_size, vocab=config.vocab_size,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )  # fmt: skip
