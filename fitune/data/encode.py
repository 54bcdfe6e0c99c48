"""Text to token ids and labels: which tokens are under loss, truncation, documents cut in pieces.

Labels are unshifted: ``labels[t] == input_ids[t]`` where token *t* is under loss, else -100.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fitune.data.conversations import Conversation
from fitune.data.spans import Piece, SpanFinder
from fitune.data.template import Adaptations, TemplateChoice, adapt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
_BATCH_TEXTS = 512


@dataclass(frozen=True)
class Encoded:
    """Token ids and labels, both int32 [T], before they become a record.

    Attributes:
        num_cut: tokens cut off on the right because the text was longer than ``seq_len``.
        question: what the first answer under loss replies to, for people; empty where nobody asked.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    num_cut: int = 0
    question: str = ""

    @property
    def num_targets(self) -> int:
        """Tokens that can be predicted and are under loss: the first one has nothing before it."""
        return int(np.count_nonzero(self.labels[1:] != IGNORED))


def encode(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    choice: TemplateChoice,
    *,
    seq_len: int,
    loss_on: str = "responses",
    changes: Adaptations | None = None,
) -> list[Encoded]:
    """One conversation or document as token pieces of at most ``seq_len``; several only where the module says.

    Raises:
        CannotRender: the template refuses the conversation.
    """
    if conversation.text is not None:
        return encode_documents([conversation.text], tokenizer, seq_len)[0]
    messages, tools = adapt(conversation, choice, changes)
    pieces = SpanFinder(tokenizer, choice).pieces(messages, tools, loss_on)
    return encode_pieces(pieces, tokenizer, seq_len)


def encode_pieces(pieces: Sequence[Piece], tokenizer: PreTrainedTokenizerBase, seq_len: int) -> list[Encoded]:
    """Rendered texts to tokens, each cut on the right at ``seq_len``.

    The text is cut into prompt and answer before it is tokenised, as it is when the model answers (the prompt is
    tokenised alone), so that no token is half header and half answer. Tokenizers that add a space in front of every
    text (sentencepiece) would add one at each cut: their text is tokenised whole, and the answer starts at the first
    token that differs from the prompt's own.
    """
    if _cuts_cleanly(tokenizer):
        encoded = _encode_cut(pieces, tokenizer, seq_len)
    else:
        encoded = [_encode_whole(piece, tokenizer, seq_len) for piece in pieces]
    return [replace(e, question=piece.question) for e, piece in zip(encoded, pieces, strict=True)]


def _cuts_cleanly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether tokenising a text in two parts gives the tokens of the whole."""
    first, second = "one\n", "Two three"
    parts = _ids(tokenizer, first) + _ids(tokenizer, second)
    return parts == _ids(tokenizer, first + second)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _encode_cut(pieces: Sequence[Piece], tokenizer: PreTrainedTokenizerBase, seq_len: int) -> list[Encoded]:
    segments = [(number, *segment) for number, piece in enumerate(pieces) for segment in _segments(piece)]
    ids_of = _batch_ids(tokenizer, [text for _, text, _ in segments])
    ids: list[list[int]] = [[] for _ in pieces]
    labels: list[list[int]] = [[] for _ in pieces]
    for (number, _, under_loss), tokens in zip(segments, ids_of, strict=True):
        ids[number] += tokens
        labels[number] += tokens if under_loss else [IGNORED] * len(tokens)
    return [_cut(i, lab, seq_len) for i, lab in zip(ids, labels, strict=True)]


def _segments(piece: Piece) -> Iterable[tuple[str, bool]]:
    """The text in its order as (part, under loss)."""
    at = 0
    for start, end in piece.spans:
        if at < start:
            yield piece.text[at:start], False
        yield piece.text[start:end], True
        at = end
    if at < len(piece.text):
        yield piece.text[at:], False


def _batch_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    ids: list[list[int]] = []
    for at in range(0, len(texts), _BATCH_TEXTS):
        ids += tokenizer(list(texts[at : at + _BATCH_TEXTS]), add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _encode_whole(piece: Piece, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> Encoded:
    ids = _ids(tokenizer, piece.text)
    labels = [IGNORED] * len(ids)
    for start, end in piece.spans:
        first = _common(ids, _ids(tokenizer, piece.text[:start]))
        last = _common(ids, _ids(tokenizer, piece.text[:end]))
        labels[first:last] = ids[first:last]
    return _cut(ids, labels, seq_len)


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _cut(ids: list[int], labels: list[int], seq_len: int) -> Encoded:
    return Encoded(
        np.asarray(ids[:seq_len], dtype=np.int32),
        np.asarray(labels[:seq_len], dtype=np.int32),
        max(0, len(ids) - seq_len),
    )


def encode_documents(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, seq_len: int) -> list[list[Encoded]]:
    """Raw texts: every token under loss, the end token appended, long ones cut into pieces of at most ``seq_len``.

    A piece starts with the last token of the piece before it, so that every token is predicted exactly once.
    """
    eos = tokenizer.eos_token_id
    encoded = []
    for at in range(0, len(texts), _BATCH_TEXTS):
        for ids in tokenizer(list(texts[at : at + _BATCH_TEXTS]), verbose=False)["input_ids"]:
            if eos is not None and (not ids or ids[-1] != eos):
                ids = [*ids, eos]
            tokens = np.asarray(ids, dtype=np.int32)
            starts = range(0, max(1, len(tokens) - 1), max(1, seq_len - 1))
            cuts = [tokens[start : start + seq_len] for start in starts]
            encoded.append([Encoded(cut, cut.copy()) for cut in cuts])
    return encoded
