"""Generation through the modules that train gives what transformers gives."""

from __future__ import annotations

import pytest
import torch

from fitune.model.build import add_adapter, build, fill
from fitune.train.sampling import generating
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
