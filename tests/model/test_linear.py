"""The frozen linear layer against plain torch and against peft: values, gradients, what is kept for backward."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fitune.model import dropout
from fitune.model.linear import BaseLinear, StepContext, _FrozenLinear, _scaled

IN, OUT, R = 96, 40, 4  # 96: rows are no whole number of 4-bit blocks
FORMATS = ["fp32", "bf16", "fp16", "int8", "nf4", "fp4"]


def rand(*shape, scale=1.0, seed=0, dtype=torch.float32):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def layer_of(format="fp32", *, bias=False, lora=True, dtype=torch.float32, dropout_p=0.0, scaling=2.0, dora=False,
             transposed=False, double_quant=True):  # fmt: skip
    layer = BaseLinear("proj", IN, OUT, StepContext(), transposed=transposed)
    weight = rand(OUT, IN, scale=0.1, dtype=dtype)
    layer.set_weight(weight.t() if transposed else weight, format, double_quant)
    if bias:
        layer.bias = nn.Parameter(rand(OUT, seed=1, dtype=dtype))
    if lora:
        layer.add_lora(R, scaling, dropout_p, 7, torch.Generator().manual_seed(2), "cpu", dora)
        with torch.no_grad():
            layer.lora_B.copy_(rand(OUT, R, scale=0.1, seed=3))
    return layer


def plain(layer, x, weight, A, B, bias):
    y = F.linear(x, weight, bias)
    return y if A is None else y + layer.scaling * F.linear(F.linear(x, A), B)


def outcome(function, leaves, grad):
    """[output, gradient of each leaf that is there]."""
    y = function()
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], grad.to(y.dtype))]


def errors(ours, theirs):
    return [
        ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
        for a, b in zip(ours, theirs, strict=True)
    ]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "base only"])
@pytest.mark.parametrize("format", FORMATS)
def test_equals_plain_autograd_on_the_unpacked_weight(format, lora):
    layer = layer_of(format, bias=True, lora=lora)
    x = rand(3, 5, IN, seed=4).requires_grad_()
    grad = rand(3, 5, OUT, seed=5)
    leaves = [x, layer.bias, layer.lora_A, layer.lora_B]
    ours = outcome(lambda: layer(x), leaves, grad)
    wide = [t.detach().double().requires_grad_() if t is not None else None for t in leaves]
    weight = layer.dense_weight(torch.float32).double()
    theirs = outcome(lambda: plain(layer, wide[0], weight, wide[2], wide[3], wide[1]), wide, grad.double())
    assert len(ours) == (5 if lora else 3)
    assert max(errors(ours, theirs)) < 2e-6


@pytest.mark.parametrize("format", ["bf16", "int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16bit_error_is_at_most_twice_that_of_plain_torch(dtype, format):
    """Against fp64 on the same unpacked weight; adapters are fp32 masters and cast, as peft casts them."""
    layer = layer_of(format, bias=True, dtype=dtype)
    x, grad = rand(4, 64, IN, seed=4, dtype=dtype).requires_grad_(), rand(4, 64, OUT, seed=5, dtype=dtype)
    leaves = [x, layer.bias, layer.lora_A, layer.lora_B]
    ours = outcome(lambda: layer(x), leaves, grad)
    weight = layer.dense_weight(dtype)
    low = [t.detach().to(dtype).requires_grad_() for t in leaves]
    common = outcome(lambda: plain(layer, low[0], weight, low[2], low[3], low[1]), low, grad)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = outcome(lambda: plain(layer, wide[0], weight.double(), wide[2], wide[3], wide[1]), wide, grad.double())
    for name, our_error, plain_error in zip(
        ["y", "dx", "dbias", "dA", "dB"], errors(ours, exact), errors(common, exact), strict=True
    ):
        assert our_error <= 2 * plain_error + 1e-6, name
    assert ours[3].dtype == ours[4].dtype == torch.float32


def peft_linear(layer, *, rslora=False, dora=False, alpha=8, conv1d=False):
    """peft's layer on the same weight with the same A and B."""
    peft = pytest.importorskip("peft")
    from transformers.pytorch_utils import Conv1D

    model = nn.ModuleDict({"proj": Conv1D(OUT, IN) if conv1d else nn.Linear(IN, OUT, bias=layer.bias is not None)})
    with torch.no_grad():
        weight = layer.dense_weight(torch.float32)
        model["proj"].weight.copy_(weight.t() if conv1d else weight)
        if layer.bias is not None:
            model["proj"].bias.copy_(layer.bias)
    config = peft.LoraConfig(
        r=R, lora_alpha=alpha, target_modules=["proj"], use_rslora=rslora, use_dora=dora, fan_in_fan_out=conv1d
    )
    proj = peft.inject_adapter_in_model(config, model)["proj"]
    with torch.no_grad():
        proj.lora_A["default"].weight.copy_(layer.lora_A)
        proj.lora_B["default"].weight.copy_(layer.lora_B)
        if dora:
            proj.lora_magnitude_vector["default"].weight.copy_(layer.magnitude)
    return proj


