"""Small random models of many architectures, micro-batches and plans for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fitune.plan import Adapter, Plan

TINY: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", dict(sliding_window=16)),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", dict(head_dim=16)),
    "gemma2": ("Gemma2Config", dict(head_dim=16, sliding_window=16, query_pre_attn_scalar=16)),
    "gemma3": ("Gemma3TextConfig", dict(head_dim=16, sliding_window=16)),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "glm4": ("Glm4Config", dict(head_dim=16)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(head_dim=16, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2)),
    "gpt_oss": ("GptOssConfig", dict(head_dim=16, num_local_experts=4, sliding_window=16)),
    "cohere2": ("Cohere2Config", dict(sliding_window=16)),
    "smollm3": ("SmolLM3Config", {}),
    "gpt2": ("GPT2Config", {}),
    "falcon": ("FalconConfig", dict(multi_query=True, parallel_attn=True, bias=False)),
    "opt": ("OPTConfig", dict(ffn_dim=128, word_embed_proj_dim=32)),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "starcoder2": ("Starcoder2Config", dict(sliding_window=16)),
    "glm": ("GlmConfig", dict(head_dim=16)),
    "arcee": ("ArceeConfig", {}),
    "nemotron": ("NemotronConfig", dict(head_dim=16)),
    "hunyuan_moe": ("HunYuanMoEV1Config", dict(head_dim=16, num_experts=4, moe_topk=2)),
    "llama4": (
        "Llama4TextConfig",
        dict(
            head_dim=16,
            num_local_experts=4,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=128,
            attention_chunk_size=16,
            floor_scale=16,
            layer_types=["chunked_attention", "full_attention"] * 2,
            no_rope_layers=[1, 0] * 2,
        ),
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        dict(
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        dict(
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            num_key_value_heads=4,
        ),
    ),
}
SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
"""Of a model with files; `TOKENS` beside them where it has special tokens."""
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
REQUIRED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "glm4",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
)


def config_of(name: str, **changes: Any) -> Any:
    import transformers

    kind, extra = ARCHITECTURES[name]
    values = {**TINY, **extra, **changes}
    if name == "gpt2":
        values = dict(
            n_embd=64,
            n_layer=values["num_hidden_layers"],
            n_head=4,
            vocab_size=256,
            n_positions=256,
            bos_token_id=1,
            eos_token_id=2,
            **changes,
        )
    return getattr(transformers, kind)(**values)


def reference(name: str, seed: int = 0, **changes: Any) -> Any:
    """The plain transformers model with random weights that matter (norms and biases too), fp32, eval mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(name, **changes), attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    return model


def make_plan(**changes: Any) -> Plan:
    values: dict[str, Any] = dict(
        model="tiny",
        num_layers=4,
        method="lora",
        base_format="fp32",
        double_quant=True,
        adapter=Adapter(r=4, alpha=8, dropout=0.0, bias="none", targets=("all-linear",)),
        device="cpu",
        device_name="cpu",
        precision="fp32",
        loss_scaling=False,
        embedding_place="device",
        attention="cpu",
        seq_len=64,
        batch=4,
        micro_batch=4,
        accumulation_order="micro-batch-major",
        packing=False,
        recompute_layers=4,
        loss_chunk=32,
        optimizer="adamw",
        lr=1e-3,
        schedule="constant",
        warmup=0,
        weight_decay=0.0,
        clip=0.0,
        seed=0,
        budget_bytes=None,
    )
    values |= changes
    if values["method"] == "full":
        values["adapter"] = None
    return Plan(**values)


@dataclass
class FakeMicroBatch:
    input_ids: np.ndarray
    targets: np.ndarray
    position_ids: np.ndarray
    record_ids: np.ndarray
    doc_lengths: tuple[tuple[int, ...], ...]


def records(count: int = 4, longest: int = 40, seed: int = 0, vocab: int = 256) -> list[tuple[np.ndarray, np.ndarray]]:
    """(input_ids, labels) pairs of different lengths; the first third of each has no loss."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        length = longest if i == 0 else int(rng.integers(5, longest))
        ids = rng.integers(3, vocab, length)
        labels = ids.copy()
        labels[: length // 3] = -100
        made.append((ids, labels))
    return made


def shifted(labels: np.ndarray) -> np.ndarray:
    return np.concatenate([labels[1:], [-100]])


def batch_of(rows: list[list[tuple[int, tuple[np.ndarray, np.ndarray]]]]) -> FakeMicroBatch:
    """A micro-batch from rows of (record id, record); several records in a row are packed."""
    width = max(sum(len(r[0]) for _, r in row) for row in rows)
    ids, targets = np.zeros((len(rows), width), np.int64), np.full((len(rows), width), -100, np.int64)
    positions, owners = np.zeros((len(rows), width), np.int64), np.full((len(rows), width), -1, np.int64)
    lengths = []
    for b, row in enumerate(rows):
        at = 0
        for owner, (tokens, labels) in row:
            part = slice(at, at + len(tokens))
            ids[b, part], targets[b, part] = tokens, shifted(labels)
            positions[b, part], owners[b, part] = np.arange(len(tokens)), owner
            at += len(tokens)
        lengths.append(tuple(len(r[0]) for _, r in row))
    return FakeMicroBatch(ids, targets, positions, owners, tuple(lengths))


def padded(recs: list[tuple[np.ndarray, np.ndarray]], first: int = 0) -> FakeMicroBatch:
    return batch_of([[(first + i, r)] for i, r in enumerate(recs)])
