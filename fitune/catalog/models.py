"""Model shapes by any name a person gives them, and the keyword arguments of their transformers configuration."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Short names that stand for one model among several of a family.
SHORT_NAMES = {
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm3": "HuggingFaceTB/SmolLM3-3B",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
# Accounts that publish copies under the name of the original (the last three on ModelScope).
MIRRORS = ("unsloth", "NousResearch", "LLM-Research", "AI-ModelScope", "ZhipuAI")
EXAMPLES = ("smollm2", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B")
LIKE = 0.5  # share of letters (difflib's ratio) from which on a name is suggested for another


@dataclass(frozen=True)
class MoeShape:
    """Routed experts. ``shared_expert_intermediate_size`` is the total width of all shared experts."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 0
    shared_expert_intermediate_size: int | None = None
    first_dense_layers: int = 0


@dataclass(frozen=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). ``q_lora_rank`` None: queries are not compressed."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None


@dataclass(frozen=True)
class LinearAttentionShape:
    """Gated delta-net layers; every ``full_attention_every``-th layer has full attention instead."""

    full_attention_every: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int


@dataclass(frozen=True)
class ModelShape:
    """The shape of one model, with where each part of it comes from.

    ``id`` is the name that was asked for as its hub spells it, ``catalog_id`` the catalog's row (they differ for
    aliases, which share the shape but not always licence and ``max_position_embeddings``). ``params_total`` counts tied
    heads once and leaves out ``params_outside_scope`` (vision tower, projector, MTP layer, a stored copy of a tied
    head); ``params_active`` counts embeddings and the routed and shared experts of one token. ``head_dim`` of MLA
    models is the query-key width. ``native`` False: transformers has no class for it, ``nearest_class`` is the
    model type with the same tensors, and ``native_alternative`` a model of similar size that can be trained.
    """

    id: str
    catalog_id: str
    aliases: tuple[str, ...]
    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    intermediate_size: int | None
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    params_total: int
    params_active: int
    params_published: int
    params_published_source: str
    params_check: str
    scope: str
    status: str
    licence: str
    licence_source: str
    chat_template: str
    chat_template_source: str
    sources: tuple[str, ...]
    rope_theta: float | None = None
    rope_scaling: dict | None = field(default=None, hash=False)
    rope_local_base_freq: float | None = None
    sliding_window: int | None = None
    sliding_pattern: str | None = None
    attention_bias: str = "none"
    qk_norm: str = "none"
    norms_per_layer: int = 2
    mlp: str = "gated"
    moe: MoeShape | None = None
    mla: MlaShape | None = None
    linear_attention: LinearAttentionShape | None = None
    word_embed_proj_dim: int | None = None
    params_outside_scope: dict | None = field(default=None, hash=False)
    note: str = ""
    unconfirmed_fields: tuple[str, ...] = ()
    extra_config: dict | None = field(default=None, hash=False)
    nearest_class: str | None = None
    nearest_class_note: str = ""
    native_alternative: str | None = None
    native_aliases: tuple[str, ...] = ()

    @property
    def native(self) -> bool:
        """Whether transformers has a class for exactly this model."""
        return self.nearest_class is None or self.id in self.native_aliases

    @property
    def training_note(self) -> str:
        """For models that are not native: what planning assumes and what to train instead; else empty."""
        if self.native:
            return ""
        return (
            f"{self.id} has no class in transformers: planning uses the {self.nearest_class} class "
            f"({self.nearest_class_note}); training needs the publisher's remote code, "
            f"or a native model of similar size: {self.native_alternative}"
        )

    def as_dict(self) -> dict:
        """All fields and the derived ones, ready for JSON."""
        return {**dataclasses.asdict(self), "native": self.native, "training_note": self.training_note}


@functools.cache
def all_models() -> tuple[ModelShape, ...]:
    """Every model of the catalog, in the order of the file."""
    with Path(__file__).with_name("models.json").open(encoding="utf-8") as handle:
        return tuple(_shape(row) for row in json.load(handle)["models"])


