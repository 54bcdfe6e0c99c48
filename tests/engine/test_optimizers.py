"""Optimizers: what they hold, what they save, and that nothing accumulates in 16 bit."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from typing import get_args

import pytest
import torch
from torch import nn

from fitune.engine.optimizers import (
    NEEDS_CUDA,
    Masters,
    abstract_state,
    build_optimizer,
    flatten_state,
    restore_state,
)
from fitune.engine.parts import ENDS, PartedOptimizer
from fitune.errors import UserError
from fitune.model.build import add_adapter, build, fill
from fitune.recipe import OptimizerName
from tests import tiny
from tests.engine.test_step import engine_for, gradients, plain_gradients

NAMES = [name for name in get_args(OptimizerName) if name != "auto"]
ON_CPU = [name for name in NAMES if name not in NEEDS_CUDA]
# below 4096 elements bitsandbytes keeps fp32 state; 40 x 130 is no whole number of its blocks of 256
SHAPES = {"matrix": (64, 96), "odd": (40, 130), "small": (4, 64), "vector": (96,), "long": (5000,)}


def parameters(device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn(s, generator=generator).mul(0.1).to(device)) for n, s in shapes.items()}


def give_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)


def trained(name, params, steps, optimizer=None, first=0):
    optimizer = optimizer or build_optimizer(name, list(params.values()), lr=1e-2, weight_decay=0.1)
    for step in range(first, first + steps):
        give_gradients(params, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return optimizer


@pytest.mark.parametrize("name", ON_CPU)
def test_goes_downhill(name):
    """Every optimizer of the recipe is there and learns a matrix that starts at zero, as LoRA's B does."""
    torch.manual_seed(0)
    x, target = torch.randn(256, 64), torch.randn(64, 80)
    weight = nn.Parameter(torch.zeros(64, 80))
    optimizer = build_optimizer(name, [weight], lr=2e-2, weight_decay=0.0)
    losses = []
    for _ in range(40):
        loss = (x @ weight - x @ target).square().mean()
        loss.backward()
        if name == "sgd":
            weight.grad *= 500  # its steps have the size of gradients
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("name", NEEDS_CUDA)
def test_paged_optimizers_need_a_gpu(name):
    with pytest.raises(UserError) as caught:
        build_optimizer(name, list(parameters().values()), lr=1e-3, weight_decay=0.0)
    assert caught.value.what == f"optimizer {name} cannot run here"
    assert caught.value.fix == "use --optimizer adamw or adamw8bit"
    assert caught.value.exit_code == 2


def test_unknown_optimizer():
    with pytest.raises(UserError) as caught:
        build_optimizer("adam", list(parameters().values()), lr=1e-3, weight_decay=0.0)
    assert caught.value.what == "unknown optimizer 'adam'"
    for name in NAMES:
        assert name in caught.value.fix


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adafactor", "lion"])
def test_step_of_the_first_update_is_the_learning_rate(name):
    """lr means the same for all: the root mean square of an update of a parameter that starts at zero."""
    weight = nn.Parameter(torch.zeros(64, 96))
    optimizer = build_optimizer(name, [weight], lr=1e-3, weight_decay=0.0)
    give_gradients({"weight": weight}, 0)
    optimizer.step()
    assert weight.square().mean().sqrt().item() == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("name", ON_CPU)
def test_weight_decay_is_decoupled(name):
    """Without a gradient a parameter shrinks by lr times weight decay, whatever the optimizer's statistics."""
    weight = nn.Parameter(torch.ones(64, 96))
    optimizer = build_optimizer(name, [weight], lr=0.1, weight_decay=0.5)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.allclose(weight, torch.full_like(weight, 1 - 0.1 * 0.5), atol=1e-6)


# -- memory ---------------------------------------------------------------------------------------------------------


def held_bytes(optimizer):
    """Distinct storages of tensors in the optimizer's state."""
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("shapes", [SHAPES, {"small": (4, 64)}], ids=["all", "small only"])
@pytest.mark.parametrize("name", ON_CPU)
def test_abstract_state_is_what_a_step_makes(name, shapes):
    params = parameters(shapes=shapes)
    optimizer = trained(name, params, 1)
    abstract = abstract_state(name, params.values())
    assert all(t.device.type == "meta" for t in abstract)
    assert sum(t.numel() * t.element_size() for t in abstract) == held_bytes(optimizer)


