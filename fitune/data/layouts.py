"""Which columns hold the prompt, the answer, the messages or the text: recognised from the rows, or as told.

A layout is a mapping from *parts* (``messages tools system prompt input history response text language``) to columns.
What a column holds decides together with its name, so that ``prompt`` may be a string or a list of messages.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fitune.data.readers import Table
from fitune.errors import UserError

PARTS = ("messages", "tools", "system", "prompt", "input", "history", "response", "text", "language")
PART_ALIASES = {
    "conversations": "messages",
    "conversation": "messages",
    "question": "prompt",
    "query": "prompt",
    "instruction": "prompt",
    "answer": "response",
    "completion": "response",
    "output": "response",
    "chosen": "response",
    "context": "input",
}

_MESSAGES = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "turns")
_PROMPTS: tuple[str, ...] = ("prompt", "question", "query", "instruction", "problem", "user", "request", "input")
_PROMPTS += ("问题", "提问", "指令", "输入")
_INPUTS = ("input", "context", "输入")
_RESPONSES: tuple[str, ...] = ("response", "completion", "answer", "output", "reply", "assistant", "solution", "target")
_RESPONSES += ("回答", "答案", "输出", "回复")
_TEXTS = ("text", "content", "document", "body", "文本", "内容")
_SYSTEMS = ("system", "system_prompt")
_ANSWER_LIKE = (*_RESPONSES, "ground_truth", "gold", "label")
_PROFILED_ROWS = 200


@dataclass(frozen=True)
class Layout:
    """What the columns mean.

    Attributes:
        name: ``messages sharegpt alpaca prompt-completion preference text``, or ``columns`` when the person said.
        mapping: part -> column; a dot reaches into nested objects (``extra_info.answer``).
        reason: why, in words.
        nested: the column that holds a list of {input, output} below an instruction (self-instruct's ``instances``).
    """

    name: str
    mapping: Mapping[str, str]
    reason: str
    nested: str | None = None

    def line(self) -> str:
        """``layout alpaca: prompt from 'instruction', response from 'output' (...)``."""
        parts = [part if part == column else f"{part} from {column!r}" for part, column in self.mapping.items()]
        return f"layout {self.name}: {', '.join(parts)} ({self.reason})"


def recognise(table: Table, columns: Mapping[str, str] | None = None) -> Layout:
    """The layout of a table.

    Args:
        table: the rows as read.
        columns: the person's own mapping, part -> column (names such as ``question`` are taken for their part).

    Raises:
        UserError: a named column does not exist, or no column can be the answer (what there is, and what to write).
    """
    if columns:
        return _as_told(table, columns)
    kinds = _profile(table)
    for find in (_preference, _messages, _alpaca_nested, _pair, _text, _two_columns):
        layout = find(table, kinds)
        if layout is not None:
            return layout
    raise _unrecognised(table, kinds)


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """A cell; ``a.b`` reaches into nested objects unless a column has that very name. None when absent."""
    if column in row:
        return row[column]
    value: Any = row
    for key in column.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def as_messages(value: Any) -> list[dict[str, Any]] | None:
    """A list of messages (also as a JSON string), or None when the value is something else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return None
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(m, Mapping) and ("role" in m or "from" in m) for m in value):
        return [dict(m) for m in value]
    return None


def _profile(table: Table) -> dict[str, str]:
    """Column -> what its first filled cell holds: ``text messages list dict number empty``."""
    kinds: dict[str, str] = dict.fromkeys(table.columns, "empty")
    for row in table.rows[:_PROFILED_ROWS]:
        for name, value in row.items():
            if kinds[name] == "empty" and value not in (None, "", []):
                kinds[name] = _kind(value)
    return kinds


def _kind(value: Any) -> str:
    if as_messages(value) is not None:
        return "messages"
    if isinstance(value, Mapping):
        is_message = ("content" in value or "value" in value) and ("role" in value or "from" in value)
        return "message" if is_message else "dict"
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list) else "number"


def _named(kinds: Mapping[str, str], names: tuple[str, ...], *allowed: str) -> str | None:
    """The first column with one of the names (any case, best name first) that holds something allowed."""
    by_lower = {column.strip().lower(): column for column in kinds}
    for name in names:
        column = by_lower.get(name)
        if column is not None and kinds[column] in allowed:
            return column
    return None


