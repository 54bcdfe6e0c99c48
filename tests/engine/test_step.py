"""The step against the plain way: same loss and gradients, whatever the architecture, policy, order or packing."""

from __future__ import annotations

import pytest
import torch

from fitune.engine.engine import Engine
from fitune.model.attention import uses_interface
from fitune.model.build import add_adapter, build, fill
from tests import tiny


def plain_gradients(model, recs):
    """Loss summed over target tokens / their number, one record at a time, by transformers' own forward."""
    model.requires_grad_(True)
    total, count = 0.0, 0
    for ids, labels in recs:
        ids_t, targets = torch.tensor(ids)[None], torch.tensor(tiny.shifted(labels))
        logits = model(input_ids=ids_t, use_cache=False).logits[0].float()
        total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        count += int((targets != -100).sum())
    loss = total / count
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def engine_for(model, **changes):
    kernel = "cpu" if uses_interface(type(model)) else "native"
    plan = tiny.make_plan(num_layers=model.config.num_hidden_layers, attention=kernel, **changes)
    built = build(model.config, plan, "cpu")
    fill(built, model.state_dict().items(), plan)
    add_adapter(built, plan)
    return Engine(built, plan)


def gradients(engine, micro_batches):
    """Gradients of a step, taken before the update."""
    caught = {}

    def catch(lr, norm):
        caught.update({n: m.grad.clone() for n, (_, m) in engine.masters.pairs.items() if m.grad is not None})
        engine.optimizer.zero_grad(set_to_none=True)

    engine._update = catch
    result = engine.step(micro_batches, step=0, lr=0.0)
    return result.loss, caught


def assert_close(ours, plain, tolerance=2e-5):
    assert set(ours) == set(plain)
    for name, grad in plain.items():
        scale = max(grad.abs().max().item(), 1e-3)
        assert (ours[name] - grad).abs().max().item() <= tolerance * scale + 1e-7, name


@pytest.mark.parametrize("name", list(tiny.ARCHITECTURES))
def test_full_gradients_equal_plain_transformers(name):
    """Every supported architecture: loss and all gradients as model(...).loss.backward() gives them."""
    model = tiny.reference(name)
    recs = tiny.records()
    engine = engine_for(model, method="full")
    loss, ours = gradients(engine, [tiny.padded(recs)])
    plain_loss, plain = plain_gradients(model, recs)
    assert loss == pytest.approx(plain_loss, rel=2e-6)
    assert_close(ours, plain)


POLICIES = {
    "recompute none": dict(recompute_layers=0),
    "recompute 2 of 4": dict(recompute_layers=2),
    "chunk of 7 tokens": dict(loss_chunk=7),
    "whole logits at once": dict(loss_chunk=10_000),
    "layer-major": dict(accumulation_order="layer-major"),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_policies_do_not_change_gradients(name, policy):
    model = tiny.reference(name)
    recs = tiny.records(6)
    batches = [tiny.padded(recs[:2]), tiny.padded(recs[2:4], 2), tiny.padded(recs[4:], 4)]
    loss, ours = gradients(engine_for(model, method="lora", recompute_layers=4, seed=3), [tiny.padded(recs)])
    other_loss, other = gradients(engine_for(model, method="lora", seed=3, **policy), batches)
    assert other_loss == pytest.approx(loss, rel=2e-6)
    assert_close(other, ours)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "qwen3_moe", "gpt2"])
def test_packing_is_document_safe(name):
    model = tiny.reference(name)
    recs = tiny.records(5, longest=30)
    packed = tiny.batch_of([[(0, recs[0]), (1, recs[1]), (2, recs[2])], [(3, recs[3]), (4, recs[4])]])
    loss, ours = gradients(engine_for(model, method="full"), [tiny.padded(recs)])
    packed_loss, other = gradients(engine_for(model, method="full"), [packed])
    assert packed_loss == pytest.approx(loss, rel=2e-6)
    assert_close(other, ours)


def test_recomputation_is_bit_identical():
    model = tiny.reference("llama")
    recs = tiny.records()
    keep = gradients(engine_for(model, recompute_layers=0), [tiny.padded(recs)])
    again = gradients(engine_for(model, recompute_layers=4), [tiny.padded(recs)])
    assert keep[0] == again[0]
    assert all(torch.equal(keep[1][n], again[1][n]) for n in keep[1])


def test_dropout_does_not_depend_on_micro_batch_order_packing_or_recomputation():
    model = tiny.reference("llama")
    recs = tiny.records(5, longest=30)
    adapter = tiny.Adapter(r=4, alpha=8, dropout=0.3, bias="none", targets=("all-linear",))

    def run(batches, **changes):
        engine = engine_for(model, adapter=adapter, **changes)
        for linear in engine.built.linears.values():  # B starts at zero, which would hide dropout on A's side
            torch.manual_seed(linear.module_key)
            linear.lora_B.data.normal_(0, 0.1)
        return gradients(engine, batches)

    whole = run([tiny.padded(recs)])
    packed = tiny.batch_of([[(3, recs[3]), (0, recs[0])], [(1, recs[1]), (4, recs[4]), (2, recs[2])]])
    for other in (
        run([tiny.padded(recs[:2]), tiny.padded(recs[2:], 2)]),
        run([packed], recompute_layers=0),
        run([tiny.padded(recs[:3]), tiny.padded(recs[3:], 3)], accumulation_order="layer-major"),
    ):
        assert other[0] == pytest.approx(whole[0], rel=2e-6)
        assert_close(other[1], whole[1])


def test_evaluation_loss_equals_training_loss():
    model = tiny.reference("gemma2")
    recs = tiny.records()
    engine = engine_for(model)
    total, count = engine.evaluate([tiny.padded(recs[:2]), tiny.padded(recs[2:], 2)])
    loss, _ = gradients(engine, [tiny.padded(recs)])
    assert total / count == pytest.approx(loss, rel=2e-6)
