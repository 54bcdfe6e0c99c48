"""Where the answers stand in the rendered text, exactly, for any chat template.

How: what a model must produce in turn *i* is the template's rendering of ``messages[:i+1]`` after its rendering of
``messages[:i]`` with the generation prompt. Where the whole conversation's rendering contains these two as they
are, all turns are trained in one piece. Where it does not (templates that strip the reasoning of earlier turns),
the turn gets a piece of its own, which ends with that turn: then the model is trained on exactly what it will be
shown, at the price of repeated context. Neither ``{% generation %}`` marks nor knowledge of the template is needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fitune.data.conversations import Message
from fitune.data.template import REASONING_KEYS, CannotRender, TemplateChoice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SENTINEL = "zqanswerqz"
_SPACE = re.compile(r"\s*")
# A thought that is opened (by the generation prompt, perhaps) and closed with nothing in it.
_EMPTY_THOUGHT = re.compile(r"\s*(?:<(?:\w+:)?think>)?\s*</(?:\w+:)?think>\n*")
_OPENED_THOUGHT = re.compile(r"<(?:\w+:)?think>\s*(?:</(?:\w+:)?think>\s*)?\Z")


def _reasons(message: Message) -> bool:
    """Whether the answer comes with reasoning, in a key or inline."""
    return any(message.get(key) for key in REASONING_KEYS) or "<think>" in message["content"]


@dataclass(frozen=True)
class Piece:
    """A rendered text and the character ranges ``(start, end)`` under loss, in order.

    ``question`` is the text of the user's message that the first answer under loss replies to, as far as there is one.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    question: str = ""


@dataclass(frozen=True)
class _Turn:
    """One answer in the rendering that ends with it.

    Attributes:
        index: which message.
        text: the rendering of the conversation up to and with this message.
        prompts: the rendering before it with the generation prompt, in one or two forms, or none.
        start: where the answer starts in ``text``.
        body_end: where the answer ends, before its end-of-turn tokens.
        ending: the end-of-turn tokens, as a rule one; none when the template writes none.
    """

    index: int
    text: str
    prompts: tuple[str, ...]
    start: int
    body_end: int
    ending: tuple[str, ...]


def _question(before: list[Message]) -> str:
    return next((m["content"] for m in reversed(before) if m["role"] == "user"), "")


