"""The matrices and widths of a decoder, read off its configuration: what the work of a step is counted from.

Plain Python, for a transformers configuration or a catalog's `ModelShape` alike. What is left out: biases, routers,
convolutions of linear attention (under 0.7 % of the multiplications of every catalog model), and opt-350m's projections
between embedding and layers (7 %).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from fitune.catalog.models import ModelShape, to_hf_config_dict


@dataclass(frozen=True)
class Linear:
    """A matrix [outputs, inputs]. `reads_input`: it multiplies the layer's (normalised) input, so that in the first
    layer, under a frozen embedding, nobody needs its input's gradient. `in_mlp`: it runs in `mlp_tiles` pieces."""

    name: str
    inputs: int
    outputs: int
    reads_input: bool = False
    in_mlp: bool = False

    @property
    def params(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Experts:
    """Fused routed experts: `stored` gated MLPs of `width`, of which each token passes `active`."""

    stored: int
    active: int
    hidden: int
    width: int

    @property
    def params_each(self) -> int:
        return 3 * self.hidden * self.width


@dataclass(frozen=True)
class Layer:
    """One kind of decoder layer.

    Attributes:
        kind: attention | linear (gated delta net, plain torch).
        heads, kv_heads, head_dim, value_dim: of the attention; value_dim is the value's head size.
        window: tokens a query looks back, None for all.
        capped: soft-capped scores or sinks, which no fused kernel does.
        norm_widths: elements normalised per token, hidden-size norms and query/key norms together.
        fused_norms: torch's fused norm runs (not Gemma's 1 + weight); post_norms: the MLP's output is normalised.
        wide_rotary: the class rotates queries and keys in fp32.
        mlp_widths: elements per token of the MLPs' inner products that are not routed experts'.
    """

    linears: tuple[Linear, ...]
    experts: Experts | None
    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    capped: bool
    num_norms: int
    norm_widths: int
    fused_norms: bool
    post_norms: bool
    wide_rotary: bool
    gated: bool
    mlp_width: int

    @cached_property
    def params(self) -> int:
        """Frozen matrix elements stored, all experts counted."""
        stored = self.experts.stored * self.experts.params_each if self.experts else 0
        return sum(m.params for m in self.linears) + stored

    @property
    def active_params(self) -> int:
        """Matrix elements that one token is multiplied with."""
        active = self.experts.active * self.experts.params_each if self.experts else 0
        return sum(m.params for m in self.linears) + active


@dataclass(frozen=True)
class Decoder:
    """A model: its layers in order, its head. Layers that are alike are one object.

    Attributes:
        known: the configuration is of a family this file knows.
        counts: the work of its layers that has been counted (`LayerWork.counted`), by what of a plan it depends on.
    """

    layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    tied: bool
    capped_logits: bool
    known: bool
    counts: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def kinds(self) -> list[tuple[Layer, int]]:
        """Its different layers, and how many there are of each."""
        by_id = {id(layer): layer for layer in self.layers}  # hashing a layer costs more than counting it
        return [(by_id[key], count) for key, count in Counter(map(id, self.layers)).items()]

    @cached_property
    def params(self) -> int:
        """Matrix elements of layers, embedding and (untied) head."""
        stored = sum(layer.params * count for layer, count in self.kinds)
        return stored + self.hidden * self.vocab * (1 if self.tied else 2)

    @property
    def active_params(self) -> int:
        """Matrix elements multiplied per token: layers with their active experts, and the head."""
        return sum(layer.active_params for layer in self.layers) + self.hidden * self.vocab


def decoder_of(config: Any) -> Decoder:
    """The decoder that a transformers configuration, a dictionary of one, a catalog shape, or what holds one (`shape`)
    describes."""
    config = getattr(config, "shape", config)
    if isinstance(config, ModelShape):
        return _from_catalog(config)
    if isinstance(config, dict):
        config = SimpleNamespace(**config)
    family = getattr(config, "model_type", "")
    hidden = _first(config, "hidden_size", "n_embd")
    num_layers = _first(config, "num_hidden_layers", "n_layer")
    made: dict[tuple[Any, ...], Layer] = {}
    layers = []
    for index in range(num_layers):
        key = (_is_linear_attention(config, index), _window(config, family, index), _is_moe(config, index))
        if key not in made:
            made[key] = _layer(config, family, hidden, *key)
        layers.append(made[key])
    tied = getattr(config, "tie_word_embeddings", None)
    if tied is None:
        tied = family.startswith("gemma") or family in ("gpt2", "opt")
    capped = family == "gemma2" and getattr(config, "final_logit_softcapping", 30.0) is not None
    return Decoder(tuple(layers), hidden, config.vocab_size, bool(tied), capped, family in _KNOWN)


_KNOWN = {
    "llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "olmo3", "smollm3", "glm", "glm4", "gpt2", "opt", "gpt_neox",
    "falcon", "starcoder2", "gemma", "gemma2", "gemma3_text", "mixtral", "gpt_oss", "qwen3_moe", "qwen3_5_text",
    "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3", "cohere", "cohere2",
}  # fmt: skip
_POST_NORMS = ("gemma2", "gemma3_text", "glm4", "olmo2", "olmo3")
_OFFSET_NORMS = ("gemma", "qwen3_5")  # families whose norms multiply with 1 + weight


def _from_catalog(shape: ModelShape) -> Decoder:
    """With the window pattern that the configuration classes derive and the dictionary does not hold."""
    return decoder_of(SimpleNamespace(**to_hf_config_dict(shape)))


def _first(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these attributes that is there and not None."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def _is_linear_attention(config: Any, index: int) -> bool:
    types = getattr(config, "layer_types", None)
    return types is not None and types[index] not in ("full_attention", "sliding_attention", "chunked_attention")


def _window(config: Any, family: str, index: int) -> int | None:
    """Sliding window of a layer in tokens; the pattern of the class where `layer_types` is not spelled out."""
    # MistralConfig fills in 4096 where nothing is said, and takes None for none
    window = getattr(config, "sliding_window", 4096 if family == "mistral" else None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    types = getattr(config, "layer_types", None)
    if types:
        return window if types[index] in ("sliding_attention", "chunked_attention") else None
    every = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4}.get(family)
    if every is not None:
        return None if (index + 1) % every == 0 else window
    return window if family in ("mistral", "phi3", "starcoder2", "mixtral") else None


def _num_experts(config: Any) -> int:
    return int(_first(config, "num_local_experts", "num_experts", "n_routed_experts", default=0))


def _is_moe(config: Any, index: int) -> bool:
    if not _num_experts(config) or index in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    if index < (getattr(config, "first_k_dense_replace", None) or 0):
        return False
    step = getattr(config, "decoder_sparse_step", None) or 1
    return (index + 1) % step == 0


def _layer(config: Any, family: str, hidden: int, linear_attention: bool, window: int | None, moe: bool) -> Layer:
    heads = _first(config, "num_attention_heads", "n_head", default=1)
    kv_heads = _first(config, "num_key_value_heads", default=heads)
    if family in ("gpt2", "gpt_neox", "opt"):  # their classes know no groups, whatever the configuration says
        kv_heads = heads
    if family == "falcon":
        kv_heads = 1 if getattr(config, "multi_query", True) else _first(config, "num_kv_heads", default=heads)
    head_dim = _first(config, "head_dim", default=hidden // heads)
    value_dim = head_dim
    if _first(config, "kv_lora_rank") is not None:
        head_dim, value_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        attention, kv_heads = _latent_attention(config, hidden, heads), heads
    elif linear_attention and _first(config, "linear_num_key_heads") is not None:
        attention = _delta_net(config, hidden)
    else:
        attention = _attention(family, hidden, heads, kv_heads, head_dim)
    mlp, width = _mlp(config, family, hidden, moe)
    norms, widths = _norms(family, hidden, heads * head_dim, kv_heads * head_dim)
    return Layer(
        linears=(*attention, *mlp),
        experts=_experts(config, hidden) if moe else None,
        kind="linear" if linear_attention else "attention",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        window=window,
        capped=family == "gpt_oss"
        or (family == "gemma2" and getattr(config, "attn_logit_softcapping", 50.0) is not None),
        num_norms=norms,
        norm_widths=widths,
        fused_norms=not family.startswith(_OFFSET_NORMS),
        post_norms=family in _POST_NORMS,
        wide_rotary=family in ("olmo2", "olmo3"),
        gated=family not in _PLAIN_MLPS,
        mlp_width=width,
    )


_PLAIN_MLPS = {
    "opt": ("fc1", "fc2"), "gpt2": ("c_fc", "c_proj"), "gpt_neox": ("dense_h_to_4h", "dense_4h_to_h"),
    "falcon": ("dense_h_to_4h", "dense_4h_to_h"), "starcoder2": ("c_fc", "c_proj"),
}  # fmt: skip
_FUSED_QKV = {
    "phi3": ("qkv_proj", "o_proj"), "gpt2": ("c_attn", "c_proj"), "gpt_neox": ("query_key_value", "dense"),
    "falcon": ("query_key_value", "dense"),
}  # fmt: skip


def _attention(family: str, hidden: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Linear, ...]:
    query, key = heads * head_dim, kv_heads * head_dim
    if family in _FUSED_QKV:
        first, last = _FUSED_QKV[family]
        return Linear(first, hidden, query + 2 * key, True), Linear(last, query, hidden)
    gate = query if family.startswith("qwen3_5") else 0  # its query projection holds an output gate too
    return (
        Linear("q_proj", hidden, query + gate, True),
        Linear("k_proj", hidden, key, True),
        Linear("v_proj", hidden, key, True),
        Linear("out_proj" if family == "opt" else "o_proj", query, hidden),
    )


def _latent_attention(config: Any, hidden: int, heads: int) -> tuple[Linear, ...]:
    """Multi-head latent attention as transformers' DeepSeek classes store it."""
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    rank, kv_rank = getattr(config, "q_lora_rank", None), config.kv_lora_rank
    if rank is None:
        queries: tuple[Linear, ...] = (Linear("q_proj", hidden, query, True),)
    else:
        queries = (Linear("q_a_proj", hidden, rank, True), Linear("q_b_proj", rank, query))
    return (
        *queries,
        Linear("kv_a_proj_with_mqa", hidden, kv_rank + config.qk_rope_head_dim, True),
        Linear("kv_b_proj", kv_rank, heads * (config.qk_nope_head_dim + config.v_head_dim)),
        Linear("o_proj", heads * config.v_head_dim, hidden),
    )


def _delta_net(config: Any, hidden: int) -> tuple[Linear, ...]:
    """Gated delta net of Qwen3.5 (transformers' Qwen3_5GatedDeltaNet)."""
    key = config.linear_num_key_heads * config.linear_key_head_dim
    value = config.linear_num_value_heads * config.linear_value_head_dim
    return (
        Linear("in_proj_qkv", hidden, 2 * key + value, True),
        Linear("in_proj_z", hidden, value, True),
        Linear("in_proj_b", hidden, config.linear_num_value_heads, True),
        Linear("in_proj_a", hidden, config.linear_num_value_heads, True),
        Linear("out_proj", value, hidden),
    )


def _mlp(config: Any, family: str, hidden: int, moe: bool) -> tuple[tuple[Linear, ...], int]:
    """The dense MLP, or a MoE layer's shared experts, and its inner width."""
    if moe:
        width = _first(config, "shared_expert_intermediate_size", default=0)
        shared = getattr(config, "n_shared_experts", None)
        if shared:
            width = shared * config.moe_intermediate_size
        if not width:
            return (), 0
    else:
        width = _first(config, "ffn_dim", "ffn_hidden_size", "intermediate_size", "n_inner", default=4 * hidden)
    if family in _PLAIN_MLPS:
        up, down = _PLAIN_MLPS[family]
    elif family in ("phi3", "glm", "glm4"):
        fused = Linear("gate_up_proj", hidden, 2 * width, in_mlp=True)
        return (fused, Linear("down_proj", width, hidden, in_mlp=True)), width
    else:
        up, down = "up_proj", "down_proj"
    both = Linear(up, hidden, width, in_mlp=True), Linear(down, width, hidden, in_mlp=True)
    return (both if family in _PLAIN_MLPS else (Linear("gate_proj", hidden, width, in_mlp=True), *both)), width


def _experts(config: Any, hidden: int) -> Experts:
    width = _first(config, "moe_intermediate_size", "intermediate_size")
    active = _first(config, "num_experts_per_tok", "experts_per_token", default=1)
    return Experts(_num_experts(config), active, hidden, width)


def _norms(family: str, hidden: int, query: int, key: int) -> tuple[int, int]:
    """(kernels, elements per token) of a layer's norms."""
    count, widths = 2, 2 * hidden
    if family in ("gemma2", "gemma3_text", "glm4"):
        count, widths = 4, 4 * hidden
    if family in ("qwen3", "qwen3_moe", "olmo2", "olmo3", "gemma3_text") or family.startswith("qwen3_5"):
        count, widths = count + 2, widths + query + key
    return count, widths


def truncated(decoder: Decoder, num_layers: int) -> Decoder:
    """The first layers only (a plan may run fewer than the configuration has)."""
    if num_layers >= len(decoder.layers):
        return decoder
    return replace(decoder, layers=decoder.layers[:num_layers])
