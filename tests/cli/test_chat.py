"""`fitune chat`: one question or a conversation, with a stand-in for the model (`tests/train` has the real one)."""

from __future__ import annotations

import io
import json

import pytest

import fitune.train.chat
from fitune.cli import main as cli
from fitune.errors import UserError


class FakeChat:
    """Answers with what it was asked, in capitals; refuses what is long."""

    def __init__(self, run_or_model: str, max_tokens: int):
        self.max_tokens = max_tokens
        self.asked: list[str] = []

    def answer(self, text: str) -> str:
        if len(text) > self.max_tokens:
            raise UserError("this is too long for the model", "it has many tokens", "ask something shorter")
        self.asked.append(text)
        return f"{text.upper()} ({len(self.asked)})"


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(fitune.train.chat, "Chat", FakeChat)


def test_one_question(capsys):
    assert cli.main(["chat", "smollm2", "--prompt", "hello"]) == 0
    assert capsys.readouterr().out == "HELLO (1)\n"


def test_one_question_as_json(capsys):
    assert cli.main(["chat", "smollm2", "--prompt", "显存 hello", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"prompt": "显存 hello", "answer": "显存 HELLO (1)"}


@pytest.mark.parametrize("ending", ["\n", ""])
def test_conversation_until_an_empty_line_or_the_end(ending: str, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n" + ending))
    assert cli.main(["chat", "smollm2"]) == 0
    assert [line for line in capsys.readouterr().out.replace("> ", "").splitlines() if line] == ["ONE (1)", "TWO (2)"]


def test_a_question_that_is_too_long_does_not_end_the_conversation(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("this is too long\nhi\n\n"))
    assert cli.main(["chat", "smollm2", "--max-tokens", "5"]) == 0
    output = capsys.readouterr()
    assert "HI (1)" in output.out
    assert output.err.startswith("error: this is too long for the model\n")


def test_number_of_tokens_is_checked(capsys):
    assert cli.main(["chat", "smollm2", "--max-tokens", "0"]) == 2
    assert capsys.readouterr().err == (
        "error: invalid value for '--max-tokens': 0 is not in the range x>=1\n  fix: see `fitune chat --help`\n"
    )
