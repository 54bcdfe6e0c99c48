"""Which decoders run layer by layer, and which of their linear layers stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fitune.catalog import models as catalog
from fitune.errors import UserError
from fitune.memory.known import abilities
from fitune.model import configs
from fitune.model.build import build
from fitune.model.replace import weights_read
from tests import tiny
from tests.model.packed import assert_equals_plain, engine_on

_MAMBA = dict(mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8)
_GEMMA = dict(head_dim=16, global_head_dim=16, sliding_window=16, hidden_size_per_layer_input=0,
              layer_types=["sliding_attention", "full_attention"] * 2)  # fmt: skip
_ALONE = ", and fitune runs layers one by one"


def test_a_router_that_reads_its_weight_keeps_it():
    """HunYuan-MoE asks its router's weight for its dtype, and computes in it. Loss and gradients are the plain ones."""
    model = tiny.reference("hunyuan_moe", num_hidden_layers=2)
    assert_equals_plain(model, base_format="nf4", recompute_layers=1)
    built = engine_on(model).built
    assert not any(name.endswith(".wg") for name in built.linears) and len(built.linears) == 2 * 7


def test_a_class_that_takes_a_view_of_attentions_output_trains(monkeypatch):
    """Afmoe; through the attention in blocks, whose output has another layout in memory."""
    changes = dict(head_dim=16, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2, num_dense_layers=1,
                   global_attn_every_n_layers=2, sliding_window=16)  # fmt: skip
    monkeypatch.setitem(tiny.ARCHITECTURES, "odd", ("AfmoeConfig", changes))
    assert_equals_plain(tiny.reference("odd"), recompute_layers=1)


def test_whose_weights_are_read_is_found_in_the_source():
    from transformers.models.bloom.modeling_bloom import BloomMLP
    from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate
    from transformers.models.jamba.modeling_jamba import JambaMambaMixer
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

    assert weights_read(HunYuanMoEV1Gate) == {"wg"}
    assert "dt_proj" in weights_read(JambaMambaMixer) and "in_proj" not in weights_read(JambaMambaMixer)
    assert not weights_read(LlamaAttention) and not weights_read(LlamaMLP)
    assert not weights_read(BloomMLP), "slices, in an option that is off"


def test_a_class_without_source_is_one_that_reads_nothing():
    """One made at run time, or of a package without sources; what it inherits is read all the same."""
    from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate

    made: dict[str, Any] = {"Gate": HunYuanMoEV1Gate, "__name__": "nowhere"}
    exec("class Made(Gate): pass", made)
    assert weights_read(made["Made"]) == {"wg"}
    assert weights_read(type("Plain", (), {})) == set()


@pytest.mark.parametrize("kind", sorted(catalog._FAMILIES))
def test_every_linear_layer_of_the_catalogs_models_is_replaced(kind: str):
    shapes = [shape for shape in catalog.all_models() if (shape.nearest_class or shape.model_type) == kind]
    config = configs.from_shape(min(shapes, key=lambda shape: shape.params_total)).config
    kernel = "cpu" if abilities(config)[0] else "native"
    plan = tiny.make_plan(attention=kernel, num_layers=config.num_hidden_layers)
    built = build(config, plan, "meta")
    left = [n for n, m in built.layers.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
    assert not left and len(built.linears) >= 4 * config.num_hidden_layers


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("Gemma4TextConfig", _GEMMA | dict(num_kv_shared_layers=2),
         "its last 2 layers read the keys and values of earlier ones" + _ALONE),
        ("Gemma4TextConfig", _GEMMA | dict(num_kv_shared_layers=0, hidden_size_per_layer_input=16),
         "each of its layers reads an embedding of its own beside the hidden states" + _ALONE),
        ("Zamba2Config", dict(mamba_d_state=8, mamba_headdim=16, n_mamba_heads=8, num_mem_blocks=1, use_mem_rope=True,
                              layers_block_type=["hybrid"] * 4),
         "some of its layers are one and the same weights" + _ALONE),
        ("FalconH1Config", _MAMBA | dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16),
         "its class does not say what model.layers.0.mamba.mup_vector holds when a model is made layer by layer"),
        ("BloomConfig", {}, "its class in transformers has no fused attention"),
    ],
    ids=["shared keys", "embedding per layer", "shared weights", "buffer without values", "no fused attention"],
)  # fmt: skip
def test_what_cannot_run_layer_by_layer_is_refused(kind: str, changes: dict[str, Any], why: str, monkeypatch):
    monkeypatch.setitem(tiny.ARCHITECTURES, "odd", (kind, changes))
    plan = tiny.make_plan(attention="native" if kind == "BloomConfig" else "cpu")
    with pytest.raises(UserError) as caught:
        build(tiny.config_of("odd"), plan, "cpu")
    assert caught.value.what.startswith("cannot train ") and caught.value.why == why and caught.value.fix


@pytest.mark.parametrize(
    "values", [torch.arange(4), torch.tensor([False, True, False, True])], ids=["whole numbers", "flags"]
)
def test_buffers_that_are_no_floats_are_filled_or_refused(values: torch.Tensor, monkeypatch: pytest.MonkeyPatch):
    """They have no NaN: one that the class' initialiser does not know would be 0 in silence."""
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaPreTrainedModel

    make, initialise = LlamaMLP.__init__, LlamaPreTrainedModel._init_weights

    def made_with(self: Any, config: Any) -> None:
        make(self, config)
        self.register_buffer("order", values.to("meta"), persistent=False)

    def sets(self: Any, module: nn.Module) -> None:
        initialise(self, module)
        if isinstance(module, LlamaMLP):
            module.order.copy_(values)

    monkeypatch.setattr(LlamaMLP, "__init__", made_with)
    with pytest.raises(UserError) as caught:
        build(tiny.config_of("llama"), tiny.make_plan(), "cpu")
    words = "its class does not say what model.layers.0.mlp.order holds when a model is made layer by layer"
    assert caught.value.why == words
    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", sets)
    built: Any = build(tiny.config_of("llama"), tiny.make_plan(), "cpu")
    assert all(torch.equal(layer.mlp.order, values) for layer in built.layers)