def _extras(kinds: Mapping[str, str]) -> dict[str, str]:
    """Columns that accompany any chat layout."""
    found = {
        "system": _named(kinds, _SYSTEMS, "text"),
        "tools": _named(kinds, ("tools", "functions"), "text", "list"),
        "history": _named(kinds, ("history",), "list", "messages"),
        "language": _named(kinds, ("language", "lang"), "text"),
    }
    return {part: column for part, column in found.items() if column is not None}


def _preference(table: Table, kinds: dict[str, str]) -> Layout | None:
    chosen = _named(kinds, ("chosen",), "text", "message", "messages")
    if chosen is None or _named(kinds, ("rejected",), *set(kinds.values())) is None:
        return None
    reason = "preference data: trained on the chosen answers, the rejected ones are left out"
    extras = _extras(kinds)
    before = _named(kinds, _MESSAGES, "messages")
    if before is not None:
        return Layout("preference", {"messages": before, "response": chosen, **extras}, reason)
    prompt = _named(kinds, _PROMPTS, "text", "messages")
    if prompt is not None:
        return Layout("preference", {"prompt": prompt, "response": chosen, **extras}, reason)
    if kinds[chosen] == "messages":
        return Layout("preference", {"messages": chosen, **extras}, reason)
    raise UserError(
        f"cannot tell prompts from answers in {table.path}",
        f"it is preference data with {chosen!r} and no prompt column (columns: {_list(kinds)})",
        f"name the prompt: --columns prompt=...,response={chosen}; or train on the whole text: --columns text={chosen}",
    )


def _messages(table: Table, kinds: dict[str, str]) -> Layout | None:
    column = _named(kinds, _MESSAGES, "messages")
    if column is None:
        lists = [c for c, kind in kinds.items() if kind == "messages" and c.lower() not in _PROMPTS + _RESPONSES]
        column = lists[0] if len(lists) == 1 else None
    if column is None:
        return None
    first = next(m for row in table.rows if (m := as_messages(row.get(column))))[0]
    extras = _extras(kinds)
    extras.pop("history", None)
    if "from" in first:
        return Layout("sharegpt", {"messages": column, **extras}, "turns of {from, value}")
    return Layout("messages", {"messages": column, **extras}, "messages of {role, content}")


def _alpaca_nested(table: Table, kinds: dict[str, str]) -> Layout | None:
    instruction, instances = _named(kinds, ("instruction",), "text"), _named(kinds, ("instances",), "list")
    if instruction is None or instances is None:
        return None
    inside: list[Any] = next((v for row in table.rows if (v := row.get(instances))), [])
    if not inside or not isinstance(inside[0], Mapping):
        return None
    kinds_inside = {str(k): _kind(v) if v != "" else "text" for k, v in inside[0].items()}
    response, extra = _named(kinds_inside, _RESPONSES, "text"), _named(kinds_inside, _INPUTS, "text")
    if response is None:
        return None
    mapping = {"prompt": instruction, **({"input": extra} if extra else {}), "response": response, **_extras(kinds)}
    return Layout("alpaca", mapping, f"input and output stand inside {instances!r}; one record each", nested=instances)


def _pair(table: Table, kinds: dict[str, str]) -> Layout | None:
    prompt = _named(kinds, _PROMPTS, "text", "messages", "number")
    others = {c: k for c, k in kinds.items() if c != prompt}
    response = _named(others, _RESPONSES, "text", "message", "messages", "number") or _named(
        others, _RESPONSES, "empty"
    )
    if prompt is None or response is None:
        return None
    mapping = {"prompt": prompt, "response": response}
    extra = _named({c: k for c, k in others.items() if c != response}, _INPUTS, "text", "empty")
    if extra is not None:
        mapping = {"prompt": prompt, "input": extra, "response": response}
    mapping |= _extras(kinds)
    if prompt.strip().lower() == "instruction":
        return Layout("alpaca", mapping, "instruction and output columns")
    return Layout("prompt-completion", mapping, f"{prompt!r} is answered by {response!r}")


def _text(table: Table, kinds: dict[str, str]) -> Layout | None:
    column = _named(kinds, _TEXTS, "text")
    if column is None:
        texts = [c for c, kind in kinds.items() if kind == "text"]
        known = _named(kinds, _PROMPTS + _RESPONSES, *set(kinds.values()))
        if len(kinds) > 1 or len(texts) != 1 or known is not None:
            return None
        column = texts[0]
    mapping = {"text": column} | {k: v for k, v in _extras(kinds).items() if k == "language"}
    return Layout("text", mapping, "raw text: the loss counts every token")


