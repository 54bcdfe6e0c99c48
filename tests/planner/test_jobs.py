"""How long a job is: from characters, a tokenizer or a number of tokens; padding and packing of its mean step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fitune import recipe as recipes
from fitune.errors import UserError
from fitune.planner import jobs, lengths


def recipe(**values):
    return recipes.build({"model": "meta-llama/Llama-3.1-8B", "batch": 8, **values})


def alpaca(folder: Path, count: int) -> Path:
    """Records of 390 + 780 Latin characters: 100 + 200 tokens by the estimate, and 5 for the marks of each message. No
    two are equal: copies are not held out."""
    path = folder / "data.jsonl"
    rows = [json.dumps({"instruction": f"{i:06d}" + "a" * 384, "output": "b" * 780}) for i in range(count)]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def test_estimate_from_characters(tmp_path: Path):
    job = jobs.of(recipe(data=str(alpaca(tmp_path, 1000))), 2048)
    assert (job.basis, job.error) == ("estimated", jobs.ESTIMATE_ERROR)
    # 5 % are held out, here 50; 105 + 205 tokens each; 950 records in steps of 8 are 118.75
    assert (job.num_records, job.tokens, job.eval_tokens, job.steps) == (950, 950 * 310, 50 * 310, 119)
    assert job.target_share == pytest.approx(205 / 310)
    assert job.facts is not None
    assert job.facts.longest_tokens == round(310 * jobs.ESTIMATE_ERROR[1])


def test_at_most_200_records_are_held_out(tmp_path: Path):
    job = jobs.of(recipe(data=str(alpaca(tmp_path, 5000)), epochs=2), 2048)
    assert (job.num_records, job.steps, job.epochs) == (4800, 1200, 2.0)


def test_long_records_are_cut_and_long_texts_are_split(tmp_path: Path):
    job = jobs.of(recipe(data=str(alpaca(tmp_path, 10)), seq_len=128), 128)
    assert set(job.lengths) == {128}
    (tmp_path / "book.txt").write_text("word " * 3900, encoding="utf-8")  # 19,499 characters: 5,000 tokens
    text = jobs.of(recipe(data=str(tmp_path / "book.txt")), 2048)
    assert sum(text.lengths) == pytest.approx(5000, abs=2) and len(text.lengths) == 3


def test_chinese_is_counted_by_the_character():
    assert jobs.estimate_tokens("显存" * 100) == 200 * jobs.TOKENS_PER_OTHER_CHAR
    assert jobs.estimate_tokens("x" * 390) == 100


def test_own_tokenizer_is_counted_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from fitune.model.tokenizers import _bytes

    tokenizer = _bytes("m", 512)
    monkeypatch.setattr(jobs, "tokenizer_here", lambda recipe: tokenizer)
    job = jobs.of(recipe(data=str(alpaca(tmp_path, 40))), 4096)
    assert (job.basis, job.num_records, job.error) == ("counted", 38, (1.0, 1.0))
    assert len(set(job.lengths)) == 1
    assert 1170 < job.lengths[0] < 1300  # a token a byte, and the template's marks
    assert job.facts.total_tokens == 40 * job.lengths[0]


def test_long_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from fitune.model.tokenizers import _bytes

    monkeypatch.setattr(jobs, "tokenizer_here", lambda recipe: _bytes("m", 512))
    monkeypatch.setattr(lengths, "MOST_COUNTED", 30)
    job = jobs.of(recipe(data=str(alpaca(tmp_path, 300))), 4096)
    assert (job.basis, job.num_records, job.error) == ("sampled", 280, (0.9, 1.1))  # 2 of 30 were held out
    assert job.tokens == pytest.approx(280 * job.lengths[0])


def test_tokens_instead_of_data():
    job = jobs.of(recipe(seq_len=1024), 1024, tokens=10e6)
    assert (job.num_records, job.steps, job.basis, job.facts) == (None, 1221, "given", None)  # 10e6 / 8192
    assert jobs.of(recipe(steps=7), 2048, tokens=10e6).steps == 7
    assert (jobs.of(recipe(), 2048).basis, jobs.of(recipe(), 2048).tokens) == ("unit", 1e6)


@pytest.mark.parametrize(("data", "said"), [("none.jsonl", "cannot find the data file"), ("a/b", "cannot measure a/b")])
def test_data_that_is_not_here(data: str, said: str):
    with pytest.raises(UserError) as caught:
        jobs.of(recipe(data=data), 2048)
    assert said in str(caught.value) and caught.value.exit_code == 2


def test_padding_is_that_of_training():
    """Records of like length share a step; within a micro-batch rows are as long as the longest."""
    assert jobs.padding([100] * 64, 4, 8) == 1.0
    mixed = [100, 200] * 64
    assert jobs.padding(mixed, 1, 8) == 1.0
    assert 1.0 <= jobs.padding(mixed, 8, 8) < 1.1
    assert jobs.padding([100, 200, 100, 200], 4, 4) == pytest.approx(800 / 600)


def test_workload_of_padded_and_packed_rows():
    job = jobs.Job(64, 6400.0, 1.0, 8, 8, lengths=(100,) * 64, target_share=0.5)
    plan = SimpleNamespace(packing=False, micro_batch=4, batch=8, seq_len=1000)
    same, load = job.workload(plan)
    assert same is plan and (load.row_tokens, load.target_share) == (100.0, 0.5)
    packed = SimpleNamespace(packing=True, micro_batch=4, batch=8, seq_len=400)
    packed.with_ = lambda **changes: SimpleNamespace(**(vars(packed) | changes))
    changed, load = job.workload(packed)
    assert (changed.batch, changed.micro_batch) == (2, 2)  # 800 tokens in rows of at most 400, 95 % full
    assert (load.row_tokens, load.doc_tokens) == (400.0, 100.0)
