"""The chat template: which one is used and why, what it can render, and how a conversation is adapted to it.

The tokenizer's own template is used when it has one. What it cannot render (a system message, two user turns in a
row, tools, reasoning) is found by trying, once, and then written in a form that it can; every such change is counted.
"""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fitune.data import limits
from fitune.data.conversations import Conversation, Message
from fitune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCTION = (
    "BOS{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}"
    "{% else %}{{ '### Instruction:\n' + message['content'] + '\n\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)

# Sentinels: words no template writes by itself, so that finding one in the rendered text means that it was rendered.
_SYSTEM, _USER, _ANSWER, _REASON, _TOOL, _RESULT = "zqsysqz", "zqusrqz", "zqansqz", "zqrsnqz", "zqtoolqz", "zqresqz"
_TODAY = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>[^'"]*)(?P=quote)\s*\)""")
# What a template adds of its own (system prompts, tool instructions) and how often it may write what it is given.
_OWN_CHARACTERS, _MOST_COPIES = 1 << 20, 64
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class CannotRender(Exception):
    """The chat template refuses one conversation; the text says why."""


@dataclass(frozen=True)
class TemplateChoice:
    """The chat template in use, and what it can render.

    Attributes:
        name: ``own``, ``chatml`` or ``instruction``.
        reason: why, in words.
        template: the Jinja text when it is not the tokenizer's own; save it with the adapter's tokenizer.
        system: renders system messages.
        consecutive: accepts two messages of one role in a row.
        tools: renders tool schemas, calls and results.
        reasoning_key: the message key under which it renders reasoning, or None.
        date: what a template that writes today's date writes, so that a resumed run reads the same tokens.
        dated: the Jinja text with that date in place of the call, for rendering only.
    """

    name: str
    reason: str
    template: str | None = None
    system: bool = True
    consecutive: bool = True
    tools: bool = False
    reasoning_key: str | None = None
    date: datetime.date | None = None
    dated: str | None = None

    def line(self) -> str:
        """One line for people."""
        return f"chat template {self.name}: {self.reason}"

    def render(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: list[Message],
        tools: tuple[dict[str, Any], ...] | None = None,
        *,
        prompt: bool = False,
    ) -> str:
        """The text of adapted messages; with ``prompt`` it ends where the model is to answer.

        Raises:
            CannotRender: the template raises (its own words), or fails on the messages' shape.
            UserError: it takes time or memory without end.
        """
        import jinja2

        shown = [{k: v for k, v in message.items() if k != "loss"} for message in messages]
        try:
            with limits.bounded(limits.RENDER_CPU_S, limits.RENDER_BYTES):
                text: str = tokenizer.apply_chat_template(
                    shown,
                    tools=list(tools) if tools else None,
                    chat_template=self.dated or self.template,
                    add_generation_prompt=prompt,
                    tokenize=False,
                )
        except limits.TooMuch as error:
            raise _without_end(str(error)) from None
        # A template is a program: besides raising on purpose it fails as Python does on a shape it does not expect, or
        # meets the limits of the sandbox.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
                RecursionError) as error:  # fmt: skip
            raise CannotRender(" ".join(str(error).split())[:200] or type(error).__name__) from None
        given = len(str(shown)) + len(str(tools or ""))
        if len(text) > _OWN_CHARACTERS + _MOST_COPIES * given:
            raise _without_end(f"it makes {len(text):,} characters of {given:,}")
        return text


def _without_end(why: str) -> UserError:
    return UserError("the model's chat template is broken or hostile", f"{why} for one conversation",
                     "use a model and a tokenizer from a publisher you trust")  # fmt: skip


@dataclass
class Adaptations:
    """How often a conversation had to be rewritten for the template, by kind."""

    counts: Counter[str] = field(default_factory=Counter)

    def notes(self) -> list[str]:
        """One line per kind of change."""
        return [f"{kind} in {count} {'record' if count == 1 else 'records'}" for kind, count in self.counts.items()]


def choose_template(tokenizer: PreTrainedTokenizerBase, *, date: datetime.date | None = None) -> TemplateChoice:
    """The tokenizer's own template or a stated default, with what it can render.

    Args:
        tokenizer: a transformers tokenizer.
        date: given to templates that write today's date (default: today). Pass the first run's when resuming.

    Raises:
        UserError: the template is broken: it cannot render one question and its answer.
    """
    own = getattr(tokenizer, "chat_template", None)
    if own:
        name, reason, template = "own", "the tokenizer's own", None
    elif _has_chatml(tokenizer):
        name, template = "chatml", CHATML
        reason = "the tokenizer has no template, but it has <|im_start|> and <|im_end|>"
    else:
        bos = "{{ bos_token }}" if _adds_bos(tokenizer) else ""
        name, template = "instruction", INSTRUCTION.replace("BOS", bos)
        reason = "the tokenizer has no template: ### Instruction / ### Response, answers end with "
        if tokenizer.eos_token is None:
            template, reason = template.replace(" + eos_token", ""), reason + "a blank line (it has no end token)"
        else:
            reason += tokenizer.eos_token
    choice = TemplateChoice(name, reason, template)
    if isinstance(own, str) and _TODAY.search(own):
        day = date or datetime.date.today()
        # A function cannot be handed in: transformers passes plain data only to its templates.
        dated = _TODAY.sub(lambda call: repr(day.strftime(call["format"])), own)
        choice = replace(choice, date=day, dated=dated)
    return _probe(choice, tokenizer)


def _has_chatml(tokenizer: PreTrainedTokenizerBase) -> bool:
    vocabulary = tokenizer.get_vocab()
    return "<|im_start|>" in vocabulary and "<|im_end|>" in vocabulary


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and len(ids) > 0 and ids[0] == tokenizer.bos_token_id


def _probe(choice: TemplateChoice, tokenizer: PreTrainedTokenizerBase) -> TemplateChoice:
    """Try what the template can render."""
    user, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}

    def renders(messages: list[Message], *words: str, tools: tuple[dict[str, Any], ...] | None = None) -> bool:
        try:
            text = choice.render(tokenizer, messages, tools)
        except CannotRender:
            return False
        return all(word in text for word in words)

    if not renders([user, answer], _USER, _ANSWER):
        try:
            choice.render(tokenizer, [user, answer])
            why = "it leaves out the question or the answer"
        except CannotRender as error:
            why = str(error)
        raise UserError(
            "the model's chat template cannot render a question and its answer",
            why,
            "use the instruct version of the model, or a tokenizer with a working chat_template",
        )
    schema = {"name": _TOOL, "description": _SYSTEM, "parameters": {"type": "object", "properties": {}}}
    call = {"type": "function", "function": {"name": _TOOL, "arguments": {"x": _REASON}}, "id": "call00001"}
    loop: list[Message] = [
        user,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": _TOOL, "content": _RESULT, "tool_call_id": "call00001"},
        answer,
    ]
    key = next((k for k in REASONING_KEYS if renders([user, {**answer, k: _REASON}], _REASON, _ANSWER)), None)
    return replace(
        choice,
        system=renders([{"role": "system", "content": _SYSTEM}, user, answer], _SYSTEM),
        consecutive=renders([user, user, answer, answer, user, answer]),
        tools=renders(loop, _SYSTEM, _REASON, _RESULT, tools=({"type": "function", "function": schema},)),
        reasoning_key=key,
    )


