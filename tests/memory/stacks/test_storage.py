"""Shapes, weights and optimizer states against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitune.catalog.models import find
from fitune.errors import UserError
from fitune.memory.stacks import StackSettings, from_catalog, from_columns, parse_targets, predict
from fitune.memory.stacks.sharding import share
from fitune.memory.stacks.storage import linear_bytes, optimizer
from tests.memory.stacks.runs import ALL_LINEAR, FALCON, FULL, GEMMA2B, LLAMA2, LLAMA3, LORA, MISTRAL, QLORA


@pytest.mark.parametrize(
    ("shape", "published"),
    [(MISTRAL, 7_241_732_096), (LLAMA3, 8_030_261_248), (GEMMA2B, 2_506_172_416), (FALCON, 7_217_189_760)],
    ids=["mistral", "llama-3.1", "gemma", "falcon"],
)
def test_parameter_counts(shape, published):
    """Counts of the checkpoints on the hub; Falcon's has biases of its norms only."""
    assert shape.params == pytest.approx(published, rel=2e-4)


def test_catalog_and_columns_agree():
    assert from_catalog(find("meta-llama/Llama-2-7b-hf")) == LLAMA2


def test_mlp_kind_follows_from_the_parameter_count():
    assert MISTRAL.gated and not FALCON.gated
    assert FALCON.parallel_residual and FALCON.norms_per_layer == 1


def test_head_size_of_gemma_is_not_hidden_over_heads():
    assert GEMMA2B.head_dim == 256 and GEMMA2B.attention_width == 2048


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1"])
def test_mixture_of_experts_is_refused(name):
    with pytest.raises(UserError, match="mixtures of experts is not modelled"):
        from_catalog(find(name))


def test_adapter_elements():
    """r (in + out): q and o 16 x 8192, k and v 16 x 5120; 32 layers."""
    assert LORA.layer_adapter_params == 16 * (2 * 8192 + 2 * 5120)
    assert LORA.adapter_params == 32 * LORA.layer_adapter_params
    with_head = replace(LORA, adapter_targets=(*LORA.adapter_targets, "lm_head"))
    assert with_head.adapter_params - LORA.adapter_params == 16 * (4096 + 32000)


def test_gate_is_skipped_where_there_is_none():
    run = StackSettings(FALCON, "lora", adapter_rank=8, adapter_targets=ALL_LINEAR)
    assert "gate" not in run.targets and "up" in run.targets


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("q,v", ("q", "v")),
        ("v_proj,q_proj", ("q", "v")),
        ("q,k,v,o,mlp,lm_head", (*ALL_LINEAR, "lm_head")),
        ("all-linear", ALL_LINEAR),
        ("c_attn", ("q", "k", "v")),
        ("c_attn, c_proj, w1, w2", ALL_LINEAR),
        ("qkv_proj,o_proj,gate_up_proj", ("q", "k", "v", "o", "gate", "up")),
        ("query_key_value dense dense_h_to_4h", ("q", "k", "v", "o", "up")),
    ],
)
def test_targets(text, targets):
    assert parse_targets(text) == targets


def test_unknown_target_is_named():
    with pytest.raises(UserError, match="cannot place adapters on router"):
        parse_targets("q,router")


@pytest.mark.parametrize(
    ("dtype", "bytes_each"),
    [("bf16", 2), ("nf4", 0.5625), ("nf4 (double quant)", 0.5 + 1 / 64 + 4 / 16384), ("int8", 1)],
)
def test_bytes_of_formats(dtype, bytes_each):
    """NF4: half a byte and an fp32 scale for 64; doubly quantised: a byte for 64 and an fp32 scale for 256 blocks."""
    assert linear_bytes(replace(QLORA, base_dtype=dtype)) == bytes_each


def test_unknown_format_lists_the_known_ones():
    with pytest.raises(UserError, match="cannot predict base weights in 'mxfp4'") as error:
        predict(replace(QLORA, base_dtype="mxfp4"), "trl")
    assert "nf4 (double quant)" in str(error.value)


@pytest.mark.parametrize(
    ("name", "states", "temporary"),
    [
        ("adamw_torch", 4, 2),  # two moments in bf16, and the square root of one
        ("adamw_torch_fused", 4, 0),
        ("adamw_bnb_8bit", 2.03125, 0),  # two bytes, and two fp32 scales for 256
        ("paged_adamw_8bit", 0, 0),
        ("paged_adamw_32bit", 0, 0),
        ("adamw_bnb", 8, 0),
        ("lion_8bit", 1.015625, 0),
        ("muon", 2, 2),
        ("sgd", 0, 2),
    ],
)
def test_optimizer_states(name, states, temporary):
    found = optimizer(replace(FULL, optimizer=name), 2.0)
    assert (found.state_bytes, found.temporary_bytes) == (states, temporary)


@pytest.mark.parametrize(
    ("parallel", "kept"),
    [
        ("ddp", (1, 1, 1)),
        ("zero1", (1, 1, 0.25)),
        ("zero2", (1, 0.25, 0.25)),
        ("zero3", (0.25, 0.25, 0.25)),
        ("fsdp1", (0.25, 0.25, 0.25)),
    ],
)
def test_what_each_gpu_keeps(parallel, kept):
    part = share(replace(FULL, parallel=parallel, n_gpus=4))
    assert (part.weights, part.gradients, part.optimizer) == kept


def test_ddp_replicates_quantised_weights():
    one = predict(QLORA, "trl")
    four = predict(replace(QLORA, parallel="ddp", n_gpus=4), "trl")
    assert four.components["weights"] == one.components["weights"]
    assert any("every GPU keeps all quantised weights" in note for note in four.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel": "pp"}, "cannot predict parallel = 'pp'"),
        ({"metric": "free"}, "cannot predict metric = 'free'"),
        ({"loss": "cut"}, "cannot predict loss = 'cut'"),
        ({"adapter_rank": 0}, "cannot predict lora without adapters"),
        ({"adapter_targets": ("head",)}, "cannot place adapters on head"),
    ],
    ids=["parallel", "metric", "loss", "rank", "targets"],
)
def test_settings_that_mean_nothing_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        replace(LORA, **change)


def test_qwen3_norms_queries_and_keys():
    shape = from_columns("Qwen/Qwen3-4B", hidden=2560, layers=36, heads=32, kv_heads=8, intermediate=9728,
                         vocab=151936, tied=True)  # fmt: skip
    assert shape.head_dim == 128 and shape.qk_norm
    assert shape.params == pytest.approx(4_022_468_096, rel=1e-4)
