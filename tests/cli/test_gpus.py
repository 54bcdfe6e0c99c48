"""`fitune gpus MODEL`: the answer at 80 and 100 columns in both languages, its JSON twin, and one clear message for a
bad request."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from fitune import recipe as recipes
from fitune.catalog import gpus
from fitune.cli import render_gpus, words_gpus
from fitune.cli.main import main
from fitune.cli.words import Words
from fitune.planner import advise
from fitune.planner.sentences import translated

MODEL = "meta-llama/Llama-3.1-8B"


CARDS = ("rtx4090", "rtx3090", "t4", "h100-sxm", "h100-nvl", "a100-sxm4-80gb", "a100-pcie-80gb", "a100-sxm4-40gb",
         "a10", "v100-sxm2-32gb", "mi300x", "h100-pcie", "ascend-910b2")  # fmt: skip


@pytest.fixture(scope="module")
def answer():
    cards = [gpus.find(name)[0] for name in CARDS]
    return advise.advise(recipes.build({"model": MODEL}), tokens=20e6, max_cost=2.0, max_hours=3.0, among=cards)


def shown(answer, width: int, lang: str = "en", top: int = 10) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    render_gpus.show_advice(console, answer, lang, top)
    return console.export_text().splitlines()


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("width", [80, 100])
def test_tables_fit_the_terminal(answer, width: int, lang: str):
    lines = shown(answer, width, lang)
    assert max(map(cell_len, lines)) <= width
    for line in lines:  # a wrapped table would leave a lone figure on a line
        assert not re.fullmatch(r"\s*[$~]?[\d,.]+\??\s*", line), line


def test_text_says_what_was_found(answer):
    text = "\n".join(shown(answer, 110))
    best = answer.cards[0]
    assert text.startswith(f"Which GPU for {MODEL}, LoRA r=16\n20 M tokens, 1 epoch, 1,221 steps of 8 records")
    assert f"{answer.num_within} of {len(answer.cards)} choices keep to them" in text
    assert f"{best.step.tokens_per_s:,.0f}" in text and f"${best.best.lowest:.2f}" in text
    assert "Cheapest to rent" in text and "Fastest to rent" in text
    assert "Prices: fitune's table, 2026-11-30, in USD" in text
    assert "Ascend 910B2" in text
    assert ("Too small (it needs at least" in text) == bool(answer.too_small)


def test_providers_keep_to_the_limit(answer):
    for _, rental in render_gpus.best_of_providers(answer.within, 2.0):
        assert rental.lowest <= 2.0
    names = [rental.offer.provider for _, rental in render_gpus.best_of_providers(answer.cards)]
    assert len(names) == len(set(names)) >= 12


def test_doubtful_prices_carry_a_question_mark(answer):
    anything = dataclasses.replace(answer, limits={"max_cost": None, "max_hours": None}, num_within=len(answer.cards))
    lines = shown(anything, 110)
    azure = next(line for line in lines if line.startswith("Azure"))
    assert re.search(r"\$[\d.]+\?", azure) and azure.endswith("recalled")
    vast = next(line for line in lines if line.startswith("Vast.ai"))
    assert "?" not in vast and vast.endswith("read 2026")


def test_every_word_is_in_both_languages():
    for key, (english, chinese) in words_gpus.GPUS.items():
        assert english and chinese, key
        assert set(re.findall(r"{(\w+)", english)) == set(re.findall(r"{(\w+)", chinese)), key
        assert not re.search(r"[\u4e00-\u9fff]", english), key


def test_notes_of_cards_are_translated(answer):
    few = advise.advise(recipes.build({"model": MODEL, "batch": 2}), tokens=1e6, among=[gpus.find("h100")[0]])
    notes = {note for card in (*answer.cards, *few.cards) for note in card.notes}
    assert len(notes) >= 6
    for note in notes:
        assert re.search(r"[\u4e00-\u9fff]", translated(note, "zh")), note


def test_amounts_and_times_read_well(answer):
    words = Words("en", words_gpus.GPUS)
    assert [render_gpus.span(h, words) for h in (0.001, 0.5, 0.99, 1.0, 2.34, 31, 80)] == [
        "<1 min", "30 min", "59 min", "1.0 h", "2.3 h", "31 h", "3.3 days",
    ]  # fmt: skip
    amounts = [render_gpus.money(amount, answer) for amount in (0.001, 0.05, 12.345, 1234.5)]
    assert amounts == ["<$0.01", "$0.05", "$12.35", "$1,234"]
    assert render_gpus.long_span(18375.7, words) == "18,400 h"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_json_is_the_same_answer(capsys, answer):
    asked = ["--tokens", "20M", "--max-cost", "2", "--max-hours", "3", "--among", ",".join(CARDS)]
    assert main(["gpus", MODEL, *asked, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(answer.as_dict()))


def test_exit_code_3_where_nothing_keeps_to_the_limits(capsys):
    assert main(["gpus", MODEL, "--tokens", "500B", "--max-hours", "0.1", "--among", "t4,3090"]) == 3
    assert "Nothing keeps to the limits. The nearest:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([MODEL, "--batch", "0"], "greater than or equal to 1"),
        ([MODEL, "--max-cost", "-3"], "--max-cost -3 is no limit"),
        ([MODEL, "--max-hours", "0"], "--max-hours 0 is no limit"),
        ([MODEL, "--max-cost", "nan"], "is no limit"),
        ([MODEL, "--max-cost", "cheap"], "not a valid float"),
        ([MODEL, "--tokens", "-5"], "cannot read --tokens '-5'"),
        ([MODEL, "--tokens", "many"], "cannot read --tokens 'many'"),
        ([MODEL, "--tokens", "0"], "--tokens 0 is no job"),
        ([MODEL, "--tokens", "1M", "--data", "demo"], "--tokens and --data contradict each other"),
        ([MODEL, "--top", "0"], "--top 0 shows nothing"),
        (["gpt2", "--seq-len", "4096"], "it has 1024 learned positions"),
        (["llamma-3.1-8b"], "no GPU and no model is called 'llamma-3.1-8b'"),
        (["rtx3080", "--tokens", "1M"], "unknown model 'rtx3080'"),
        (["--max-cost", "3"], "--max-cost needs a model"),
        ([MODEL, "--method", "full", "--base-format", "nf4"], "full fine-tuning trains every weight"),
        ([MODEL, "--data", "none.jsonl"], "cannot find the data file"),
        ([MODEL, "--prices", "none.csv"], "no price table at none.csv"),
        ([MODEL, "--gpu", "rtx3080"], "no such option --gpu"),
        ([MODEL, "--among", "rtx9999"], "unknown GPU 'rtx9999'"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_request_gets_one_message(capsys, arguments: list[str], said: str):
    assert main(["gpus", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and said in printed.err
    assert printed.err.count("\n") <= 4


def test_broken_price_file_names_the_line(capsys, tmp_path: Path):
    path = tmp_path / "prices.csv"
    path.write_text("gpu,usd_per_hour\n4090,0.5\nrtx9999,1\n", encoding="utf-8")
    assert main(["gpus", MODEL, "--prices", str(path)]) == 2
    assert "line 3\n  why: unknown GPU 'rtx9999'" in capsys.readouterr().err


def test_name_of_a_card_still_shows_the_card(capsys):
    assert main(["gpus", "rtx3080"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "GeForce RTX 3080 10GB"