@pytest.mark.parametrize("name", NEEDS_CUDA)
def test_only_large_tensors_are_paged(name):
    """As bitsandbytes does it: under 100,000 elements the moments stay on the device, scales and tables always."""
    small, large = torch.empty(16, 4096, device="meta"), torch.empty(16, 8192, device="meta")
    total = lambda *params: sum(t.numel() * t.element_size() for t in abstract_state(name, params))  # noqa: E731
    plain = sum(t.numel() * t.element_size() for t in abstract_state("adamw8bit", [small]))
    if name == "paged_adamw":
        assert (total(small), total(large)) == (2 * 4 * small.numel(), 0)
    else:
        assert total(small) == plain == 2 * (small.numel() + small.numel() // 64 + 1024)
        assert total(large) == 2 * (large.numel() // 64 + 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_abstract_state_on_a_gpu(name):
    """The allocator's bytes, each block rounded up to 512; a step leaves nothing else behind."""
    params = parameters("cuda", {**SHAPES, "paged": (16, 8192)})
    optimizer = build_optimizer(name, list(params.values()), lr=1e-3, weight_decay=0.0)
    give_gradients(params, 0)
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # the first product allocates cuBLAS' workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    expected = sum(-(-t.numel() * t.element_size() // 512) * 512 for t in abstract_state(name, params.values()))
    slack = 512 * len(params) if name == "adafactor" else 0  # its step counters are on the CPU
    assert 0 <= expected - (torch.cuda.memory_allocated() - before) <= slack


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adamw8bit", "lion8bit", "paged_adamw"])
def test_a_step_holds_no_copy_of_the_gradients(name):
    params = parameters("cuda", {"a": (2048, 2048), "b": (2048, 2048)})
    optimizer = build_optimizer(name, list(params.values()), lr=1e-3, weight_decay=0.1)
    give_gradients(params, 0)
    optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2**20


# -- saving ---------------------------------------------------------------------------------------------------------


def continued(name, device="cpu"):
    """Parameters after 5 steps, and after 3 steps, saving, restoring into a new optimizer, and 2 more."""
    whole = parameters(device)
    trained(name, whole, 5)
    first = parameters(device)
    optimizer = trained(name, first, 3)
    tensors, numbers = flatten_state(optimizer, list(first))
    saved = {key: t.clone() for key, t in tensors.items()}
    numbers = json.loads(json.dumps(numbers))
    again = {n: nn.Parameter(p.detach().clone()) for n, p in first.items()}
    other = build_optimizer(name, list(again.values()), lr=1e-2, weight_decay=0.1)
    restore_state(other, list(again), saved, numbers)
    trained(name, again, 2, other, first=3)
    return whole, again, optimizer, other


@pytest.mark.parametrize("name", ON_CPU)
def test_saved_state_continues_bit_for_bit(name):
    whole, again, before, after = continued(name)
    assert all(torch.equal(whole[n], again[n]) for n in whole)
    assert held_bytes(after) == held_bytes(before), "shared code tables are shared again"


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_saved_state_continues_on_a_gpu(name):
    whole, again, before, after = continued(name, "cuda")
    assert all(torch.equal(whole[n], again[n]) for n in whole)
    for old, new in zip(before.state.values(), after.state.values(), strict=True):
        assert [getattr(old.get("state1"), "is_paged", None)] == [getattr(new.get("state1"), "is_paged", None)]


@pytest.mark.parametrize("name", ON_CPU)
def test_saved_state_holds_everything_but_constants(name):
    params = parameters()
    tensors, numbers = flatten_state(trained(name, params, 1), list(params))
    keys = {
        "adamw": {"step", "exp_avg", "exp_avg_sq"}, "adafactor": {"step", "row_var", "col_var", "variance"},
        "sgd": set(), "adamw8bit": {"step", "state1", "state2", "absmax1", "absmax2"},
        "lion": {"step", "state1"}, "lion8bit": {"step", "state1", "absmax1"},
    }[name]  # fmt: skip
    assert {key.rpartition("|")[2] for key in [*tensors, *numbers]} == keys
    assert all(t.device.type == "cpu" for t in tensors.values())


class Read(Mapping):
    """Saved tensors, each made when it is asked for; how many of them are there at once at most."""

    def __init__(self, tensors):
        self.tensors, self.there, self.most = tensors, weakref.WeakSet(), 0

    def __getitem__(self, name):
        made = self.tensors[name].clone()
        self.there.add(made)
        self.most = max(self.most, len(self.there))
        return made

    def __contains__(self, name):
        return name in self.tensors

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


def test_parts_read_their_state_tensor_by_tensor():
    """What is copied to where it stays is there once more for one tensor at a time, not for all parts."""
    params = parameters()
    tensors, numbers = flatten_state(trained("adamw8bit", params, 1), list(params))
    names = {ENDS: ["vector", "odd"], 0: ["matrix", "small"], 1: ["long"]}
    parts = {part: [params[n] for n in own] for part, own in names.items()}
    optimizer, saved = PartedOptimizer("adamw8bit", parts, lr=1e-2, weight_decay=0.1), Read(tensors)
    optimizer.restore(names, saved, numbers)
    assert saved.most == 1
    found, other = flatten_state(optimizer, [n for own in names.values() for n in own])
    assert other == numbers and found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_state_of_other_parameters_or_another_optimizer():
    params = parameters()
    state = flatten_state(trained("adamw8bit", params, 1), list(params))
    fewer = {"vector": params["vector"]}
    with pytest.raises(
        UserError, match=r"the checkpoint does not fit this run(.|\n)*matrix, which is not trained here"
    ):
        restore_state(build_optimizer("adamw8bit", list(fewer.values()), lr=1.0, weight_decay=0.0), list(fewer), *state)
    other = build_optimizer("lion8bit", list(params.values()), lr=1.0, weight_decay=0.0)
    with pytest.raises(UserError, match=r"it holds absmax1, absmax2, state1, state2, step per parameter"):
        restore_state(other, list(params), *state)


# -- masters --------------------------------------------------------------------------------------------------------


def test_an_fp32_parameter_is_its_own_master():
    wide, narrow = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    masters = Masters({"wide": wide, "narrow": narrow})
    assert masters.parameters()[0] is wide
    assert masters.parameters()[1].dtype == torch.float32 and masters.parameters()[1].requires_grad


def test_small_gradients_are_not_lost():
    """1 + 64 x 2^-9: added in bf16 each of them would be rounded away."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    masters = Masters({"p": p})
    for value in [1.0] + [2.0**-9] * 64:
        p.grad = torch.tensor([value], dtype=torch.bfloat16)
        masters.collect(["p"])
        assert p.grad is None
    assert masters.parameters()[0].grad.item() == 1.125


def test_small_updates_are_not_lost():
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    masters = Masters({"p": p})
    optimizer = build_optimizer("sgd", masters.parameters(), lr=1.0, weight_decay=0.0)
    for _ in range(16):
        masters.parameters()[0].grad = torch.tensor([2.0**-10])
        optimizer.step()
        masters.publish()
    assert p.dtype == torch.bfloat16 and p.item() == 1 - 2.0**-6


def test_only_named_parameters_are_collected():
    pair = {n: nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for n in "ab"}
    masters = Masters(pair)
    for p in pair.values():
        p.grad = torch.ones_like(p)
    masters.collect(["a"])
    assert pair["a"].grad is None and pair["b"].grad is not None
    assert masters.pairs["b"][1].grad is None


def test_bf16_gradients_do_not_get_worse_with_chunks_and_micro_batches():
    """Full fine-tuning in bf16: the error against fp32 of 12 micro-batches in chunks of 8 tokens, where a head's
    gradient is added up from about 40 parts, is that of one micro-batch in one chunk."""
    model = tiny.reference("llama", num_hidden_layers=2)
    recs = tiny.records(12)
    _, exact = plain_gradients(model, recs)

    def error(batches, chunk):
        engine = engine_for(
            model, method="full", precision="bf16", base_format="bf16", loss_chunk=chunk, recompute_layers=2
        )
        _, ours = gradients(engine, batches)
        assert all(g.dtype == torch.float32 for g in ours.values())
        return {n: ((ours[n] - g).norm() / g.norm()).item() for n, g in exact.items()}

    whole = error([tiny.padded(recs)], 10_000)
    parts = error([tiny.padded([rec], i) for i, rec in enumerate(recs)], 8)
    for name in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"):
        assert parts[name] < 1.3 * whole[name], name
    assert sum(parts.values()) < 1.1 * sum(whole.values())


def test_adapters_are_fp32_in_a_bf16_model():
    model = tiny.reference("llama")
    plan = tiny.make_plan(precision="bf16", base_format="nf4", adapter=tiny.Adapter(4, 8, 0.0, "none", ("q_proj",)))
    built = build(model.config, plan, "cpu")
    fill(built, model.state_dict().items(), plan)
    add_adapter(built, plan)
    masters = Masters(built.trainable())
    assert all(p is master and p.dtype == torch.float32 for p, master in masters.pairs.values())