@pytest.mark.parametrize("rslora", [False, True], ids=["lora", "rslora"])
def test_equals_peft(rslora):
    from fitune.plan import Adapter

    scaling = Adapter(R, 8, 0.0, "none", ("proj",), rslora=rslora).scaling
    assert scaling == pytest.approx(8 / math.sqrt(R) if rslora else 8 / R)
    layer = layer_of(bias=True, scaling=scaling)
    proj = peft_linear(layer, rslora=rslora)
    x, grad = rand(3, 5, IN, seed=4).requires_grad_(), rand(3, 5, OUT, seed=5)
    ours = outcome(lambda: layer(x), [x, layer.lora_A, layer.lora_B], grad)
    theirs = outcome(lambda: proj(x), [x, proj.lora_A["default"].weight, proj.lora_B["default"].weight], grad)
    assert max(errors(ours, theirs)) < 2e-6


@pytest.mark.parametrize(("bias", "conv1d"), [(False, False), (True, False), (True, True)])
def test_dora_equals_peft(bias, conv1d):
    layer = layer_of(bias=bias, dora=True, transposed=conv1d)
    with torch.no_grad():
        layer.magnitude.mul_(1 + rand(OUT, scale=0.2, seed=6))  # away from its start, where DoRA is LoRA
    proj = peft_linear(layer, dora=True, conv1d=conv1d)
    x, grad = rand(3, 5, IN, seed=4).requires_grad_(), rand(3, 5, OUT, seed=5)
    ours = outcome(lambda: layer(x), [x, layer.lora_A, layer.lora_B, layer.magnitude], grad)
    leaves = [getattr(proj, n)["default"].weight for n in ("lora_A", "lora_B", "lora_magnitude_vector")]
    theirs = outcome(lambda: proj(x), [x, *leaves], grad)
    assert max(errors(ours, theirs)) < 5e-6


@pytest.mark.parametrize("format", ["fp32", "nf4"])
def test_dora_starts_as_the_base_layer(format):
    layer = layer_of(format, bias=True, dora=True)
    with torch.no_grad():
        layer.lora_B.zero_()
    x = rand(5, IN, seed=4)
    fresh = layer_of(format, bias=True, lora=False)
    assert (layer.magnitude > 0).all() and layer.magnitude.shape == (OUT,)
    layer.magnitude = nn.Parameter(layer._row_norm(torch.float32))
    assert torch.allclose(layer(x), fresh(x), atol=1e-6)


def test_the_adapter_starts_as_pefts():
    """A uniform within 1 / sqrt(in) (Kaiming with a = sqrt(5)), B zero, both fp32; the generator alone decides."""
    first, again = (BaseLinear("proj", 512, OUT, StepContext()) for _ in range(2))
    for layer in (first, again):
        layer.add_lora(64, 1.0, 0.0, 0, torch.Generator().manual_seed(5), "cpu", False)
    bound = 1 / math.sqrt(512)
    assert first.lora_A.dtype == first.lora_B.dtype == torch.float32
    assert first.lora_A.abs().max() <= bound and first.lora_A.std().item() == pytest.approx(
        bound / math.sqrt(3), rel=0.02
    )
    assert (first.lora_B == 0).all()
    assert torch.equal(first.lora_A, again.lora_A)


def keys_of(count):
    positions = torch.arange(count)[None]
    return dropout.token_keys(torch.zeros_like(positions), positions, seed=1, step=2)


def test_gradient_with_dropout_is_the_numerical_one():
    layer = layer_of(dropout_p=0.4)
    keys = keys_of(6)
    x, A, B = (t.detach().double().requires_grad_() for t in (rand(6, IN, seed=4), layer.lora_A, layer.lora_B))
    assert torch.autograd.gradcheck(lambda x, A, B: _FrozenLinear.apply(x, None, A, B, layer, keys), (x, A, B))
    masked = _FrozenLinear.apply(x, None, A, B, layer, keys)
    by_hand = plain(layer, x, layer.dense_weight(torch.float64), None, None, None)
    by_hand = by_hand + layer.scaling * dropout.apply(x.detach(), 0.4, keys, layer.module_key) @ A.t() @ B.t()
    assert torch.allclose(masked, by_hand)


def test_dropout_is_off_without_keys_and_without_a_share():
    layer, still = layer_of(dropout_p=0.4), layer_of(dropout_p=0.0)
    x = rand(6, IN, seed=4)
    assert torch.equal(layer(x), still(x)), "evaluation has no keys"
    layer.context.token_keys = still.context.token_keys = keys_of(6)
    assert not torch.equal(layer(x), still(x))
    layer.context.token_keys = None
    assert torch.equal(layer(x), still(x))


