"""Talking to runs and models: the same answers as transformers and peft give, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fitune import recipe as recipes
from fitune.cli.main import main
from fitune.errors import UserError
from fitune.train import run
from fitune.train.chat import Chat

TOKENS = 12
STYLE = "### Instruction:\n{}\n\n### Response:\n"  # the stated default where a model has no chat template


def make_run(folder: Path, base: Path, data: Path, **settings: Any) -> Path:
    values = dict(model=str(base), data=str(data), out=str(folder), batch=4, steps=6, lr=2e-2, lora_r=4, seq_len=128,
                  eval_share=0, precision="fp32") | settings  # fmt: skip
    return run(recipes.build(values)).run_folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base: Path, data: Path) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "trained", base, data)


def by_transformers(model: Any, tokenizer: Any, text: str) -> str:
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)  # fmt: skip
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_a_run_answers_as_its_adapter_does_in_peft(trained: Path, base: Path):
    """Two questions; the second is asked with the first in view."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    untrained = by_transformers(plain, tokenizer, STYLE.format("What is 2 plus 2?"))
    model = PeftModel.from_pretrained(plain, trained / "adapter")
    chat = Chat(str(trained), max_tokens=TOKENS)
    first = chat.answer("What is 2 plus 2?")
    prompt = STYLE.format("What is 2 plus 2?")
    assert first == by_transformers(model, tokenizer, prompt) != untrained
    second = chat.answer("Really?")
    assert second == by_transformers(model, tokenizer, f"{prompt}{first}</s>\n\n{STYLE.format('Really?')}")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2


def test_a_model_as_it_is(base: Path, monkeypatch):
    """In the precision that the plan chooses for this machine; here the one in which answers can be compared."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fitune.planner import choose

    monkeypatch.setattr(choose, "auto_precision", lambda target: "fp32")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = by_transformers(plain, AutoTokenizer.from_pretrained(base), STYLE.format("Hello"))
    chat = Chat(str(base), max_tokens=TOKENS)
    assert chat.answer("Hello") == expected
    assert not chat.built.trainable(), "there is no adapter"


def test_an_unfinished_run_answers_with_its_newest_checkpoint(trained: Path, tmp_path: Path):
    copy = tmp_path / "unfinished"
    shutil.copytree(trained, copy)
    shutil.rmtree(copy / "adapter")
    asked = "What is 2 plus 2?"
    assert Chat(str(copy), TOKENS).answer(asked) == Chat(str(trained), TOKENS).answer(asked)
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(UserError) as caught:
        Chat(str(copy), TOKENS)
    assert caught.value.what == f"nothing to talk to in {copy}"
    assert caught.value.why == "this run has neither a result nor a checkpoint yet"
    assert caught.value.fix == f"train it: fitune train --resume {copy}"


def test_full_fine_tuning(tmp_path: Path, base: Path, data: Path):
    """The whole model, and before it exists the checkpoint: the same answers, not the base model's."""
    folder = make_run(tmp_path / "full", base, data, method="full", lr=1e-2)
    asked = "What is 2 plus 2?"
    answer = Chat(str(folder), TOKENS).answer(asked)
    assert answer != Chat(str(base), TOKENS).answer(asked)
    shutil.rmtree(folder / "model")
    assert Chat(str(folder), TOKENS).answer(asked) == answer


def test_a_quantised_base_is_quantised_here_too(tmp_path: Path, base: Path, data: Path):
    folder = make_run(tmp_path / "qlora", base, data, method="qlora")
    chat = Chat(str(folder), TOKENS)
    packed = {linear.packed.format for linear in chat.built.linears.values() if linear.packed is not None}
    assert packed == {"nf4"} and chat.answer("Hello")


def test_a_run_of_a_gpu_is_read_on_the_cpu(trained: Path, tmp_path: Path):
    """Where there is no GPU; the answers are those of fp32."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    copy = tmp_path / "from-a-gpu"
    shutil.copytree(trained, copy)
    plan = json.loads((copy / "plan.json").read_text())
    plan |= {"device": "cuda", "precision": "bf16", "base_format": "bf16", "attention": "flash",
             "embedding_place": "host"}  # fmt: skip
    (copy / "plan.json").write_text(json.dumps(plan))
    assert Chat(str(copy), TOKENS).answer("Hello") == Chat(str(trained), TOKENS).answer("Hello")


def test_raw_text_is_continued(tmp_path: Path, base: Path):
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"Once upon a time there were {i} cats."}) for i in range(8)))
    folder = make_run(tmp_path / "raw", base, text)
    chat = Chat(str(folder), TOKENS)
    assert chat.template is None and chat.answer("Once upon")
    assert chat.messages == [], "each text stands alone"


def test_a_long_conversation_forgets_its_beginning(trained: Path):
    chat = Chat(str(trained), max_tokens=TOKENS)
    for number in range(4):
        chat.answer(f"{number} " + "long " * 30)
    assert chat.messages[0]["content"].startswith(("1", "2", "3"))
    with pytest.raises(UserError) as caught:
        chat.answer("x" * 600)
    assert caught.value.what == "this is too long for the model" and "it reads 512" in caught.value.why


def test_an_adapter_that_does_not_fit_is_refused(trained: Path, tmp_path: Path):
    copy = tmp_path / "changed"
    shutil.copytree(trained, copy)
    plan = json.loads((copy / "plan.json").read_text())
    plan["adapter"]["targets"] = ["q_proj"]
    (copy / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UserError) as caught:
        Chat(str(copy), TOKENS)
    assert caught.value.what == "what was trained does not fit the base model"


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("runs/traind", "no run 'runs/traind'", "did you mean trained?"),
        ("traind", "no run and no model is called 'traind'", "did you mean trained?; names the catalog knows"),
        ("smolm2", "no run and no model is called 'smolm2'", "HuggingFaceTB/SmolLM2-135M"),
        ("./empty", "empty is not a run", "`fitune runs` lists the runs"),
        ("./nothing", "no run './nothing'", "did you mean trained?"),
        ("somebody/unknown", "cannot get somebody/unknown from Hugging Face", "connect to the network"),
    ],
)
def test_unknown_runs_and_models(name: str, what: str, fix: str, trained: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "trained").symlink_to(trained)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        Chat(name, TOKENS)
    assert caught.value.what == what and fix in caught.value.fix


def test_the_command(trained: Path, tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(trained)
    monkeypatch.chdir(tmp_path)
    assert main(["chat", "mine", "--prompt", "What is 2 plus 2?", "--max-tokens", str(TOKENS), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"prompt": "What is 2 plus 2?", "answer": Chat(str(trained), TOKENS).answer("What is 2 plus 2?")}
