"""Which columns are taken for what, rows to conversations, and why a row is left out."""

from __future__ import annotations

import json

import pytest

from fitune.data.conversations import to_conversations
from fitune.data.layouts import recognise
from fitune.data.readers import Table
from fitune.errors import UserError

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
GPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
QA = [("user", "q"), ("assistant", "a")]


def turns(row, columns=None):
    """The one conversation of a one-row table as (role, content), with the layout's name."""
    table = Table([row], "jsonl", path="data.jsonl")
    layout = recognise(table, columns)
    (conversation,), dropped = to_conversations(table, layout)
    assert not dropped
    return layout.name, [(m["role"], m["content"]) for m in conversation.messages]


@pytest.mark.parametrize(
    ("row", "name", "expected"),
    [
        ({"messages": CHAT}, "messages", QA),
        ({"messages": json.dumps(CHAT)}, "messages", QA),
        ({"conversation": CHAT, "id": 3}, "messages", QA),
        ({"dialog_of_ours": CHAT}, "messages", QA),
        ({"conversations": GPT}, "sharegpt", QA),
        ({"system": "s", "conversations": GPT}, "sharegpt", [("system", "s"), *QA]),
        ({"instruction": "q", "output": "a"}, "alpaca", QA),
        ({"instruction": "q", "input": "i", "output": "a"}, "alpaca", [("user", "q\ni"), ("assistant", "a")]),
        (
            {"instruction": "q", "input": "", "output": "a", "system": "s", "history": [["h", "r"]]},
            "alpaca",
            [("system", "s"), ("user", "h"), ("assistant", "r"), *QA],
        ),
        ({"instruction": "q", "context": "i", "response": "a"}, "alpaca", [("user", "q\ni"), ("assistant", "a")]),
        ({"instruction": "q", "instances": [{"input": "", "output": "a"}]}, "alpaca", QA),
        ({"prompt": "q", "completion": "a"}, "prompt-completion", QA),
        ({"Question": "q", "Answer": "a"}, "prompt-completion", QA),
        ({"query": "q", "response": "a"}, "prompt-completion", QA),
        ({"input": "q", "output": "a"}, "prompt-completion", QA),
        ({"question": "q", "answer": 42}, "prompt-completion", [("user", "q"), ("assistant", "42")]),
        ({"问题": "q", "答案": "a"}, "prompt-completion", QA),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "prompt-completion", QA),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference", QA),
        ({"prompt": "q", "chosen": CHAT, "rejected": CHAT}, "preference", QA),
        ({"chosen": CHAT, "rejected": CHAT}, "preference", QA),
        ({"conversations": GPT[:1], "chosen": GPT[1], "rejected": GPT[1]}, "preference", QA),
    ],
)
def test_layouts_recognise_themselves(row, name, expected):
    assert turns(row) == (name, expected)


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        ({"a": "q", "b": "a"}, {"prompt": "a", "response": "b"}, QA),
        ({"a": "q", "b": "a"}, {"question": "a", "answer": "b"}, QA),
        ({"conv": CHAT, "messages": []}, {"messages": "conv"}, QA),
        ({"prompt": CHAT[:1], "extra": {"answer": "a"}}, {"prompt": "prompt", "response": "extra.answer"}, QA),
    ],
)
def test_columns_override(row, columns, expected):
    assert turns(row, columns) == ("columns", expected)


def test_raw_text_layouts():
    for row, columns in (({"text": "t"}, None), ({"story": "t"}, None), ({"prompt": "t", "x": 1}, {"text": "prompt"})):
        table = Table([row], "jsonl")
        (conversation,), _ = to_conversations(table, recognise(table, columns))
        assert conversation.text == "t" and not conversation.messages


def test_the_layout_is_said_in_one_line():
    table = Table([{"instruction": "q", "output": "a"}], "json")
    assert recognise(table).line() == (
        "layout alpaca: prompt from 'instruction', response from 'output' (instruction and output columns)"
    )


