"""One call from a file to records: counts, lengths, splits, and every shared sample file."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from fitune.data.batches import step_batches
from fitune.data.dataset import load_dataset
from fitune.errors import UserError


def write(folder, rows, name="data.jsonl"):
    (folder / name).write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return str(folder / name)


def pairs(count, answer="The answer is {}."):
    return [{"prompt": f"What is {i}?", "response": answer.format(i)} for i in range(count)]


def test_the_whole_way_with_its_description(tmp_path, smollm2):
    rows = [*pairs(38), {"prompt": "x", "response": ""}, {"prompt": "What is 3?", "response": "The answer is 3."}]
    data = load_dataset(write(tmp_path, rows), smollm2, seq_len=64)
    assert len(data.train) == 37 and len(data.eval) == 2, "5 % of 39 records"
    assert [r.index for r in data.train + data.eval] == list(range(39))
    assert data.report.dropped == {"empty answer": (38,)} and data.report.duplicates == 1
    assert data.train[0].input_ids.dtype == data.train[0].labels.dtype == np.int32
    text = "\n".join(data.lines())
    assert "layout prompt-completion: prompt, response ('prompt' is answered by 'response')" in text
    assert "chat template own" in text and "39 records from 40 rows" in text
    assert "1 row left out: empty answer (row 39)" in text and "1 record repeating an earlier one" in text
    assert "37 to train on, 2 to evaluate on (held out at random, seed 0)" in text
    assert json.loads(json.dumps(data.as_dict()))["lengths"]["loss_tokens"] == sum(
        r.num_targets for r in data.train + data.eval
    )


def test_lengths(tmp_path, smollm2):
    rows = pairs(30)
    rows[17]["prompt"] += " and why" * 100
    data = load_dataset(write(tmp_path, rows), smollm2, eval_share=0)
    lengths = sorted(len(r) for r in data.train)
    report = data.report
    assert report.longest_row == 17 and report.longest_tokens == lengths[-1] > 200
    assert report.median_tokens == int(np.median(lengths)) and report.p95_tokens == lengths[28]
    assert report.total_tokens == sum(lengths) and not data.eval


def test_truncation_is_counted_and_a_record_without_answer_is_dropped(tmp_path, smollm2):
    rows = pairs(3)
    rows[1]["response"] = "word " * 500
    rows[2]["prompt"] = "word " * 500
    data = load_dataset(write(tmp_path, rows), smollm2, seq_len=100)
    assert [len(r) for r in data.train] == [len(data.train[0]), 100]
    assert data.report.truncated == 1 and data.report.truncated_tokens > 400
    assert data.report.dropped == {"the answer starts after seq_len 100": (2,)}
    assert any("cut at seq_len 100" in line for line in data.report.lines())
    with pytest.raises(UserError) as error:
        load_dataset(write(tmp_path, rows[2:]), smollm2, seq_len=100)
    assert error.value.why == "1 x the answer starts after seq_len 100" and "--seq-len" in error.value.fix


def test_a_long_document_is_cut_without_losing_a_token(tmp_path, smollm2):
    text = "Memory is a cache, not a capacity. " * 300
    (tmp_path / "book.txt").write_text(text)
    data = load_dataset(str(tmp_path / "book.txt"), smollm2, seq_len=128, eval_share=0)
    assert all(len(r) <= 128 for r in data.train) and data.report.split_rows == 1 and data.template is None
    joined = [*data.train[0].input_ids, *(t for r in data.train[1:] for t in r.input_ids[1:])]
    assert smollm2.decode(joined) == text + smollm2.eos_token
    targets = sum(b.num_targets for b in step_batches(data.train, micro_batch=4, packing=True, seq_len=128, pad_id=0))
    assert targets == len(joined) - 1, "every token but the first is predicted exactly once"
    longest = load_dataset(str(tmp_path / "book.txt"), smollm2, seq_len=10_000)
    assert len(longest.train) == 1 and not longest.eval


def test_the_held_out_share_is_seeded_and_shares_no_record_with_training(tmp_path, smollm2):
    rows = pairs(50) * 3
    path = write(tmp_path, rows)
    first, again, other = (load_dataset(path, smollm2, seed=seed) for seed in (1, 1, 2))

    def contents(records):
        return {r.input_ids.tobytes() for r in records}

    assert contents(first.eval) == contents(again.eval) != contents(other.eval)
    assert not contents(first.eval) & contents(first.train) and 3 <= len(first.eval) <= 8
    assert len(load_dataset(path, smollm2, eval_share=0.2).eval) == 30
    assert not load_dataset(write(tmp_path, pairs(19)), smollm2).eval


def test_a_validation_file(tmp_path, smollm2):
    data = load_dataset(write(tmp_path, pairs(30)), smollm2, eval_data=write(tmp_path, pairs(3, "No {}"), "eval.jsonl"))
    assert len(data.train) == 30 and [r.index for r in data.eval] == [30, 31, 32]
    assert data.eval_from.endswith("eval.jsonl")


def test_the_bundled_set_brings_its_own_evaluation(smollm2):
    data = load_dataset("demo", smollm2)
    assert data.eval_from == "the bundled evaluation set" and data.eval
    assert {r.meta["language"] for r in data.train} == {"en", "zh"} and not data.report.dropped


def test_unfilled_placeholders_are_pointed_out(tmp_path, smollm2):
    data = load_dataset(write(tmp_path, pairs(5, "I am {{{{name}}}}, number {}.")), smollm2)
    assert "5 answers hold unfilled placeholders ({{name}})" in data.notes[0]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"prompt": "a", "response": ""}] * 2, {}, "2 x empty answer"),
        (pairs(1), {"seq_len": 1}, "seq_len 1 is too short"),
        (pairs(1), {"loss_on": "answers"}, "unknown loss_on 'answers'"),
        (pairs(1), {"columns": {"prompt": "prompt", "response": "answer"}}, "has no column 'answer'"),
        (
            [{"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a"}]}],
            {},
            "fitune does not train image or video models",
        ),
    ],
)
def test_data_that_cannot_be_trained_is_refused(tmp_path, smollm2, rows, options, message):
    with pytest.raises(UserError) as error:
        load_dataset(write(tmp_path, rows), smollm2, **options)
    assert message in str(error.value) and error.value.exit_code == 2


def test_importing_data_imports_nothing_heavy():
    code = (
        "import sys, fitune.data.dataset, fitune.data.batches, fitune.data.hub\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow', 'jinja2', 'pandas') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert out.stdout.strip() == "[]", out.stderr


# --- the shared sample files ------------------------------------------------------------------------------------------

TRAINED = {  # file: (layout, records, rows left out, a note or line that a person must see)
    "identity.json": ("alpaca", 91, 0, "unfilled placeholders ({{author}}, {{name}})"),
    "glaive_toolcall_en_demo.json": ("sharegpt", 288, 1, "the answer starts after seq_len 4096 (row 234)"),
    "glaive_toolcall_zh_demo.json": ("sharegpt", 291, 0, "tool schemas, calls and results written as text"),
    "dpo_en_demo.json": ("preference", 150, 0, "trained on the chosen answers, the rejected ones are left out"),
    "seed_tasks.jsonl": ("alpaca", 173, 0, "stand inside 'instances'"),
    "qwen35_tokenize_data.jsonl": ("messages", 12, 5, "4 rows left out: holds video content"),
    "wwdc25_valid.jsonl": ("prompt-completion", 144, 0, "21 records repeating an earlier one"),
    "mlx_lora_wikisql_train.jsonl": ("text", 1000, 0, "raw text: the loss counts every token"),
    "tinyshakespeare.txt": ("text", 84, 0, "is one document"),
    "Amazon_SageMaker_FAQs.csv": ("prompt-completion", 154, 0, "no header row"),
    "wizardlm.508e.json": ("prompt-completion", 5, 3, "3 rows left out: empty answer (row 1, 4, 6)"),
}
REFUSED = {  # file: (why, fix)
    "prompts-zh.json": ("there is no answer column (columns: act, prompt)", "--columns prompt=prompt,response=..."),
    "gsm8k_verl_test.parquet": ("messages without an answer", "--columns prompt=prompt,response=extra_info.answer"),
    "human_eval_example_samples.jsonl": ("no column looks like its prompt", "--columns text=completion"),
    "invalid_evaluate_test_data.jsonl": (
        "line 1, column 1088 is not valid JSON: unterminated string",
        "correct line 1",
    ),
}
AS_TOLD = {  # refused by itself, trained once the person says what the columns are
    "prompts-zh.json": ({"text": "prompt"}, 124),
    "gsm8k_verl_test.parquet": ({"prompt": "prompt", "response": "extra_info.answer"}, 1319),
    "human_eval_example_samples.jsonl": ({"text": "completion"}, 6),
}


def test_no_shared_file_is_forgotten(shared_datasets):
    names = {p.name for p in shared_datasets.iterdir()} - {"README.md", "LICENSES.txt"}
    assert names == set(TRAINED) | set(REFUSED)


@pytest.mark.parametrize("name", TRAINED)
def test_shared_files_that_are_trained(shared_datasets, smollm2, name):
    layout, num_records, num_dropped, line = TRAINED[name]
    data = load_dataset(str(shared_datasets / name), smollm2, seq_len=4096)
    assert (data.layout.name, data.report.num_records, data.report.num_dropped) == (layout, num_records, num_dropped)
    assert line in "\n".join(data.lines())
    assert all(r.num_targets and len(r) <= 4096 for r in data.train + data.eval)


@pytest.mark.parametrize("name", REFUSED)
def test_shared_files_that_are_refused(shared_datasets, smollm2, name):
    why, fix = REFUSED[name]
    with pytest.raises(UserError) as error:
        load_dataset(str(shared_datasets / name), smollm2)
    assert why in error.value.why and fix in error.value.fix and error.value.exit_code == 2


@pytest.mark.parametrize("name", AS_TOLD)
def test_refused_files_are_trained_as_the_message_says(shared_datasets, smollm2, name):
    columns, num_records = AS_TOLD[name]
    data = load_dataset(str(shared_datasets / name), smollm2, columns=columns)
    assert data.report.num_records == num_records and not data.report.dropped
