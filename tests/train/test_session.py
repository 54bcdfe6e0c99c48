"""What training takes from the recipe before its first step: record lengths and the device, as the planner does."""

from __future__ import annotations

import pytest

from fitune import recipe as recipes
from fitune.errors import UserError
from fitune.train.session import open_session, plan_device, plan_session
from tests import tiny
from tests.planner.case import GIB, card, machine
from tests.train import tiny_run


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A model with 128 learned positions, far below the default seq_len."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tiny_run.make_base(tmp_path_factory.mktemp("base") / "tiny-gpt2")  # for its tokenizer
    size = dict(n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(GPT2Config(vocab_size=tiny_run.VOCABULARY, **size)).save_pretrained(folder)
    return folder


def test_planning_and_training_cut_the_default_length_alike(gpt2, tmp_path):
    long = [{"prompt": "Count.", "response": "one two three " * 40}] * 4
    data = tiny_run.write_rows(tmp_path / "long.jsonl", long)
    values = dict(model=str(gpt2), data=str(data), devices="cpu", batch=2)
    session = open_session(recipes.build(values))
    assert max(len(record) for record in session.data.train) == 128
    result = plan_session(session)
    assert result.plan.seq_len == 128
    assert "this model has 128 learned positions: seq_len is 128 instead of 2048" in result.notes
    with pytest.raises(UserError) as caught:
        open_session(recipes.build(values | {"seq_len": 129}))
    assert (caught.value.what, caught.value.fix) == (
        "seq_len 129 is longer than this model can read", "use --seq-len 128",
    )  # fmt: skip


def test_layers_on_disk_are_packed_once(tmp_path, monkeypatch):
    """The second run reads no weight of a layer; what it trains is the same to the bit."""
    from fitune.train.session import load_model, make_engine

    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path / "cache"))
    folder = tiny_run.make_base(tmp_path / "base")
    data = tiny_run.write_rows(tmp_path / "data.jsonl", tiny_run.questions(8))
    values = dict(model=str(folder), data=str(data), devices="cpu", batch=2, base_format="nf4", method="qlora")
    session = open_session(recipes.build(values))
    plan = plan_session(session).plan
    losses, read = [], []
    for changes in ({}, *[dict(stream_from="disk", resident_layers=0)] * 2):
        names: list[str] = []
        engine = make_engine(load_model(session, plan.with_(**changes), names.append), plan.with_(**changes))
        read.append(names)
        losses.append([engine.step([tiny.padded(tiny.records(2))], step=s, lr=1e-2).loss for s in range(2)])
    assert losses[0] == losses[1] == losses[2]
    assert read[0] == read[1]
    assert read[2] == [name for name in read[0] if not name.startswith("model.layers.")] != []


def test_the_device_is_the_planners(monkeypatch):
    """Asked for: that one. Otherwise, of several cards, the one with the most free memory."""
    import torch

    from fitune import hardware

    two = machine(card(index=0, free_bytes=GIB), card(8 * GIB, index=1))
    monkeypatch.setattr(hardware, "probe", lambda: two)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cuda, cpu = tiny.make_plan(device="cuda"), tiny.make_plan(device="cpu")
    assert plan_device(recipes.build({}), cuda) == torch.device("cuda", 1)
    assert plan_device(recipes.build({"devices": "cuda:0"}), cuda) == torch.device("cuda", 0)
    assert plan_device(recipes.build({}), cpu) == torch.device("cpu")
