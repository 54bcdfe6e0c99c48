"""Rows to conversations in one form (OpenAI messages), or a reason why a row cannot be trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fitune.data.layouts import Layout, as_messages, value_at
from fitune.data.readers import Table

Message = dict[str, Any]

_ROLES = {
    "user": ("user", "human", "prompter", "question"),
    "assistant": ("assistant", "gpt", "bot", "model", "chatgpt", "ai", "bing", "bard"),
    "system": ("system", "developer"),
    "tool": ("tool", "observation", "function", "function_response", "tool_response", "ipython"),
    "call": ("function_call", "tool_call"),
}
_ROLE_OF = {alias: role for role, aliases in _ROLES.items() for alias in aliases}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_LOSS_FLAGS = ("loss", "weight", "train")


@dataclass(frozen=True)
class Conversation:
    """One record before the chat template.

    Attributes:
        messages: OpenAI messages: ``role`` (system, user, assistant, tool), ``content`` (str), and where given
            ``tool_calls`` (arguments as objects), ``reasoning_content``, ``name``, ``tool_call_id``, and
            ``loss`` (False: not trained on).
        tools: tool schemas ``{"type": "function", "function": {...}}``, or None.
        source_row: the row of the table, from 0.
        text: the document when it is raw text (then there are no messages).
        language: the row's language column, if any.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None
    source_row: int
    text: str | None = None
    language: str | None = None


@dataclass(frozen=True)
class Dropped:
    """A row that cannot be trained, and why."""

    row: int
    reason: str


class _Unusable(Exception):
    """Why one row cannot be trained."""


def to_conversations(table: Table, layout: Layout) -> tuple[list[Conversation], list[Dropped]]:
    """Every row as a conversation or as dropped with its reason; nothing disappears between the two."""
    conversations: list[Conversation] = []
    dropped: list[Dropped] = []
    for number, row in enumerate(table.rows):
        try:
            instances = _instances(row, layout)
            conversations.extend(_conversation(number, cells, layout) for cells in instances)
        except _Unusable as error:
            dropped.append(Dropped(number, str(error)))
    return conversations, dropped


def _instances(row: Mapping[str, Any], layout: Layout) -> list[Mapping[str, Any]]:
    """The row itself, or one merged row per nested instance."""
    if layout.nested is None:
        return [row]
    nested = row.get(layout.nested)
    if not isinstance(nested, list) or not nested or not all(isinstance(i, Mapping) for i in nested):
        raise _Unusable(f"{layout.nested} is empty or not a list of objects")
    return [{**row, **instance} for instance in nested]


def _conversation(number: int, row: Mapping[str, Any], layout: Layout) -> Conversation:
    cells = {part: value_at(row, column) for part, column in layout.mapping.items()}
    language = cells.get("language") if isinstance(cells.get("language"), str) else None
    if "text" in layout.mapping:
        text = _text(cells["text"], "text")
        if not text.strip():
            raise _Unusable("empty text")
        return Conversation((), None, number, text=_whole_unicode(text), language=language)
    raw = _from_messages(cells) if "messages" in layout.mapping else _from_pair(cells)
    system = _text(cells.get("system"), "system")
    if system.strip() and not (raw and _role(raw[0]) == "system"):
        raw = [{"role": "system", "content": system}, *raw]
    messages = _normalise(raw)
    _check_trainable(messages)
    return Conversation(tuple(messages), _tools(cells.get("tools")), number, language=language)


def _from_messages(cells: Mapping[str, Any]) -> list[Message]:
    messages = as_messages(cells["messages"])
    if messages is None:
        raise _Unusable("no messages" if not cells["messages"] else "messages is not a list of {role, content}")
    return messages + _answer(cells["response"]) if "response" in cells else messages


def _from_pair(cells: Mapping[str, Any]) -> list[Message]:
    messages: list[Message] = []
    for turn in _history(cells.get("history")):
        messages += turn
    prompt_messages = as_messages(cells["prompt"])
    if prompt_messages is not None:
        messages += prompt_messages
        extra = _text(cells.get("input"), "input")
    else:
        prompt, extra = _text(cells["prompt"], "prompt"), _text(cells.get("input"), "input")
        prompt, extra = (prompt, extra) if extra.strip() else (prompt, "")
        content = f"{prompt}\n{extra}" if prompt.strip() and extra else prompt + extra
        if not content.strip():
            raise _Unusable("empty prompt")
        messages.append({"role": "user", "content": content})
        extra = ""
    if extra:
        messages.append({"role": "user", "content": extra})
    return messages + _answer(cells["response"])


