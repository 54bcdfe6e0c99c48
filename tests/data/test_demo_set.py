"""The bundled bilingual demo set: counts, structure, separation of train and eval, and its arithmetic."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest

DEMO = resources.files("fitune").joinpath("data", "demo")
COUNTS = {"train": {"en": 232, "zh": 116}, "eval": {"en": 24, "zh": 12}}
EN_CLOSING = "In short, "
ZH_CLOSING = "简而言之，"
CJK = re.compile(r"[\u4e00-\u9fff]")


def read_records(split: str) -> list[dict]:
    """The records of ``train.jsonl`` or ``eval.jsonl``, one per line."""
    text = DEMO.joinpath(f"{split}.jsonl").read_bytes().decode("utf-8")
    return [json.loads(line) for line in text.splitlines()]


RECORDS = {split: read_records(split) for split in COUNTS}
ALL_RECORDS = [record for records in RECORDS.values() for record in records]


def question(record: dict) -> str:
    return record["messages"][0]["content"]


def answer(record: dict) -> str:
    return record["messages"][1]["content"]


def sentences(record: dict) -> list[str]:
    """An answer's sentences; a full stop inside a number or a name does not end one."""
    if record["language"] == "zh":
        return re.findall(r"[^。]+。", answer(record))
    return re.split(r"(?<=[.?!])\s+(?=[A-Z0-9])", answer(record))


@pytest.mark.parametrize("split", COUNTS)
def test_counts(split):
    found = [record["language"] for record in RECORDS[split]]
    assert {language: found.count(language) for language in set(found)} == COUNTS[split]


@pytest.mark.parametrize("split", COUNTS)
def test_file_is_plain_utf8_json_lines(split):
    raw = DEMO.joinpath(f"{split}.jsonl").read_bytes()
    assert not raw.startswith(b"\xef\xbb\xbf")
    assert b"\r" not in raw
    assert raw.endswith(b"}\n")
    assert b"\n\n" not in raw


