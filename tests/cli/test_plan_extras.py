"""`fitune plan --what-if`, `--limits` and `--explain`, in both languages."""

from __future__ import annotations

import json
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from fitune.catalog import gpus
from fitune.cli import api, render_techniques, render_whatif
from fitune.cli.main import main
from fitune.cli.plan_extras import answer, show

MODEL = "meta-llama/Llama-3.1-8B"
SETTINGS = {"gpu": "rtx3080"}


@pytest.fixture(scope="module")
def result():
    questions = ("seq=1024,batch=4", "method=full", "gpu=none-such")
    recipe, machine, planned = api.planned(MODEL, SETTINGS)
    told = planned.as_dict()
    return told | answer(recipe, machine, told["plan"], explain=True, what_if=questions, limits=True)


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
    assert re.search(r"ZeRO stage 2 \(on 2 GPUs\) .*--parallel zero2", text) and "ZeRO stage 3" not in text
    assert "by itself, where it helps" in text and "docs/techniques/" in text


def test_chinese_has_no_english_headings(result):
    text = shown(result, 100, "zh")
    for english, _ in (*render_whatif.WHAT_IF.values(), *render_techniques.TECHNIQUES.values()):
        head = english.partition("{")[0].strip()
        if " " in head:
            assert head not in text, head


@pytest.mark.parametrize("table", [render_whatif.WHAT_IF, render_techniques.TECHNIQUES], ids=["what-if", "techniques"])
def test_words_are_in_both_languages(table):
    for key, (english, chinese) in table.items():
        assert english and chinese, key
        assert set(re.findall(r"{(\w+)", english)) == set(re.findall(r"{(\w+)", chinese)), key


def test_json_has_what_was_asked(capsys):
    assert main(["plan", MODEL, "--gpu", "rtx3080", "--what-if", "batch=4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["what_if"][0]["changes"] == {"batch": "4"} and printed["what_if"][0]["plan"]["batch"] == 4
    assert "limits" not in printed and "explain" not in printed


def test_the_plan_that_is_shown_is_explained_on_one_machine(monkeypatch):
    from fitune import hardware
    from fitune.planner import effects

    probed, explained = [], []
    here = hardware.virtual(gpus.find("rtx3080")[0])
    monkeypatch.setattr(hardware, "probe", lambda: probed.append(1) or here)
    monkeypatch.setattr(effects, "effects", lambda context, plan: explained.append((context.machine, plan)) or [])
    recipe, machine, planned = api.planned(MODEL, {})
    asked = answer(recipe, machine, planned.as_dict()["plan"], explain=True, what_if=["batch=4"])
    assert probed == [1] and asked["what_if"][0]["plan"]["device_name"] == here.devices[0].name
    assert explained == [(here, planned.plan)]


@pytest.mark.parametrize(
    ("question", "said"),
    [("colour=red", "cannot ask what if 'colour'"), ("seq", "cannot read --what-if 'seq'"), ("batch=0", "batch = '0'")],
)
def test_bad_question(capsys, question: str, said: str):
    assert main(["plan", MODEL, "--gpu", "rtx3080", "--what-if", question]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err
