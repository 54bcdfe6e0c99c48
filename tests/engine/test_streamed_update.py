"""Updates of masters and state that cross the link in pieces: the same as whole, whatever the pieces."""

from __future__ import annotations

import pytest
import torch

from fitune.engine import streamed_update
from tests import tiny
from tests.engine.test_host_masters import BATCHES, FULL, NF4, STREAMED, assert_same_training, made, trained


@pytest.fixture(scope="module")
def model():
    return tiny.reference("llama")


@pytest.mark.parametrize("piece", [512, 4 * 2**20])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_pieces_equal_the_whole(model, monkeypatch, optimizer, piece):
    """Against the update on the CPU: matrices of 4,096 elements and more have 8-bit state, the others fp32."""
    monkeypatch.setattr(streamed_update, "PIECE_ELEMENTS", piece)
    common = dict(FULL, clip=0.1, optimizer=optimizer, weight_decay=0.1, **STREAMED)
    ours = trained(made(model, **common, optimizer_place="streamed"))
    assert_same_training(ours, trained(made(model, **common, optimizer_place="host")), abs=2e-7)


def test_adapters(model):
    """Working copies on the device; no clipping: beside the backward pass. To the bit."""
    common = dict(optimizer="adamw8bit", **NF4)
    ours = trained(made(model, **common, **STREAMED, optimizer_place="streamed"))
    assert_same_training(ours, trained(made(model, **common)))


def test_the_library_keeps_nothing_of_ours(model):
    """An optimizer that knew the masters, which know it, would keep pinned memory until somebody collects garbage."""
    engine = made(model, **dict(FULL, optimizer="adamw8bit", **STREAMED), optimizer_place="streamed")
    engine.step(BATCHES, step=0, lr=1e-2)
    engine.settle()
    assert engine.in_host.optimizer.each
    assert not any("get_state_buffer" in vars(each) for each in engine.in_host.optimizer.each.values())


def test_resumed_from_the_state_of_another_place(model):
    """The state has the same names and values wherever it is kept."""
    common = dict(optimizer="adamw8bit", clip=1.0, **FULL, **STREAMED)
    one = made(model, **common, optimizer_place="streamed")
    one.step(BATCHES, step=0, lr=1e-2)
    tensors, values = one.state()
    other = made(model, **common, optimizer_place="host")
    other.load_state({name: tensor.clone() for name, tensor in tensors.items()}, values)
    assert_same_training(trained(one, 2), trained(other, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_on_a_gpu(optimizer):
    """One layer's worth of tensors on CUDA: masters in host memory after three updates, against the whole there."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    from types import SimpleNamespace

    from torch import nn

    from fitune.engine.host_masters import HostMasters
    from fitune.engine.optimizers import build_optimizer
    from fitune.engine.parts import PartedOptimizer

    generator = torch.Generator().manual_seed(0)
    shapes = {"layers.0.a": (3000, 3000), "layers.0.b": (512,)}
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    working = {name: nn.Parameter(value.cuda().bfloat16()) for name, value in values.items()}
    built = SimpleNamespace(device=torch.device("cuda", 0), streamed=None, compute_dtype=torch.bfloat16)
    masters = HostMasters(built, working, {0: list(shapes)}, narrow=False, pin=True)
    parameters = {0: [masters.pairs[name][1] for name in shapes]}
    masters.optimizer = PartedOptimizer(optimizer, parameters, lr=1e-2, weight_decay=0.1)
    masters.updater = streamed_update.StreamedUpdate(built.device)
    whole = [nn.Parameter(p.detach().float()) for p in working.values()]
    expected = build_optimizer(optimizer, whole, lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        masters.begin(None)
        for p, other in zip(working.values(), whole, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).cuda().bfloat16()
            other.grad = p.grad.float() * 0.5
        masters.collect(shapes)
        masters.send(0, last=True)
        norm = masters.norm(1.0)
        assert norm.item() == pytest.approx(2 * torch.nn.utils.get_total_norm([p.grad for p in whole]).item(), rel=1e-5)
        masters.update(1e-2, [0.5])
        masters.ready(0)
        expected.step()
    for (p, master), other in zip(masters.pairs.values(), whole, strict=True):
        assert (master.cuda() - other).abs().max() <= 1e-6
        assert torch.equal(p, master.cuda().bfloat16())