# --- adapting a conversation ------------------------------------------------------------------------------------------


def adapt(
    conversation: Conversation, choice: TemplateChoice, changes: Adaptations | None = None
) -> tuple[list[Message], tuple[dict[str, Any], ...] | None]:
    """Messages and tools in a form that the template renders.

    Raises:
        CannotRender: merging would mix an answer to train on with one that is marked as not to be trained on.
    """
    counts = changes.counts if changes is not None else Counter()
    messages = [dict(m) for m in conversation.messages]
    tools = conversation.tools
    if not choice.tools and (tools or any("tool_calls" in m or m["role"] == "tool" for m in messages)):
        messages, tools = _tools_as_text(messages, tools), None
        counts["tool schemas, calls and results written as text (the template knows no tools)"] += 1
    elif choice.tools:
        messages = _with_call_ids(messages)
    if any("reasoning_content" in m for m in messages):
        if choice.reasoning_key is None:
            counts["reasoning written as <think>...</think> before the answer (the template knows none)"] += 1
        messages = [_with_reasoning(m, choice.reasoning_key) for m in messages]
    if not choice.system and any(m["role"] == "system" for m in messages):
        messages = _system_into_user(messages)
        counts["system message put before the first user message (the template knows none)"] += 1
    if not choice.consecutive and any(a["role"] == b["role"] for a, b in zip(messages, messages[1:], strict=False)):
        messages = _merge_neighbours(messages)
        counts["messages of one role in a row merged (the template wants roles to alternate)"] += 1
    return messages, tools