def _two_columns(table: Table, kinds: dict[str, str]) -> Layout | None:
    columns = list(kinds)
    if table.has_header or len(columns) != 2 or any(kinds[c] != "text" for c in columns):
        return None
    reason = "two columns without a header: the first is taken for the prompt, the second for the answer"
    return Layout("prompt-completion", {"prompt": columns[0], "response": columns[1]}, reason)


def _unrecognised(table: Table, kinds: dict[str, str]) -> UserError:
    """The error for a table without an answer (or without a prompt), with the mapping a person would write."""
    prompt = _named(kinds, _PROMPTS, "text", "messages")
    response = _named(kinds, _RESPONSES, "text")
    have = f"columns: {_list(kinds)}"
    if response is not None and prompt is None:
        return UserError(
            f"cannot tell prompts from answers in {table.path}",
            f"{response!r} looks like the answer, and no column looks like its prompt ({have})",
            f"name it: --columns prompt=...,response={response}; or train on the whole text: --columns text={response}",
        )
    if prompt is not None:
        shape = "a list of messages without an answer" if kinds[prompt] == "messages" else "a prompt"
        nested = _nested_answer(table, kinds)
        hint = f"{nested} may be the answer: --columns prompt={prompt},response={nested}" if nested else ""
        if not hint:
            hint = f"name the answer: --columns prompt={prompt},response=..."
        text = f"; to train on the prompts as plain text: --columns text={prompt}" if kinds[prompt] == "text" else ""
        why = f"{prompt!r} holds {shape}, and there is no answer column ({have})"
        return UserError(f"nothing to learn from in {table.path}", why, hint + text)
    return UserError(
        f"cannot recognise the columns of {table.path}",
        have,
        "say what they are: --columns prompt=...,response=... or messages=... or text=...",
    )


def _nested_answer(table: Table, kinds: dict[str, str]) -> str | None:
    """``extra_info.answer``: a text inside a nested column that is called like an answer."""
    found = []
    for column in (c for c, kind in kinds.items() if kind == "dict"):
        inside: Mapping[str, Any] = next((v for row in table.rows if isinstance(v := row.get(column), Mapping)), {})
        found += [(k, f"{column}.{k}") for k, v in inside.items() if k.lower() in _ANSWER_LIKE and isinstance(v, str)]
    return min(found, key=lambda pair: _ANSWER_LIKE.index(pair[0].lower()))[1] if found else None


def _as_told(table: Table, columns: Mapping[str, str]) -> Layout:
    """The person's mapping, checked against the columns there are."""
    mapping: dict[str, str] = {}
    for key, column in columns.items():
        part = PART_ALIASES.get(key, key)
        if part not in PARTS:
            near = difflib.get_close_matches(key, [*PARTS, *PART_ALIASES], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"--columns cannot map {key!r}", "", f"{hint}it knows {', '.join(PARTS)}")
        if part in mapping:
            raise UserError(f"--columns maps {part} twice", f"to {mapping[part]!r} and {column!r}", "keep one of them")
        _check_column(table, column)
        mapping[part] = str(column)
    have = set(mapping)
    if "text" in have and have - {"text", "language"}:
        raise UserError("--columns mixes text with other parts", f"it maps {_list(mapping)}", "give text alone")
    if not (have & {"text", "messages"} or {"prompt", "response"} <= have):
        missing = "response" if "prompt" in have else "prompt" if "response" in have else "prompt and response"
        raise UserError(
            f"--columns lacks {missing}", f"it maps {_list(mapping)}", "give prompt and response, or messages, or text"
        )
    if {"messages", "prompt"} <= have:
        raise UserError("--columns maps both messages and prompt", "", "give one of them")
    return Layout("columns", mapping, "as --columns says")


def _check_column(table: Table, column: str) -> None:
    if any(value_at(row, str(column)) is not None for row in table.rows):
        return
    names = table.columns
    near = difflib.get_close_matches(str(column), names, n=1)
    if column in names:
        raise UserError(f"the column {column!r} of {table.path} is empty", f"columns: {_list(names)}", "name another")
    fix = f"did you mean {near[0]}?" if near else "name one of them"
    raise UserError(f"{table.path} has no column {column!r}", f"columns: {_list(names)}", fix)


def _list(names: Any) -> str:
    names = list(names)
    return ", ".join(map(str, names[:20])) + (" ..." if len(names) > 20 else "")