def _shape(row: dict) -> ModelShape:
    """One row of models.json; absent fields take the defaults of :class:`ModelShape`."""
    values = dict(row)
    for key in ("aliases", "architectures", "sources", "unconfirmed_fields", "native_aliases"):
        values[key] = tuple(values.get(key, ()))
    for key, kind in (("moe", MoeShape), ("mla", MlaShape), ("linear_attention", LinearAttentionShape)):
        if key in values:
            values[key] = kind(**values[key])
    values.setdefault("intermediate_size", None)
    return ModelShape(catalog_id=row["id"], **values)


def _plain(name: str) -> str:
    """Lower case without punctuation: ``Llama-3.1-8B`` and ``llama3.1_8b`` are one name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


@functools.cache
def _by_id() -> dict[str, tuple[str, ModelShape]]:
    """Lower-case id or alias to its spelling and shape."""
    return {name.lower(): (name, shape) for shape in all_models() for name in (shape.id, *shape.aliases)}


@functools.cache
def _by_short_name() -> dict[str, tuple[str, ModelShape]]:
    """Name without account and punctuation to spelling and shape; also without the ending ``-hf``."""
    index: dict[str, tuple[str, ModelShape]] = {}
    for spelling, shape in _by_id().values():
        short = spelling.rpartition("/")[2]
        for key in (_plain(short), _plain(short.removesuffix("-hf"))):
            index.setdefault(key, (spelling, shape))
    return index


def find(name: str) -> ModelShape | None:
    """The shape of a model, or None when the catalog does not have it.

    Tried in this order, case and punctuation aside: full id or alias; the same name under a mirror's account
    (``unsloth/…``, ``LLM-Research/…``); without an account: a short name (``smollm2`` is SmolLM2-135M-Instruct), the
    name alone (``llama-3.1-8b``), and a beginning of at least five letters that only one shape has (``mistral-7b``).
    The shape's ``id`` is the id that was meant, as its hub spells it.
    """
    text = name.strip()
    found = _by_id().get(text.lower()) or _by_id().get(SHORT_NAMES.get(text.lower(), "").lower())
    account, slash, short = text.rpartition("/")
    if found is None and slash:
        if account.lower() not in {mirror.lower() for mirror in MIRRORS}:
            return None
        copy = _by_short_name().get(_plain(short))
        found = (text, copy[1]) if copy else None
    if found is None and not slash:
        found = _by_short_name().get(_plain(text)) or _only_beginning(_plain(text))
    return dataclasses.replace(found[1], id=found[0]) if found else None


def _only_beginning(key: str) -> tuple[str, ModelShape] | None:
    """The model whose short names alone begin with ``key``; its own id before its aliases."""
    if len(key) < 5:
        return None
    shapes = {found[1].id: found[1] for short, found in _by_short_name().items() if short.startswith(key)}
    if len(shapes) != 1:
        return None
    shape = next(iter(shapes.values()))
    return shape.id, shape


def nearest(name: str, n: int = 3) -> list[str]:
    """At most n ids or aliases that are like ``name``, the most alike first; none where nothing is."""
    index = _by_short_name()
    keys = difflib.get_close_matches(_plain(name.rpartition("/")[2]), list(index), n=2 * n, cutoff=LIKE)
    return list(dict.fromkeys(index[key][0] for key in keys))[:n]


def hint(name: str, label: str = "the nearest names") -> str:
    """What to say to a person whose model is not known: ``label`` and the nearest names, or what names look like."""
    near = nearest(name)
    return f"{label}: {', '.join(near)}" if near else f"names the catalog knows are like {', '.join(EXAMPLES)}"


# ---- transformers configurations -------------------------------------------------------------------------------------


def to_hf_config_dict(shape: ModelShape) -> dict:
    """Keyword arguments of the model's transformers configuration, with ``model_type`` and ``architectures``.

    ``AutoConfig.for_model(**to_hf_config_dict(shape))`` with transformers 5.17 to 5.24 gives a configuration whose
    text-only causal LM has exactly ``shape.params_total`` parameters (tied ones once; DeepSeek-V3's 58 x 256 routing
    biases are buffers there and do not count as parameters). Models that are not native get the configuration of
    ``shape.nearest_class``. Left to the class defaults: token ids, dropout, initialisation, activation; the norm's
    epsilon too where the catalog has none. dtype is not among them: say it when building.
    """
    model_type = shape.nearest_class or shape.model_type
    config: dict = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "rope_parameters": _rope(shape),
    }
    text_type, architecture, adapt = _FAMILIES[model_type]
    config = adapt(shape, {key: value for key, value in config.items() if value is not None})
    config.update(shape.extra_config or {})
    if "partial_rotary_factor" in config:
        config["rope_parameters"]["partial_rotary_factor"] = config.pop("partial_rotary_factor")
    return {"model_type": text_type, "architectures": [architecture], **config}


def _rope(shape: ModelShape) -> dict | None:
    """``rope_parameters`` as transformers 5 spells them; None for learned positions or none."""
    if shape.rope_theta is None:
        return {"rope_type": "default", "rope_theta": 10000.0} if shape.model_type == "baichuan" else None
    scaling = dict(shape.rope_scaling or {})
    rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    if rope_type == "dynamic":  # acts beyond max_position_embeddings only, and its code cannot run on meta tensors
        return {"rope_type": "default", "rope_theta": shape.rope_theta}
    return {"rope_type": rope_type, "rope_theta": shape.rope_theta, **scaling}


def _llama(shape: ModelShape, config: dict) -> dict:
    biased = shape.attention_bias == "qkvo"
    return {**config, "head_dim": shape.head_dim, "attention_bias": biased, "mlp_bias": False}


def _with_head_dim(shape: ModelShape, config: dict) -> dict:
    return {**config, "head_dim": shape.head_dim}


def _plain_config(shape: ModelShape, config: dict) -> dict:
    return config


def _phi3(shape: ModelShape, config: dict) -> dict:
    return {**config, "sliding_window": shape.sliding_window}


def _glm(shape: ModelShape, config: dict) -> dict:
    rope = {**config["rope_parameters"], "partial_rotary_factor": 0.5}
    # The class's default pad token lies outside ChatGLM3's smaller vocabulary.
    pad = {"pad_token_id": 0, "eos_token_id": 2} if shape.vocab_size <= 151329 else {}
    return {**config, **pad, "head_dim": shape.head_dim, "attention_bias": shape.attention_bias == "qkv",
            "rope_parameters": rope}  # fmt: skip


def _gpt2(shape: ModelShape, config: dict) -> dict:
    return {
        "vocab_size": shape.vocab_size, "n_embd": shape.hidden_size, "n_inner": shape.intermediate_size,
        "n_layer": shape.num_hidden_layers, "n_head": shape.num_attention_heads,
        "n_positions": shape.max_position_embeddings, "tie_word_embeddings": shape.tie_word_embeddings,
    }  # fmt: skip


def _opt(shape: ModelShape, config: dict) -> dict:
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
            "tie_word_embeddings")  # fmt: skip
    return {**{key: config[key] for key in kept}, "ffn_dim": shape.intermediate_size,
            "word_embed_proj_dim": shape.word_embed_proj_dim}  # fmt: skip


def _gpt_neox(shape: ModelShape, config: dict) -> dict:
    config = {key: value for key, value in config.items() if key != "num_key_value_heads"}
    config["rope_parameters"] = {**config["rope_parameters"], "partial_rotary_factor": 0.25}
    return {**config, "use_parallel_residual": True, "attention_bias": True}


def _falcon(shape: ModelShape, config: dict) -> dict:
    config = {key: value for key, value in config.items() if key not in ("num_key_value_heads", "intermediate_size")}
    return {**config, "ffn_hidden_size": shape.intermediate_size, "multi_query": shape.num_key_value_heads == 1,
            "parallel_attn": True, "new_decoder_architecture": False, "alibi": False, "bias": False}  # fmt: skip


def _starcoder2(shape: ModelShape, config: dict) -> dict:
    # The class's default token ids lie outside the vocabulary; <|endoftext|> is 0.
    return {**config, "use_bias": shape.attention_bias == "qkvo", "sliding_window": shape.sliding_window,
            "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


def _gemma2(shape: ModelShape, config: dict) -> dict:
    return {**config, "head_dim": shape.head_dim, "sliding_window": shape.sliding_window}


def _gemma3(shape: ModelShape, config: dict) -> dict:
    local = {"rope_type": "default", "rope_theta": shape.rope_local_base_freq or 10000.0}
    rope = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return {**_gemma2(shape, config), "rope_parameters": rope}


def _moe(shape: ModelShape) -> MoeShape:
    assert shape.moe is not None, f"{shape.catalog_id} is of a mixture-of-experts type without experts"
    return shape.moe


def _mixtral(shape: ModelShape, config: dict) -> dict:
    moe = _moe(shape)
    return {**config, "head_dim": shape.head_dim, "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_experts_per_tok}  # fmt: skip


def _gpt_oss(shape: ModelShape, config: dict) -> dict:
    return {**_mixtral(shape, config), "sliding_window": shape.sliding_window}


def _qwen3_moe(shape: ModelShape, config: dict) -> dict:
    moe = _moe(shape)
    return {**config, "head_dim": shape.head_dim, "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_experts_per_tok, "moe_intermediate_size": moe.moe_intermediate_size,
            "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip


def _qwen3_5(shape: ModelShape, config: dict) -> dict:
    linear = shape.linear_attention
    assert linear is not None, f"{shape.catalog_id} has no linear attention"
    types = ["full_attention" if (i + 1) % linear.full_attention_every == 0 else "linear_attention"
             for i in range(shape.num_hidden_layers)]  # fmt: skip
    rope = {**config["rope_parameters"], "partial_rotary_factor": 0.25}
    return {
        **config, "head_dim": shape.head_dim, "rope_parameters": rope, "layer_types": types,
        "linear_conv_kernel_dim": linear.conv_kernel, "linear_key_head_dim": linear.key_head_dim,
        "linear_value_head_dim": linear.value_head_dim, "linear_num_key_heads": linear.num_key_heads,
        "linear_num_value_heads": linear.num_value_heads,
    }  # fmt: skip


def _qwen3_5_moe(shape: ModelShape, config: dict) -> dict:
    moe = _moe(shape)
    return {
        **_qwen3_5(shape, config), "num_experts": moe.num_experts, "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "shared_expert_intermediate_size": moe.shared_expert_intermediate_size,
    }  # fmt: skip


def _deepseek(shape: ModelShape, config: dict) -> dict:
    moe, mla = _moe(shape), shape.mla
    assert mla is not None, f"{shape.catalog_id} has no latent attention"
    # q_lora_rank stays in when it is None ("not compressed"): the class's default is a number.
    return {
        **config, **dataclasses.asdict(mla), "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok, "moe_intermediate_size": moe.moe_intermediate_size,
        "n_shared_experts": moe.n_shared_experts, "first_k_dense_replace": moe.first_dense_layers,
    }  # fmt: skip


# model type -> (transformers' type of the text model, its causal LM class, the function that adapts the fields)
_FAMILIES: dict[str, tuple[str, str, Callable[[ModelShape, dict], dict]]] = {
    "llama": ("llama", "LlamaForCausalLM", _llama),
    "mistral": ("mistral", "MistralForCausalLM", _with_head_dim),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", _plain_config),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", _with_head_dim),
    "phi3": ("phi3", "Phi3ForCausalLM", _phi3),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", _plain_config),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", _plain_config),
    "glm": ("glm", "GlmForCausalLM", _glm),
    "gpt2": ("gpt2", "GPT2LMHeadModel", _gpt2),
    "opt": ("opt", "OPTForCausalLM", _opt),
    "gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM", _gpt_neox),
    "falcon": ("falcon", "FalconForCausalLM", _falcon),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM", _starcoder2),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", _gemma2),
    "gemma3_text": ("gemma3_text", "Gemma3ForCausalLM", _gemma3),
    "mixtral": ("mixtral", "MixtralForCausalLM", _mixtral),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM", _gpt_oss),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM", _qwen3_5),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _qwen3_5_moe),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2ForCausalLM", _deepseek),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3ForCausalLM", _deepseek),
}
