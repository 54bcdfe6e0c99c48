"""Generation through the modules that train gives what transformers gives."""

from __future__ import annotations

import pytest
import torch

from fitune.model.build import add_adapter, build, fill
from fitune.train.sampling import answer, generating
from tests import tiny


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "mixtral", "gpt2", "deepseek_v3"])
def test_greedy_generation_equals_transformers(name):
    model = tiny.reference(name)
    plan = tiny.make_plan()
    built = build(model.config, plan, "cpu")
    fill(built, model.state_dict().items(), plan)
    add_adapter(built, plan)
    prompt = torch.randint(3, 256, (1, 20), generator=torch.Generator().manual_seed(1))
    options = dict(
        max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0, attention_mask=torch.ones_like(prompt)
    )
    expected = model.generate(prompt, **options)
    with generating(built):
        ours = built.model.generate(prompt, use_cache=True, **options)
    assert torch.equal(ours, expected)


class _Numbers:
    """A tokenizer whose text is its tokens' numbers."""

    eos_token_id, pad_token_id = 2, 0

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(int(i)) for i in ids)


@pytest.mark.parametrize("length", [10, 20])
def test_answers_of_a_model_that_attends_in_chunks(length):
    """From within its first chunk of 16 tokens to beyond it, and from the second one on."""
    model = tiny.reference("llama4")
    built = build(model.config, tiny.make_plan(), "cpu")
    fill(built, model.state_dict().items(), tiny.make_plan())
    prompt = torch.randint(3, 256, (1, length), generator=torch.Generator().manual_seed(1))
    expected = model.generate(prompt, max_new_tokens=16, do_sample=False, use_cache=False, eos_token_id=2,
                              pad_token_id=0, attention_mask=torch.ones_like(prompt))  # fmt: skip
    ours = answer(built, _Numbers(), prompt[0].tolist(), max_tokens=16)
    assert ours == _Numbers().decode(expected[0, length:], True)