def _history(value: Any) -> list[list[Message]]:
    if value in (None, "", []):
        return []
    messages = as_messages(value)
    if messages is not None:
        return [messages]
    if isinstance(value, list) and all(isinstance(p, (list, tuple)) and len(p) == 2 for p in value):
        return [
            [{"role": "user", "content": _text(q, "history")}, {"role": "assistant", "content": _text(a, "history")}]
            for q, a in value
        ]
    raise _Unusable("history is not a list of [question, answer] pairs")


def _answer(value: Any) -> list[Message]:
    """The answer as messages: a string, one message, or a list of them (the part after the last user turn)."""
    messages = as_messages(value)
    if messages is not None:
        users = [i for i, m in enumerate(messages) if _role(m) in ("user", "system")]
        return messages[users[-1] + 1 :] if users else messages
    if isinstance(value, Mapping):
        return [{"role": "assistant", **value}] if "from" not in value else [dict(value)]
    return [{"role": "assistant", "content": _text(value, "answer")}]


def _role(message: Mapping[str, Any]) -> str:
    name = str(message.get("role", message.get("from"))).strip().lower()
    if name not in _ROLE_OF:
        raise _Unusable(f"unknown role {name!r}")
    return _ROLE_OF[name]


def _normalise(raw: list[Message]) -> list[Message]:
    """Roles, contents, calls, reasoning and loss flags in one spelling; what follows the last answer is cut off."""
    messages: list[Message] = []
    for message in raw:
        role = _role(message)
        content = message.get("content", message.get("value", message.get("text")))
        if role == "call":
            calls = _parsed(content, "function_call")
            clean: Message = {"role": "assistant", "content": "", "tool_calls": _calls(calls)}
        else:
            clean = {"role": role, "content": _whole_unicode(_content(content))}
            calls = message.get("tool_calls") or message.get("function_call")
            if role == "assistant" and calls:
                clean["tool_calls"] = _calls(_parsed(calls, "tool_calls"))
        reasoning = next((message[k] for k in _REASONING_KEYS if message.get(k)), None)
        if role == "assistant" and reasoning:
            clean["reasoning_content"] = _whole_unicode(_text(reasoning, "reasoning"))
        clean |= {k: message[k] for k in ("name", "tool_call_id") if isinstance(message.get(k), str)}
        if not _loss_flag(message, role):
            clean["loss"] = False
        messages.append(clean)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return messages


def _loss_flag(message: Mapping[str, Any], role: str) -> bool:
    """False when the message says that it is not to be trained on."""
    for flag in _LOSS_FLAGS:
        value = message.get(flag)
        if value is None:
            continue
        if value not in (0, 1):
            raise _Unusable(f"{flag} is {value!r}; only 0, 1, true and false are supported")
        if role not in ("assistant", "call"):
            if flag != "weight" and value:
                raise _Unusable(f"{flag} is set on a {role} message; the loss counts answers only")
            continue
        return bool(value)
    return True


def _content(value: Any) -> str:
    """A string, or the text parts of a list joined as they stand."""
    if not isinstance(value, list):
        return _text(value, "content")
    texts = []
    for part in value:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
            texts.append(part["text"])
        else:
            kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
            raise _Unusable(f"holds {kind} content (fitune trains on text only)")
    return "".join(texts)


def _text(value: Any, what: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    raise _Unusable(f"{what} is a {'list' if isinstance(value, list) else 'nested object'}, not text")


def _whole_unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _Unusable("holds half a character (a lone surrogate such as \\ud83d)") from None
    return text


def _parsed(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise _Unusable(f"{what} is not valid JSON") from None


def _calls(value: Any) -> list[dict[str, Any]]:
    """Tool calls in the form chat templates expect: arguments are objects, not JSON in a string."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _Unusable("a tool call has no function name")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _parsed(arguments or "{}", "arguments of a tool call")
        clean = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append(({"id": call["id"]} if isinstance(call.get("id"), str) else {}) | clean)
    return calls


def _tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    if isinstance(value, str):
        value = _parsed(value, "tools") if value.strip() else None
    if not value:
        return None
    tools = []
    for tool in value if isinstance(value, list) else [value]:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _Unusable("a tool has no name")
        tools.append({"type": "function", "function": _without_none(function)})
    return tuple(tools)


def _without_none(value: Any) -> Any:
    """Parquet and Arrow fill the keys that other rows have with None; a schema means the same without them."""
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


def _check_trainable(messages: list[Message]) -> None:
    """Raise when no assistant message has anything to learn; empty answers among others are not trained on."""
    answers = [m for m in messages if m["role"] == "assistant"]
    if not answers:
        raise _Unusable("no assistant message")
    filled = False
    for message in answers:
        if message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content", "").strip():
            filled = True
        else:
            message["loss"] = False
    if not filled:
        raise _Unusable("empty answer")
    if all(m.get("loss") is False for m in answers):
        raise _Unusable("every answer is marked as not trained on")