def test_dropout_of_layers_differs():
    layers = [layer_of(dropout_p=0.5) for _ in range(2)]
    layers[1].add_lora(R, 2.0, 0.5, 8, torch.Generator().manual_seed(2), "cpu", False)
    masks = [layer.dropped(torch.ones(200, IN), keys_of(200)) > 0 for layer in layers]
    assert 0.45 < (masks[0] == masks[1]).float().mean() < 0.55


def test_transposed_weights_are_those_of_conv1d():
    from transformers.pytorch_utils import Conv1D

    layer = layer_of(bias=True, lora=False, transposed=True)
    conv = Conv1D(OUT, IN)
    with torch.no_grad():
        conv.weight.copy_(rand(OUT, IN, scale=0.1).t())
        conv.bias.copy_(layer.bias)
    x = rand(2, 3, IN, seed=4)
    assert torch.allclose(layer(x), conv(x), atol=1e-6)


def test_first_layer_computes_no_input_gradient():
    """The input of the first layer needs no gradient: only the adapter gets one, and the same one."""
    layer = layer_of()
    x, grad = rand(5, IN, seed=4), rand(5, OUT, seed=5)
    without = outcome(lambda: layer(x), [layer.lora_A, layer.lora_B], grad)
    seen = []
    unpack = layer.dense_weight
    layer.dense_weight = lambda dtype: seen.append(dtype) or unpack(dtype)  # type: ignore[method-assign]
    outcome(lambda: layer(x), [layer.lora_A, layer.lora_B], grad)
    assert len(seen) == 1, "the weight is unpacked for the forward pass only"
    x.requires_grad_()
    with_input = outcome(lambda: layer(x), [layer.lora_A, layer.lora_B], grad)
    assert all(torch.equal(a, b) for a, b in zip(without, with_input, strict=True))


def test_a_frozen_layer_on_a_frozen_input_has_no_graph():
    assert not layer_of(lora=False)(rand(5, IN)).requires_grad


@pytest.mark.parametrize("format", ["fp32", "bf16", "nf4"])
def test_weights_and_products_are_not_kept_for_backward(format):
    """Only the input and the adapter: 4 (N IN + R IN + R OUT) bytes, whatever the format."""
    layer = layer_of(format)
    x = rand(10, IN, seed=4).requires_grad_()
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (kept.update({t.untyped_storage().data_ptr(): t.numel() * t.element_size()}), t)[1], lambda t: t
    ):
        layer(x)
    assert sum(kept.values()) == 4 * (10 * IN + R * IN + R * OUT)


def test_output_may_be_changed_in_place_and_input_may_be_strided():
    layer = layer_of(bias=True)
    x = rand(IN, 6, seed=4).t().requires_grad_()
    y = layer(x) * 1
    assert torch.equal(layer(x).add_(1), y + 1)
    contiguous = x.detach().contiguous().requires_grad_()
    grads = [torch.autograd.grad(layer(t).square().sum(), t)[0] for t in (x, contiguous)]
    assert torch.allclose(*grads, atol=1e-5)


def test_use_before_loading_is_a_programming_error():
    with pytest.raises(AssertionError, match="proj has no weight yet"):
        BaseLinear("proj", IN, OUT, StepContext())(rand(2, IN))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.0, 0.125, 1.5, -2.0])
def test_a_scaled_product_is_the_product_scaled(scale, dtype):
    """To the bit, whether or not the factor is a power of two."""
    left, right = rand(17, IN, scale=1e-3, dtype=dtype), rand(IN, R, scale=1e-3, seed=1, dtype=dtype)
    assert torch.equal(_scaled(left, right, scale), torch.mm(left, right).mul_(scale))


def test_a_power_of_two_takes_one_launch():
    seen = []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._opname)
            return func(*args, **(kwargs or {}))

    left, right = rand(5, IN), rand(IN, R)
    found = {}
    for scale in (1.0, 2.0, 3.0):
        seen.clear()
        with Ops():
            _scaled(left, right, scale)
        found[scale] = [op for op in seen if op != "new_empty"]
    assert found == {1.0: ["mm"], 2.0: ["addmm_"], 3.0: ["mm", "mul_"]}


@pytest.mark.parametrize("dora", [False, True])
def test_without_a_graph_the_output_is_the_same(dora):
    layer = layer_of("nf4", bias=True, dropout_p=0.2, dora=dora, dtype=torch.bfloat16)
    layer.context.token_keys = torch.arange(15, dtype=torch.int32)
    x = rand(3, 5, IN, seed=4, dtype=torch.bfloat16)
    with_graph = layer(x)
    with torch.no_grad():
        without = layer(x)
    assert with_graph.requires_grad and not without.requires_grad
    assert torch.equal(with_graph, without)
