"""Streaming on a real GPU: the copy stream, pinned memory, the reading thread. Small models, deterministic kernels."""

from __future__ import annotations

import pytest
import torch

from fitune.engine.engine import Engine
from fitune.model.build import add_adapter, build, fill
from fitune.model.host import HostBuffer
from tests import tiny
from tests.engine.test_step import gradients
from tests.engine.test_streaming import STREAMED, assert_same

pytestmark = pytest.mark.gpu
RECS = tiny.records(6)
BATCHES = [tiny.padded(RECS[:2]), tiny.padded(RECS[2:4], 2), tiny.padded(RECS[4:], 4)]
LAYERS = 6
WAYS = {
    "ring of 2": {},
    "ring of 3, 2 resident": dict(ring_buffers=3, resident_layers=2),
    "pageable": dict(stream_from="pageable"),
    "disk": dict(stream_from="disk"),
    "inputs offloaded": dict(offload_inputs=True),
}


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def engine_on_gpu(model, **changes) -> Engine:
    values = dict(device="cuda", attention="flash", precision="bf16", recompute_layers=LAYERS) | changes
    plan = tiny.make_plan(num_layers=LAYERS, **values)
    built = build(model.config, plan, "cuda")
    fill(built, model.state_dict().items(), plan)
    add_adapter(built, plan)
    for linear in built.linears.values():
        if linear.lora_B is not None:
            generator = torch.Generator().manual_seed(linear.module_key & 0xFFFF)
            linear.lora_B.data.copy_(torch.randn(linear.lora_B.shape, generator=generator) * 0.05)
    return Engine(built, plan)


def big(name="llama"):
    """Large enough for copies to take longer than a kernel's launch, so that a missing wait would show."""
    size = dict(hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=4)
    return tiny.reference(name, num_hidden_layers=LAYERS, **size)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base_format", ["nf4", "bf16"])
def test_streamed_equals_resident(base_format, way):
    model = big()
    for common in (dict(recompute_layers=LAYERS), dict(recompute_layers=2), dict(accumulation_order="layer-major")):
        resident = gradients(engine_on_gpu(model, base_format=base_format, **common), BATCHES)
        streamed = engine_on_gpu(model, base_format=base_format, **STREAMED | WAYS[way], **common)
        for _ in range(3):
            assert_same(gradients(streamed, BATCHES), resident)
        streamed.driver.weights.close()


def test_head_in_tiles():
    """Its sums are in another order: as far from fp32 as the whole head's, or nearer than twice that."""
    model = big().to(torch.bfloat16).float()
    exact = gradients(engine_on_gpu(model, base_format="fp32", precision="fp32", attention="efficient"), BATCHES)
    whole = gradients(engine_on_gpu(model, base_format="bf16"), BATCHES)
    tiled = gradients(engine_on_gpu(model, base_format="bf16", head_place="host", **STREAMED), BATCHES)
    assert tiled[0] == pytest.approx(whole[0], rel=1e-5)
    for name, grad in exact[1].items():
        noise = (whole[1][name] - grad).norm()
        assert (tiled[1][name] - grad).norm() <= 2 * noise + 1e-9, name


def test_registered_memory_is_pinned_and_let_go():
    buffer = HostBuffer(1_000_001, pin=True)
    assert buffer.pinned and buffer.tensor.is_pinned()
    address = buffer.tensor.data_ptr()
    view = buffer.tensor[:8]
    del buffer
    assert view.data_ptr() == address and not view.is_pinned()


def test_a_refusal_is_not_reported_by_the_next_kernel():
    """Registering memory twice is refused; torch must not raise that at an innocent launch."""
    from fitune.model import host

    buffer = HostBuffer(4096, pin=True)
    assert not host._register(buffer.tensor)
    torch.zeros(4, device="cuda").add_(1)
    torch.cuda.synchronize()


def test_memory_does_not_grow():
    model = big()
    engine = engine_on_gpu(model, base_format="nf4", offload_inputs=True, head_place="host", **STREAMED)
    for step in range(5):
        engine.step(BATCHES, step=step, lr=1e-4)
    reserved = torch.cuda.memory_reserved()
    for step in range(5, 60):
        result = engine.step(BATCHES, step=step, lr=1e-4)
    assert torch.cuda.memory_reserved() == reserved
    assert result.link.bytes_moved > 0 and result.link.copy_s > 0 and result.link.wait_s >= 0
