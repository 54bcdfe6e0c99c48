"""The engine's step: loss scaling, what is not finite, clipping, weight decay, evaluation, saved state."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from fitune.engine.engine import Engine, LossScaler
from fitune.errors import UserError
from fitune.model.build import add_adapter, build
from tests import tiny
from tests.engine.test_step import assert_close, engine_for, gradients

RECS = tiny.records()


@pytest.fixture(scope="module")
def model():
    return tiny.reference("llama", num_hidden_layers=2)


def engine(model, **changes):
    return engine_for(model, **(dict(recompute_layers=1) | changes))


def weights(made):
    return {n: t.clone() for n, t in made.trained_tensors().items()}


def take(made, steps=1, first=0, lr=1e-2):
    return [made.step([tiny.padded(RECS[:2]), tiny.padded(RECS[2:], 2)], step=first + s, lr=lr) for s in range(steps)]


# -- a step ---------------------------------------------------------------------------------------------------------


def test_result_counts_real_tokens_and_targets(model):
    (result,) = take(engine(model))
    assert result.num_tokens == sum(len(ids) for ids, _ in RECS)
    assert result.num_targets == sum(int((tiny.shifted(labels) != -100).sum()) for _, labels in RECS)
    assert 4 < result.loss < 7 and result.grad_norm > 0 and result.seconds > 0
    assert result.loss_scale is None


def test_loss_falls_and_only_what_is_trained_changes(model):
    made = engine(model, base_format="nf4")
    frozen = {n: p.clone() for n, p in made.built.model.named_parameters() if not p.requires_grad}
    packed = made.built.linears["model.layers.0.mlp.up_proj"].packed.tensors
    codes = {key: t.clone() for key, t in packed.items()}
    results = take(made, 8)
    assert results[-1].loss < results[0].loss - 0.1
    for name, p in made.built.model.named_parameters():
        assert p.grad is None, "gradients are let go"
        assert name not in frozen or torch.equal(p, frozen[name])
    assert all(torch.equal(packed[key], codes[key]) for key in codes)


def test_the_learning_rate_is_the_steps_not_the_plans(model):
    made = engine(model, lr=1.0, optimizer="sgd")
    before = weights(made)
    take(made, lr=0.0)
    assert all(torch.equal(t, before[n]) for n, t in made.trained_tensors().items())


def test_a_step_without_any_target_changes_nothing(model):
    made = engine(model)
    before = weights(made)
    silent = [(ids, np.full_like(labels, -100)) for ids, labels in RECS]
    result = made.step([tiny.padded(silent)], step=0, lr=1e-2)
    assert (result.loss, result.grad_norm, result.num_targets) == (0.0, 0.0, 0)
    assert all(torch.equal(t, before[n]) for n, t in made.trained_tensors().items())


def test_norm_is_that_of_all_gradients(model):
    made = engine(model)
    batches = [tiny.padded(RECS)]
    _, grads = gradients(made, batches)
    expected = math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))
    assert made.step(batches, step=0, lr=0.0).grad_norm == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("clip", "moved"), [(0.01, 0.01), (0.0, None), (1e6, None)])
def test_clipping(model, clip, moved):
    """With plain SGD a step moves by lr times the clipped norm; the norm reported is the one before."""
    made = engine(model, clip=clip, optimizer="sgd")
    before = weights(made)
    (result,) = take(made, lr=0.5)
    distance = math.sqrt(sum((t - before[n]).double().square().sum().item() for n, t in made.trained_tensors().items()))
    assert result.grad_norm > 0.05
    assert distance == pytest.approx(0.5 * (moved or result.grad_norm), rel=1e-3)


def test_weight_decay(model):
    """Decoupled: the difference that it makes is lr times decay times the weight."""
    without, with_decay = engine(model), engine(model, weight_decay=0.1)
    before = weights(without)
    take(without), take(with_decay)
    for name, start in before.items():
        lost = without.trained_tensors()[name] - with_decay.trained_tensors()[name]
        assert torch.allclose(lost, 1e-2 * 0.1 * start, atol=1e-7), name


def test_nothing_to_train(model):
    adapter = tiny.Adapter(4, 8, 0.0, "none", ())
    with pytest.raises(UserError, match=r"nothing to train(.|\n)*check --lora-targets"):
        engine(model, adapter=adapter)


# -- not finite -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_loss_that_is_not_finite(model, precision):
    made = engine(model, precision=precision, base_format=precision, loss_scaling=precision == "fp16")
    before = weights(made)
    norm = made.built.model.model.norm  # its weight may be the tiny model's own tensor
    norm.weight = torch.nn.Parameter(torch.full_like(norm.weight, float("nan")), requires_grad=False)
    with pytest.raises(UserError) as caught:
        made.step([tiny.padded(RECS)], step=6, lr=1e-2)
    assert caught.value.what == "the loss is not finite at step 7"
    assert caught.value.why == "it is nan"
    assert caught.value.exit_code == 1
    assert all(torch.equal(t, before[n]) for n, t in made.trained_tensors().items()), "weights are as before the step"


def poison_gradients(made, times):
    """The first gradients that arrive are infinite, `times` times over; returns how often a step was tried."""
    tried = []
    collect = made.masters.collect

    def poisoned(names):
        collect(names)
        for name in names:
            _, master = made.masters.pairs[name]
            if master.grad is not None and len(tried) < times:
                tried.append(name)
                master.grad.fill_(float("inf"))
                return

    made.masters.collect = poisoned
    return tried


def test_gradients_that_are_not_finite_without_scaling(model):
    made = engine(model)
    poison_gradients(made, 1)
    with pytest.raises(UserError) as caught:
        take(made, first=2)
    assert caught.value.what == "the gradients are not finite at step 3"
    assert caught.value.exit_code == 1


# -- fp16 -----------------------------------------------------------------------------------------------------------


def fp16(model, **changes):
    return engine(model, precision="fp16", base_format="fp16", loss_scaling=True, **changes)


def test_scaled_gradients_equal_those_of_fp32(model):
    """Against fp32 on the weights as fp16 rounds them; without scaling small gradients would be lost."""
    made = fp16(model)
    _, ours = gradients(made, [tiny.padded(RECS)])
    _, exact = gradients(engine(model, base_format="fp16"), [tiny.padded(RECS)])
    assert made.scaler.scale == 2.0**16
    assert_close(ours, exact, tolerance=2e-2)


def test_an_overflow_is_replayed_at_half_the_scale(model):
    """The batch is not skipped: the outcome is that of a run that never overflowed."""
    plain, replayed = fp16(model), fp16(model)
    plain.scaler.scale = 2.0**14
    tries = []
    accumulate = replayed._accumulate

    def overflowing(batches, grad_scale, observe):
        loss = accumulate(batches, grad_scale, observe)
        tries.append(replayed.scaler.scale)
        if replayed.scaler.scale > 2.0**14:
            replayed.masters.parameters()[0].grad.fill_(float("inf"))
        return loss

    replayed._accumulate = overflowing
    (expected,), (result,) = take(plain), take(replayed)
    assert tries == [2.0**16, 2.0**15, 2.0**14]
    assert (result.loss, result.loss_scale) == (expected.loss, 2.0**14)
    assert result.grad_norm == expected.grad_norm, "no rest of the infinite gradients"
    theirs = plain.trained_tensors()
    assert all(torch.equal(t, theirs[n]) for n, t in replayed.trained_tensors().items())


def test_a_real_overflow_in_fp16(model):
    """A scale far too high for the model's own gradients comes down by itself."""
    made = fp16(model)
    made.scaler.scale = 2.0**40
    (result,) = take(made)
    assert math.isfinite(result.loss) and math.isfinite(result.grad_norm)
    assert made.scaler.scale < 2.0**30