class SpanFinder:
    """Renders conversations with one template and finds the answers in them.

    Args:
        tokenizer: gives the special tokens, one of which ends a turn.
        choice: the chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, choice: TemplateChoice):
        self.tokenizer, self.choice = tokenizer, choice
        self.without_end = 0  # pieces whose last answer the template did not end
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        special |= set(tokenizer.all_special_tokens)
        self._special = tuple(sorted(special, key=len, reverse=True))
        self._special_here = re.compile("|".join(map(re.escape, self._special)) or r"(?!)")

    def pieces(
        self, messages: list[Message], tools: tuple[dict[str, Any], ...] | None, loss_on: str = "responses"
    ) -> list[Piece]:
        """The texts to train on: one, unless the template hides something of earlier turns from later ones.

        Args:
            messages: adapted to the template; the last one is an assistant's.
            tools: schemas or None.
            loss_on: ``responses``, or ``all`` (everything but answers with ``loss: False``).

        Raises:
            CannotRender: the template refuses the conversation, or does not show where an answer starts.
        """
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        trained = [i for i in answers if messages[i].get("loss") is not False]
        if loss_on == "all":
            return [self._everything(messages, tools, [i for i in answers if i not in trained])]
        waiting = [self._turn(messages, tools, i) for i in trained]
        pieces: list[Piece] = []
        while waiting:
            last = waiting[-1]
            text = self._ended(last)
            found = [(turn, self._find(turn, text)) for turn in waiting]
            first = next(turn.index for turn, span in found if span is not None)
            spans = tuple(span for _, span in found if span is not None)
            pieces.append(Piece(text, spans, _question(messages[:first])))
            waiting = [turn for turn, span in found if span is None]
        return pieces[::-1]

    def _everything(self, messages: list[Message], tools: Any, untrained: list[int]) -> Piece:
        last = self._turn(messages, tools, len(messages) - 1)
        text = self._ended(last)
        holes = [self._find(self._turn(messages, tools, i), text) for i in untrained]
        if None in holes:
            raise CannotRender("the template does not show where an answer marked as not trained on stands")
        edges = [0, *(edge for hole in holes for edge in hole or ()), len(text)]
        spans = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        return Piece(text, tuple(spans))

    def _turn(self, messages: list[Message], tools: Any, index: int) -> _Turn:
        """Where the answer of one message starts and ends in the rendering that ends with it."""
        message = messages[index]
        text = self.choice.render(self.tokenizer, messages[: index + 1], tools)
        prompts = self._prompts(messages[:index], tools)
        if not self._shows(text, message):
            text = self._substituted(messages, tools, index)
        head = next((prompt for prompt in prompts if text.startswith(prompt)), None)
        if head is None:
            start = self._content_start(messages, tools, index, text)
        else:
            start = len(head)
            thought = _EMPTY_THOUGHT.match(text, start)
            # A template's empty thought is its way to write "no reasoning": a header, not something to learn.
            if thought and not _reasons(message):
                start = thought.end()
                if message["content"][:1].isspace() and not message.get("tool_calls"):
                    start = self._content_start(messages, tools, index, text)  # line breaks may be the answer's own
        body_end = self._body_end(text, start)
        ending = self._specials(text, body_end)
        if self.tokenizer.eos_token in ending:  # what follows the end token belongs to the next turn's header
            ending = ending[: ending.index(self.tokenizer.eos_token) + 1]
        return _Turn(index, text, prompts, start, body_end, ending)

    def _body_end(self, text: str, start: int) -> int:
        """Where the special tokens and white space at the end of the text begin; its length when none is there."""
        body = text[start:].rstrip()
        if not body.endswith(self._special):
            return len(text)
        while body.endswith(self._special):
            last = next(word for word in self._special if body.endswith(word))
            body = body.removesuffix(last).rstrip()
        return start + len(body)

    def _specials(self, text: str, at: int) -> tuple[str, ...]:
        """The special tokens that follow each other without a gap, after white space."""
        at, found = self._skip_space(text, at), []
        while match := self._special_here.match(text, at):
            found.append(match[0])
            at = match.end()
        return tuple(found)

    @staticmethod
    def _skip_space(text: str, at: int) -> int:
        match = _SPACE.match(text, at)
        return match.end() if match else at

    def _prompts(self, before: list[Message], tools: Any) -> tuple[str, ...]:
        """What the model is shown before it answers, and the same without the thought that some templates open there.

        Nothing when the template cannot render it (because nothing comes before, as a rule).
        """
        if not before:
            return ()
        try:
            prompt = self.choice.render(self.tokenizer, before, tools, prompt=True)
        except CannotRender:
            return ()
        thoughtless = _OPENED_THOUGHT.sub("", prompt)
        return (prompt,) if thoughtless == prompt else (prompt, thoughtless)

    def _shows(self, text: str, message: Message) -> bool:
        """Whether the rendering holds the whole answer, white space aside (some templates cut reasoning out of it)."""
        return "".join(message["content"].split()) in "".join(text.split())

    def _with_sentinel(self, messages: list[Message], tools: Any, index: int) -> str:
        text = self.choice.render(self.tokenizer, [*messages[:index], {**messages[index], "content": _SENTINEL}], tools)
        if text.count(_SENTINEL) != 1:
            raise CannotRender("the template does not show the whole answer")
        return text

    def _substituted(self, messages: list[Message], tools: Any, index: int) -> str:
        """The rendering with the answer put in as it is, where the template would change it."""
        return self._with_sentinel(messages, tools, index).replace(_SENTINEL, messages[index]["content"])

    def _content_start(self, messages: list[Message], tools: Any, index: int, text: str) -> int:
        """Where the content starts, for templates whose generation prompt is not part of the rendered answer."""
        if any(messages[index].get(key) for key in (*REASONING_KEYS, "tool_calls")):
            raise CannotRender("the template does not show where the answer starts")
        marked = self._with_sentinel(messages, tools, index)
        start = marked.index(_SENTINEL)
        if text[:start] != marked[:start]:
            raise CannotRender("the template does not show where the answer starts")
        return start

    def _ended(self, turn: _Turn) -> str:
        """The turn's rendering, with the tokenizer's end token where the template writes no end of turn."""
        if turn.ending:
            return turn.text
        self.without_end += 1
        if not self.tokenizer.eos_token:
            return turn.text
        return turn.text + self.tokenizer.eos_token

    def _find(self, turn: _Turn, text: str) -> tuple[int, int] | None:
        """The turn's answer in a rendering that ends with a later turn; None where something before it differs."""
        # White space in front of an answer is compared loosely: a template may strip it in the last turn only.
        body = turn.text[turn.start : turn.body_end].lstrip()
        for head in (turn.text[: turn.start], *turn.prompts):
            if not text.startswith(head):
                continue
            at = self._skip_space(text, len(head))
            if text.startswith(body, at):
                return len(head), self._end(text, at + len(body), turn.ending)
        return None

    def _end(self, text: str, body_end: int, ending: tuple[str, ...]) -> int:
        """After the end-of-turn tokens: those that the turn's own rendering has, otherwise the one that is there."""
        there = self._specials(text, body_end)
        if not there:
            return body_end
        shared = next((i for i, (a, b) in enumerate(zip(there, ending, strict=False)) if a != b), None)
        count = min(len(there), len(ending)) if shared is None else shared
        return self._skip_space(text, body_end) + sum(map(len, there[: max(1, count)]))
