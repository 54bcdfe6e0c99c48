"""Files to rows, and what a person is told when a file cannot be read."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from fitune.data.readers import read
from fitune.errors import UserError


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


ROWS = [{"prompt": "a?", "response": "b"}, {"prompt": "c?", "response": "d"}]
LINES = "\n".join(json.dumps(row) for row in ROWS)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.jsonl", LINES, "jsonl"),
        ("bom.jsonl", "\ufeff" + LINES + "\n", "jsonl"),
        ("crlf.jsonl", LINES.replace("\n", "\r\n") + "\r\n", "jsonl"),
        ("blank.jsonl", LINES.replace("\n", "\n\n"), "jsonl"),
        ("lines_inside.json", LINES, "jsonl"),
        ("a.json", json.dumps(ROWS, indent=1), "json"),
        ("array_inside.jsonl", json.dumps(ROWS), "json"),
        ("data_key.json", json.dumps({"version": 1, "data": ROWS}), "json"),
        ("train_key.json", json.dumps({"train": ROWS, "test": ROWS[:1]}), "json"),
        ("columns.json", json.dumps({"prompt": ["a?", "c?"], "response": ["b", "d"]}), "json"),
        ("a.csv", "prompt,response\na?,b\nc?,d\n", "csv"),
        ("semicolon.csv", "prompt;response\na?;b\nc?;d", "csv"),
        ("a.tsv", "prompt\tresponse\na?\tb\nc?\td\n", "csv"),
        ("bom.csv", "\ufeffprompt,response\r\na?,b\r\nc?,d\r\n", "csv"),
    ],
)
def test_the_same_rows_in_every_spelling(tmp_path, name, content, kind):
    table = read(write(tmp_path, name, content))
    assert table.rows == ROWS and table.kind == kind


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert read(str(tmp_path / "a.parquet")).rows == ROWS


def test_notes_say_what_was_done(tmp_path):
    assert read(write(tmp_path, "b.jsonl", LINES.replace("\n", "\n\n"))).notes == ["1 blank line skipped"]
    assert "JSON Lines, whatever its name" in read(write(tmp_path, "l.json", LINES)).notes[-1]
    assert "records taken from 'data'" in read(write(tmp_path, "d.json", json.dumps({"data": ROWS}))).notes[0]
    assert read(write(tmp_path, "w.txt", "a\r\nb\r\n")).rows == [{"text": "a\nb\n"}]


def test_one_conversation_as_a_whole_file_is_one_record(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert read(write(tmp_path, "one.json", json.dumps({"messages": messages}))).rows == [{"messages": messages}]
    assert read(write(tmp_path, "nested.json", json.dumps([messages]))).rows == [{"messages": messages}]


def test_csv_without_header_keeps_its_first_record(tmp_path):
    content = '\ufeffWhat is VRAM?,"Memory, on the card."\r\n"Two\r\nlines?",Yes\r\n'
    table = read(write(tmp_path, "faq.csv", content))
    assert not table.has_header
    assert table.rows == [
        {"column_1": "What is VRAM?", "column_2": "Memory, on the card."},
        {"column_1": "Two\r\nlines?", "column_2": "Yes"},
    ]
    assert table.notes == ["no header row: the columns are called column_1, column_2"]


def test_an_unknown_header_is_still_a_header(tmp_path):
    content = "Title,Summary text\n" + "A fairly long title of a paper,And its much longer summary in words\n" * 3
    assert read(write(tmp_path, "papers.csv", content)).columns == ["Title", "Summary text"]


def test_a_unicode_line_separator_does_not_cut_a_json_line(tmp_path):
    line = json.dumps({"text": "one\u2028two"}, ensure_ascii=False)
    assert read(write(tmp_path, "s.jsonl", line + "\n")).rows == [{"text": "one\u2028two"}]


def test_limit_is_said(tmp_path):
    table = read(write(tmp_path, "a.jsonl", LINES), limit=1)
    assert table.rows == ROWS[:1] and table.notes == ["only the first 1 of 2 records are used, as asked"]


BAD = [
    ("cut.jsonl", LINES + '\n{"prompt": "e?", "respo', "line 3, column 18 is not valid JSON: unterminated string"),
    ("two.jsonl", "{\n" + LINES + "\n[]x\n", "2 of 4 lines cannot be read (line 1, 4)"),
    ("strings.jsonl", '"a"\n"b"\n', "line 1, column 1 is not valid JSON: a string where an object {...} is expected"),
    ("cut.json", '[{"a": 1}, {"a": ', "line 1, column 18 is not valid JSON: expecting value"),
    ("number.json", "12", "its JSON is a number"),
    ("mixed.json", '[{"a": 1}, 5]', "record 2 is a number where an object {...} is expected"),
    ("empty.jsonl", "", "the file is empty"),
    ("space.json", "\ufeff \n", "the file is empty"),
    ("none.json", "[]", "it holds no records"),
    ("ragged.csv", "prompt,response\na,b\nc,d,e\n", "line 3 has 3 cells where the first row has 2"),
    ("quote.csv", 'prompt,response\na,"b\nc,d\n', "the record that starts at line 2 is not valid CSV"),
    ("double.csv", "text,text\na,b\n", "two columns are called 'text'"),
    ("bad.parquet", b"PAR1nonsense", "it is not a whole Parquet file"),
    ("a.jsonl.gz", b"\x1f\x8b", "it is compressed"),
    ("a.xlsx", b"PK", "it is a spreadsheet"),
    ("a.xml", "<a/>", "the suffix '.xml' is not one fitune knows"),
    ("binary.txt", b"\x00\x01\xff\xfe\x80", "it looks like a binary file"),
    ("gbk.csv", "问题,回答\n显存不够怎么办,减小批次大小\n".encode("gb18030"), "it looks like GB18030"),
    ("utf16.json", LINES.encode("utf-16"), "it looks like UTF-16"),
    ("latin.jsonl", '{"text": "café"}'.encode("latin-1"), "byte 0xe9 at offset 13 (line 1)"),
]


@pytest.mark.parametrize(("name", "content", "why"), BAD, ids=[name for name, _, _ in BAD])
def test_what_cannot_be_read_is_refused_with_the_place(tmp_path, name, content, why):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(UserError) as error:
        read(write(tmp_path, name, content))
    assert why in error.value.why and error.value.fix and error.value.exit_code == 2
    assert name.split(".")[0] in error.value.what


def test_the_fix_for_another_encoding_is_a_command(tmp_path):
    path = write(tmp_path, "gbk.txt", "显存不够怎么办".encode("gb18030"))
    with pytest.raises(UserError) as error:
        read(path)
    assert error.value.fix == f"convert it: iconv -f GB18030 -t UTF-8 {path} > {tmp_path / 'gbk.utf8.txt'}"


def test_a_misspelt_name_is_answered_with_the_nearest(tmp_path):
    write(tmp_path, "alpaca.jsonl", LINES)
    with pytest.raises(UserError) as error:
        read(str(tmp_path / "alpcaa.jsonl"))
    assert "cannot find the data file" in error.value.what and error.value.fix == "did you mean alpaca.jsonl?"
    with pytest.raises(UserError) as error:
        read(str(tmp_path / "no" / "a.jsonl"))
    assert "there is no folder" in error.value.why


def test_a_name_without_suffix_is_a_file_before_it_is_a_dataset(tmp_path, monkeypatch):
    write(tmp_path, "identity.json", json.dumps(ROWS))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        read("identity")
    assert error.value.fix == "did you mean identity.json?"


def test_a_folder_names_what_it_holds(tmp_path):
    write(tmp_path, "a.jsonl", LINES)
    with pytest.raises(UserError) as error:
        read(str(tmp_path))
    assert "is a folder" in error.value.what and error.value.why == "it holds a.jsonl"


def test_an_unreachable_hub_is_one_message():
    pytest.importorskip("datasets")
    code = (
        "from fitune.data.readers import read; from fitune.errors import UserError\n"
        "try: read('nobody/nothing')\n"
        "except UserError as error: print(error)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert "nobody/nothing" in out.stdout.splitlines()[0] and "  fix: " in out.stdout, out.stderr
    assert "Traceback" not in out.stderr


def test_hub_errors_name_the_missing_part(monkeypatch):
    datasets = pytest.importorskip("datasets")
    seen = []

    def load(name, config, split):
        seen.append((name, config, split))
        if config is None:
            raise ValueError(
                "Config name is missing. Please pick one among the available configs: ['main', 'socratic']"
            )
        if split == "nope":
            raise ValueError("Unknown split \"nope\". Should be one of ['train', 'test'].")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    table = read("openai/gsm8k:main@test", limit=1)
    assert table.rows == ROWS[:1] and table.kind == "hub" and seen[-1] == ("openai/gsm8k", "main", "test")
    with pytest.raises(UserError) as error:
        read("openai/gsm8k")
    assert "'main', 'socratic'" in error.value.why and error.value.fix.endswith("openai/gsm8k:CONFIG")
    with pytest.raises(UserError) as error:
        read("openai/gsm8k:main@nope")
    assert "it has no split 'nope'" in error.value.why
    with pytest.raises(UserError, match="there is no hub called 'github'"):
        read("openai/gsm8k", hub="github")


def test_modelscope_needs_its_package():
    if importlib.util.find_spec("modelscope"):
        pytest.skip("modelscope is installed")
    with pytest.raises(UserError) as error:
        read("owner/name", hub="modelscope")
    assert error.value.fix == "pip install modelscope"


def test_parquet_with_text_that_is_no_utf8(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    raw = pa.array([b"caf\xe5", b"whole"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, raw.buffers())  # not checked
    pq.write_table(pa.table({"text": text}), tmp_path / "bad.parquet")
    with pytest.raises(UserError, match="not a whole Parquet file"):
        read(str(tmp_path / "bad.parquet"))