def test_no_scale_helps(model):
    made = fp16(model)
    poison_gradients(made, 10**9)
    with pytest.raises(UserError) as caught:
        take(made)
    assert caught.value.what == "gradients are not finite at any loss scale"
    assert caught.value.exit_code == 1


def test_the_scale_grows_after_2000_good_steps_and_starts_again_after_an_overflow():
    scaler = LossScaler(True)
    for _ in range(1999):
        scaler.grew()
    assert scaler.scale == 2.0**16
    scaler.grew()
    assert (scaler.scale, scaler.good_steps) == (2.0**17, 0)
    scaler.grew()
    scaler.shrink()
    assert (scaler.scale, scaler.good_steps) == (2.0**16, 0)
    off = LossScaler(False)
    for _ in range(5000):
        off.grew()
    assert off.scale == 1.0


# -- evaluation -----------------------------------------------------------------------------------------------------


def test_evaluation_is_the_loss_of_plain_transformers(model):
    made = engine(model, loss_chunk=7)
    total, count = made.evaluate([tiny.padded(RECS[:1]), tiny.padded(RECS[1:], 1)])
    expected = 0.0
    for ids, labels in RECS:
        logits = model(input_ids=torch.tensor(ids)[None]).logits[0]
        targets = torch.tensor(tiny.shifted(labels))
        expected += torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").item()
    assert count == sum(int((tiny.shifted(labels) != -100).sum()) for _, labels in RECS)
    assert total == pytest.approx(expected, rel=1e-6)


