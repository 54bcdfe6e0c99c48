"""`fitune plan --what-if`, `--limits` and `--explain`, in both languages."""

from __future__ import annotations

import json
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from fitune.cli import render_techniques, render_whatif
from fitune.cli.main import main
from fitune.cli.plan_extras import answer, show

MODEL = "meta-llama/Llama-3.1-8B"
SETTINGS = {"gpu": "rtx3080"}


@pytest.fixture(scope="module")
def result():
    from fitune.cli import api

    questions = ("seq=1024,batch=4", "method=full", "gpu=none-such")
    asked = answer(MODEL, SETTINGS, explain=True, what_if=questions, limits=True)
    return api.plan_result(MODEL, SETTINGS).as_dict() | asked


def shown(result, width: int, lang: str) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    show(console, result, lang)
    return console.export_text()


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("width", [80, 100])
def test_fits_the_terminal(result, width: int, lang: str):
    assert max(map(cell_len, shown(result, width, lang).splitlines())) <= width


def test_what_if_stands_side_by_side(result):
    lines = shown(result, 100, "en").splitlines()
    at = lines.index("What if")
    assert lines[at + 1].split() == ["now", "seq_len=1024,", "batch=4", "method=full"]
    table = {line.split("  ")[0]: line.split() for line in lines[at + 2 : at + 15]}
    assert table["fits"] == ["fits", "yes", "yes", "no"]
    assert table["length"] == ["length", "2,048", "1,024", "2,048"]
    assert table["base"][-2:] == ["full,", "bf16"]
    assert re.search(r"^gpu=none-such: cannot be planned: unknown GPU", "\n".join(lines), flags=re.MULTILINE)
    assert any(line.startswith("method=full would fit with: QLoRA") for line in lines)


def test_limits(result):
    text = shown(result, 100, "en")
    values = {limit["what"]: limit["value"] for limit in result["limits"]}
    assert f"{values['seq_len']:,} tokens" in text and f"{values['micro_batch']:,} rows of 2,048 tokens" in text
    assert values["model"] in text


def test_explain_says_what_each_saves(result):
    text = shown(result, 100, "en")
    for effect in result["explain"]:
        size = render_techniques.size_text(effect)
        if effect["used"] and size:
            assert re.search(rf"{re.escape(effect['name'])} +{re.escape(size)}", text), effect["name"]
    assert "not in this version" in text and "docs/techniques/" in text


def test_chinese_has_no_english_headings(result):
    text = shown(result, 100, "zh")
    for english, _ in (*render_whatif._WORDS.values(), *render_techniques._WORDS.values()):
        head = english.partition("{")[0].strip()
        if " " in head:
            assert head not in text, head


@pytest.mark.parametrize("table", [render_whatif._WORDS, render_techniques._WORDS], ids=["what-if", "techniques"])
def test_words_are_in_both_languages(table):
    for key, (english, chinese) in table.items():
        assert english and chinese, key
        assert set(re.findall(r"{(\w+)", english)) == set(re.findall(r"{(\w+)", chinese)), key


def test_json_has_what_was_asked(capsys):
    assert main(["plan", MODEL, "--gpu", "rtx3080", "--what-if", "batch=4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["what_if"][0]["changes"] == {"batch": "4"} and printed["what_if"][0]["plan"]["batch"] == 4
    assert "limits" not in printed and "explain" not in printed


@pytest.mark.parametrize(
    ("question", "said"),
    [("colour=red", "cannot ask what if 'colour'"), ("seq", "cannot read --what-if 'seq'"), ("batch=0", "batch = '0'")],
)
def test_bad_question(capsys, question: str, said: str):
    assert main(["plan", MODEL, "--gpu", "rtx3080", "--what-if", question]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err