BAD = [
    ({"act": "x", "prompt": "q"}, None, "there is no answer column", "--columns prompt=prompt,response=..."),
    ({"id": 1, "completion": "a"}, None, "no column looks like its prompt", "--columns prompt=...,response=completion"),
    ({"prompt": CHAT[:1], "extra": {"answer": "a"}}, None, "messages without an answer", "response=extra.answer"),
    ({"x": "1", "y": "2"}, None, "columns: x, y", "--columns prompt=...,response=..."),
    ({"chosen": "a", "rejected": "b"}, None, "preference data with 'chosen' and no prompt", "--columns text=chosen"),
    ({"q1": "q", "a1": "a"}, {"prompt": "qq1", "response": "a1"}, "columns: q1, a1", "did you mean q1?"),
    ({"q1": "q", "a1": "a"}, {"promt": "q1"}, "", "did you mean prompt?"),
    ({"q1": "q", "a1": "a"}, {"prompt": "q1"}, "it maps prompt", "give prompt and response"),
    ({"q1": "q", "a1": "a"}, {"text": "q1", "response": "a1"}, "it maps", "give text alone"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "columns", "why", "fix"), BAD)
def test_what_cannot_be_recognised_is_answered_with_what_to_write(row, columns, why, fix):
    with pytest.raises(UserError) as error:
        recognise(Table([row], "jsonl", path="data.jsonl"), columns)
    assert why in error.value.why and fix in error.value.fix and error.value.exit_code == 2


def parts(*contents):
    return [{"role": "user", "content": list(contents)}, CHAT[1]]


DROPPED = [
    ({"messages": CHAT[:1]}, "no assistant message"),
    ({"messages": []}, "no messages"),
    ({"messages": [CHAT[0], {"role": "assistant", "content": " "}]}, "empty answer"),
    ({"messages": [{"role": "narrator", "content": "x"}, CHAT[1]]}, "unknown role 'narrator'"),
    ({"messages": parts({"type": "image", "image": "u"}, {"type": "text", "text": "t"})}, "holds image content"),
    ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, "weight is 0.5"),
    ({"messages": [CHAT[0], {**CHAT[1], "loss": False}]}, "every answer is marked as not trained on"),
    ({"messages": [{**CHAT[0], "loss": True}, CHAT[1]]}, "loss is set on a user message"),
    ({"messages": [CHAT[0], {"role": "assistant", "content": "half \ud83d"}]}, "holds half a character"),
    ({"messages": [CHAT[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "has no function name"),
    ({"messages": CHAT, "tools": "[{"}, "tools is not valid JSON"),
    ({"conversations": [GPT[0], {"from": "function_call", "value": "f(x)"}]}, "function_call is not valid JSON"),
]


@pytest.mark.parametrize(("row", "reason"), DROPPED)
def test_rows_that_cannot_be_trained_are_dropped_with_the_reason(row, reason):
    good = {"messages": CHAT, "conversations": GPT}
    table = Table([{key: good.get(key) for key in row}, row], "jsonl")
    conversations, (dropped,) = to_conversations(table, recognise(table))
    assert len(conversations) == 1 and dropped.row == 1 and reason in dropped.reason


def test_text_parts_are_joined_and_an_unanswered_end_is_cut_off():
    row = {"messages": [*parts({"type": "text", "text": "a"}, "b"), CHAT[0]]}
    assert turns(row) == ("messages", [("user", "ab"), ("assistant", "a")])


def test_tools_and_calls_take_one_form():
    tools = [{"name": "f", "description": "d", "parameters": {"type": "object", "required": None}}]
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}
    row = {"conversations": [GPT[0], call, {"from": "observation", "value": "7"}, GPT[1]], "tools": json.dumps(tools)}
    table = Table([row], "json")
    (conversation,), _ = to_conversations(table, recognise(table))
    assert conversation.tools == (
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
    )
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    expected = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert conversation.messages[1]["tool_calls"] == expected
    openai = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
    }
    table = Table([{"messages": [CHAT[0], openai]}], "json")
    (conversation,), _ = to_conversations(table, recognise(table))
    assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": expected}