def test_evaluation_leaves_no_gradient_and_has_no_dropout(model):
    adapter = tiny.Adapter(4, 8, 0.5, "none", ("all-linear",))
    made = engine(model, adapter=adapter)
    take(made, 2)
    first = made.evaluate([tiny.padded(RECS)])
    assert made.evaluate([tiny.padded(RECS)]) == first
    assert all(p.grad is None for p in made.built.model.parameters())
    still = engine(model)
    still.load_state(*made.state())
    assert still.evaluate([tiny.padded(RECS)]) == first


def test_evaluating_nothing(model):
    assert engine(model).evaluate([]) == (0.0, 0)


# -- saved state ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        dict(optimizer="adamw"),
        dict(optimizer="adamw8bit", method="full", precision="bf16", base_format="bf16"),
        dict(optimizer="lion", precision="fp16", base_format="fp16", loss_scaling=True),
        dict(optimizer="adamw", adapter=tiny.Adapter(4, 8, 0.3, "none", ("all-linear",), dora=True), base_format="nf4"),
    ],
    ids=["lora", "full bf16, 8-bit state", "fp16", "dora with dropout"],
)
def test_state_goes_on_bit_for_bit(model, changes):
    whole, first, again = (engine(model, **changes) for _ in range(3))
    take(whole, 4)
    take(first, 2)
    tensors, values = first.state()
    again.load_state({n: t.clone() for n, t in tensors.items()}, values)
    take(again, 2, first=2)
    theirs = whole.trained_tensors()
    assert all(torch.equal(t, theirs[n]) for n, t in again.trained_tensors().items())
    assert again.scaler.__dict__ == whole.scaler.__dict__
    ours, expected = again.built.trainable(), whole.built.trainable()
    assert all(torch.equal(p, expected[n]) for n, p in ours.items()), "16-bit parameters are those of the masters"


def test_state_stays_where_it_is(model):
    """It is copied by who saves it, once (`fitune.train.saver`): on `meta` nothing can be."""
    plan = tiny.make_plan(optimizer="adafactor")
    built = build(tiny.config_of("llama"), plan, "meta")
    add_adapter(built, plan)
    made = Engine(built, plan)
    for p in made.masters.parameters():
        made.optimizer.state[p] = {"variance": torch.empty(3, device="meta")}
    tensors, _ = made.state()
    assert len(tensors) == 2 * len(made.names) and all(t.device.type == "meta" for t in tensors.values())


def test_saved_state_is_read_piece_by_piece(model):
    """Each tensor is put where it stays before the next is read."""

    class OneByOne(dict):
        most = 0

        def __getitem__(self, name: str) -> torch.Tensor:
            made = super().__getitem__(name).clone()
            alive[:] = [ref for ref in alive if ref() is not None] + [weakref.ref(made)]
            self.most = max(self.most, len(alive))
            return made

        def get(self, name: str, default: Any = None) -> Any:
            return self[name]

    alive: list[Any] = []
    first, again = (engine(model, optimizer="lion") for _ in range(2))
    take(first, 2)
    tensors, values = first.state()
    saved = OneByOne(tensors)
    again.load_state(saved, values)
    assert saved.most == 1
    assert all(torch.equal(t, tensors[n]) for n, t in again.state()[0].items())


def test_state_of_other_settings(model):
    tensors, values = engine(model).state()
    other: Engine = engine(model, adapter=tiny.Adapter(8, 8, 0.0, "none", ("all-linear",)))
    with pytest.raises(UserError) as caught:
        other.load_state(tensors, values)
    assert caught.value.what == "the checkpoint does not fit this run"
    assert caught.value.why == "model.layers.0.self_attn.q_proj.lora_A is missing or has another shape"
