"""What a step that failed leaves: nothing, once it has been given up."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from fitune.model import linear
from fitune.train import recover
from tests import tiny
from tests.engine.test_host_masters import BATCHES, NF4, made


@pytest.mark.parametrize("target", ["up_proj", "v_proj"])
def test_a_backward_pass_that_ran_out_of_memory_is_let_go(target, monkeypatch):
    """What autograd had not come to waits in its queue, with a layer's weights and buffers."""
    engine = made(copy.deepcopy(tiny.reference("llama")), **NF4)
    engine.step(BATCHES, step=0, lr=1e-2)
    backward = linear._FrozenLinear._backward

    def failing(ctx, grad):
        if ctx.layer.name.endswith(f"1.mlp.{target}") or ctx.layer.name.endswith(f"1.self_attn.{target}"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return backward(ctx, grad)

    monkeypatch.setattr(linear._FrozenLinear, "_backward", staticmethod(failing))
    with pytest.raises(torch.OutOfMemoryError):
        engine.step(BATCHES, step=1, lr=1e-2)
    monkeypatch.undo()
    left = [weakref.ref(module) for module in engine.built.linears.values()]
    left.append(weakref.ref(engine.built.context))
    engine.abandon()
    device = engine.built.device
    del engine
    assert recover.give_back(device)
    gc.collect()
    assert not [ref for ref in left if ref() is not None]