def _tools_as_text(messages: list[Message], tools: tuple[dict[str, Any], ...] | None) -> list[Message]:
    """Calls as <tool_call> JSON in the answer, results as <tool_response> from the user, schemas in the system message.

    The same marks as in the Hermes and Qwen templates, so that other tools can read the answers back.
    """
    written: list[Message] = []
    for message in messages:
        message = dict(message)
        calls = message.pop("tool_calls", [])
        blocks = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
        parts = [message["content"]] if message["content"] else []
        message["content"] = "\n".join(parts + [f"<tool_call>\n{block}\n</tool_call>" for block in blocks])
        if message["role"] == "tool":
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        written.append(message)
    if tools:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        text = (
            f"You may call these functions:\n<tools>\n{listed}\n</tools>\n"
            'To call one, answer with <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
        )
        if written[0]["role"] == "system":
            written[0] = {**written[0], "content": f"{written[0]['content']}\n\n{text}"}
        else:
            written.insert(0, {"role": "system", "content": text})
    return written


def _with_call_ids(messages: list[Message]) -> list[Message]:
    """Ids for calls and results that have none, in order; some templates (Mistral's) insist on nine characters."""
    waiting: list[str] = []
    number = 0
    result = []
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            waiting, calls = [], []
            for call in message["tool_calls"]:
                number += 1
                calls.append(call if "id" in call else {**call, "id": f"call{number:05d}"})
                waiting.append(calls[-1]["id"])
            message["tool_calls"] = calls
        elif message["role"] == "tool" and "tool_call_id" not in message:
            message["tool_call_id"] = waiting.pop(0) if waiting else f"call{number:05d}"
        result.append(message)
    return result


def _with_reasoning(message: Message, key: str | None) -> Message:
    if "reasoning_content" not in message:
        return message
    message = dict(message)
    reasoning = message.pop("reasoning_content")
    if key is None:
        message["content"] = f"<think>\n{reasoning.strip()}\n</think>\n\n{message['content']}"
    else:
        message[key] = reasoning
    return message


def _system_into_user(messages: list[Message]) -> list[Message]:
    """Each system message goes before the next user message's text; with none to follow it becomes a user message."""
    result: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user" and waiting:
            result.append({**message, "content": "\n\n".join([*waiting, message["content"]])})
            waiting = []
        else:
            if waiting:
                result.append({"role": "user", "content": "\n\n".join(waiting)})
                waiting = []
            result.append(message)
    return result


def _merge_neighbours(messages: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last is None or last["role"] != message["role"] or message["role"] == "tool":
            merged.append(dict(message))
            continue
        if message["role"] == "assistant" and last.get("loss") != message.get("loss"):
            raise CannotRender("two answers in a row, one marked as not trained on, and the template merges them")
        last["content"] = "\n\n".join(text for text in (last["content"], message["content"]) if text)
        if "tool_calls" in message:
            last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]
    return merged