@pytest.mark.parametrize("split", COUNTS)
def test_languages_are_interleaved(split):
    languages = [record["language"] for record in RECORDS[split]]
    assert languages == ["en", "en", "zh"] * (len(languages) // 3)


def test_record_structure():
    for record in ALL_RECORDS:
        assert set(record) == {"messages", "language"}, record
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"], record
        for message in record["messages"]:
            assert set(message) == {"role", "content"}, record
            content = message["content"]
            assert content and content == content.strip() and "\n" not in content and "  " not in content, record


def test_language_mark_matches_the_script():
    for record in ALL_RECORDS:
        text = question(record) + answer(record)
        cjk_share = len(CJK.findall(text)) / len(text)
        if record["language"] == "zh":
            assert cjk_share > 0.25, record
        else:
            assert cjk_share == 0 and text.isascii(), record


def test_no_duplicates_and_no_overlap_of_train_and_eval():
    for part in (question, answer):
        texts = [part(record).casefold() for record in ALL_RECORDS]
        assert len(texts) == len(set(texts)), sorted({text for text in texts if texts.count(text) > 1})


def test_no_held_out_sentence_occurs_in_train():
    seen = {sentence for record in RECORDS["train"] for sentence in sentences(record)}
    leaked = [sentence for record in RECORDS["eval"] for sentence in sentences(record) if sentence in seen]
    assert leaked == []


def test_english_lengths_and_closing():
    for record in ALL_RECORDS:
        if record["language"] == "en":
            assert 35 <= len(answer(record).split()) <= 70, record
            assert len(question(record).split()) <= 20, record
            assert question(record).endswith("?"), record
            parts = sentences(record)
            assert 3 <= len(parts) <= 4, record
            assert parts[-1].startswith(EN_CLOSING) and parts[-1].endswith("."), record
            assert answer(record).count(EN_CLOSING) == 1, record


def test_chinese_lengths_and_closing():
    for record in ALL_RECORDS:
        if record["language"] == "zh":
            assert 40 <= len(answer(record).replace(" ", "")) <= 90, record
            assert len(question(record)) <= 40, record
            assert question(record).endswith("？"), record
            parts = sentences(record)
            assert 3 <= len(parts) <= 4 and "".join(parts) == answer(record), record
            assert parts[-1].startswith(ZH_CLOSING), record
            assert not re.search(r",(?!\d{3})|[;!?]", answer(record)), record


NF4_DQ_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
NF4_BYTES = (4 + 32 / 64) / 8
LLAMA_3_1_8B_EMBEDDING = 128_256 * 4_096
LLAMA_3_1_8B_LAYERS = 8_030_261_248 - 2 * LLAMA_3_1_8B_EMBEDDING
LLAMA_3_1_8B_LAYER = 2 * 4_096 * 4_096 + 2 * 1_024 * 4_096 + 3 * 4_096 * 14_336
LORA_R16_8B = 32 * 16 * (2 * (4_096 + 4_096) + 2 * (4_096 + 1_024) + 3 * (4_096 + 14_336))
# What each figure of the set counts, in bytes.
SIZES = {
    "weights": [b * n for n in (135e6, 1e9, 3e9, 7e9, 8e9, 13e9, 70e9) for b in (4, 2, 1, NF4_BYTES, NF4_DQ_BYTES)],
    "full fine-tuning": [16 * n for n in (1e9, 7e9, 8e9)],
    "AdamW states, checkpoint, CPU optimizer": [8 * 7e9, 14 * 7e9, 12 * 7e9],
    "8-bit AdamW saves": [6 * 7e9, 6 * LORA_R16_8B],
    "double quantisation saves": [(NF4_BYTES - NF4_DQ_BYTES) * 7e9],
    "ZeRO stage 2 on 4 GPUs": [(2 + 14 / 4) * 7e9],
    "embedding and head": [2 * LLAMA_3_1_8B_EMBEDDING * b for b in (2, 4)],
    "Llama-3.1-8B NF4": [LLAMA_3_1_8B_LAYERS * NF4_DQ_BYTES + e * 4 * LLAMA_3_1_8B_EMBEDDING for e in (0, 1)],
    "one layer": [2 * LLAMA_3_1_8B_LAYER],
    "LoRA": [LORA_R16_8B * b for b in (2, 8, 16)],
    "logits": [4 * 128_256 * t for t in (256, 2_048, 8_192, 16_384)] + [4 * 151_936 * 4_096],
    "scores": [2 * 32 * t * t for t in (2_048, 8_192)],
    "layer inputs": [2 * 4_096 * 2_048, 32 * 2 * 4_096 * 2_048],
    "KV cache": [8_192 * 2 * 32 * 8 * 128 * 2],
    "mixture of experts": [2 * 46.7e9],
}
# Stated as approximate: CUDA context, what is left on a card, what a T4 offers.
ROUGH = {"0.5 GiB", "500 MiB", "9 GiB", "14 GiB", "14.7 GiB"}


def test_figures_in_gib_and_mib_are_computed():
    known = set(ROUGH)
    for num_bytes in (size for sizes in SIZES.values() for size in sizes):
        known |= {f"{num_bytes / 2**30:.2f} GiB", f"{num_bytes / 2**30:g} GiB", f"{num_bytes / 2**20:g} MiB"}
    for record in ALL_RECORDS:
        for figure in re.findall(r"[0-9][0-9.,]* [GM]iB", question(record) + " " + answer(record)):
            assert figure in known, (figure, record)


SUM = re.compile(r"([0-9]+(?: [+/] [0-9]+)+) ?(?:is|, or|gives|等于) ?([0-9.]*[0-9])")


def test_sums_in_the_text_are_right():
    stated = [(match, record) for record in ALL_RECORDS for match in SUM.findall(answer(record))]
    assert len(stated) >= 9
    for (text, total), record in stated:
        assert value_of(text) == pytest.approx(float(total)), record


def value_of(text: str) -> float:
    """The value of a sum of numbers and quotients such as ``4 + 12 / 8``."""
    total = 0.0
    for term in text.split("+"):
        numerator, *denominator = term.split("/")
        total += float(numerator) / float(denominator[0] if denominator else 1)
    return total


def test_readme_states_licence_and_counts():
    readme = DEMO.joinpath("README.md").read_text(encoding="utf-8")
    assert "Apache-2.0" in readme
    for split, counts in COUNTS.items():
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{split}.jsonl`"))
        assert [int(number) for number in re.findall(r"\d+", row)] == [counts["en"], counts["zh"], sum(counts.values())]
