"""From a data file's name to training and evaluation records, in one call."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fitune.data.conversations import Conversation, to_conversations
from fitune.data.encode import Encoded, encode_documents, encode_pieces
from fitune.data.layouts import Layout, recognise
from fitune.data.readers import DEMO, Table, read
from fitune.data.records import LengthReport, Record, report_lengths
from fitune.data.spans import Piece, SpanFinder
from fitune.data.template import Adaptations, CannotRender, TemplateChoice, adapt, choose_template
from fitune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVAL_SHARE = 0.05
MAX_EVAL_RECORDS = 200
MIN_RECORDS_TO_SPLIT = 20
_PLACEHOLDER = re.compile(r"\{\{\s*\w+\s*\}\}")
# Placeholders are mentioned once they are in this share of the answers; below it they may be about templates.
_PLACEHOLDER_SHARE = 0.1


@dataclass(frozen=True)
class DataSet:
    """Everything known about the data before training.

    Attributes:
        train, eval: records; ``eval`` may be empty.
        report: lengths and counts over both.
        layout: how the columns of the training data were understood.
        template: the chat template; None for raw text.
        notes: what a person should know, one line each.
        source: the training file or id.
        eval_from: where ``eval`` comes from, in words.
    """

    train: list[Record]
    eval: list[Record]
    report: LengthReport
    layout: Layout
    template: TemplateChoice | None
    notes: list[str]
    source: str
    eval_from: str

    def lines(self) -> list[str]:
        """The whole description for people."""
        split = f"{len(self.train):,} to train on, {len(self.eval):,} to evaluate on ({self.eval_from})"
        template = [self.template.line()] if self.template else []
        return [f"{self.source}: {self.layout.line()}", *template, *self.report.lines(), split, *self.notes]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "source": self.source,
            "layout": {"name": self.layout.name, "columns": dict(self.layout.mapping), "reason": self.layout.reason},
            "template": {"name": self.template.name, "reason": self.template.reason} if self.template else None,
            "num_train": len(self.train),
            "num_eval": len(self.eval),
            "eval_from": self.eval_from,
            "lengths": self.report.as_dict(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class _Source:
    """One table turned into tokens: pieces per conversation, rows dropped, and what was noted."""

    table: Table
    layout: Layout
    conversations: list[Conversation]
    pieces: list[list[Encoded]]
    dropped: dict[str, tuple[int, ...]]
    notes: list[str]

    @property
    def truncated(self) -> list[int]:
        return [piece.num_cut for pieces in self.pieces for piece in pieces if piece.num_cut]

    @property
    def split_rows(self) -> int:
        return sum(len(pieces) > 1 for pieces in self.pieces)


def load_dataset(
    data: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    eval_data: str | None = None,
    eval_share: float | None = None,
    columns: Mapping[str, str] | None = None,
    seq_len: int = 2048,
    loss_on: str = "responses",
    seed: int = 0,
    hub: str = "huggingface",
    limit: int | None = None,
    date: datetime.date | None = None,
) -> DataSet:
    """Read, recognise, render, tokenise and split.

    Args:
        data: a file, ``demo``, or a hub's dataset id (``owner/name:config@split``).
        tokenizer: the model's.
        eval_data: a validation file or id; otherwise a share of the data is held out (``demo`` brings its own).
        eval_share: share held out (default 5 %, at least 1 and at most 200 records; none below 20 records; an
            explicit share is taken as it is); 0 for none.
        columns: part -> column, see :mod:`fitune.data.layouts`.
        seq_len: tokens of the longest record; longer ones are cut on the right and counted.
        loss_on: ``responses`` or ``all``.
        seed: of the held-out share.
        hub: ``huggingface`` or ``modelscope``.
        limit: keep only the first rows of each source.
        date: for templates that write today's date; pass the first run's when resuming.

    Raises:
        UserError: the data cannot be read or recognised, or nothing of it can be trained.
    """
    if loss_on not in ("responses", "all"):
        raise UserError(f"unknown loss_on {loss_on!r}", "", "use responses or all")
    if seq_len < 2:
        raise UserError(f"seq_len {seq_len} is too short", "a record needs a token to predict from", "use 2 or more")
    table = read(data, hub=hub, limit=limit)
    layout = recognise(table, columns)
    template = choose_template(tokenizer, date=date) if "text" not in layout.mapping else None
    train = _encode_table(table, layout, tokenizer, template, seq_len, loss_on)
    eval_source = None
    if eval_data is not None or data == DEMO:
        eval_table = read(eval_data, hub=hub, limit=limit) if eval_data else read(DEMO, split="eval", limit=limit)
        eval_layout = recognise(eval_table, columns)
        eval_template = template
        if template is None and "text" not in eval_layout.mapping:
            eval_template = choose_template(tokenizer, date=date)
        eval_source = _encode_table(eval_table, eval_layout, tokenizer, eval_template, seq_len, loss_on)
    return _assemble(train, eval_source, template, data, eval_data, eval_share, seed, seq_len)


def _encode_table(
    table: Table,
    layout: Layout,
    tokenizer: PreTrainedTokenizerBase,
    template: TemplateChoice | None,
    seq_len: int,
    loss_on: str,
) -> _Source:
    conversations, unusable = to_conversations(table, layout)
    dropped: dict[str, list[int]] = defaultdict(list)
    for drop in unusable:
        dropped[drop.reason].append(drop.row)
    notes = list(table.notes) + _placeholder_notes(conversations)
    if "text" in layout.mapping:
        kept = conversations
        pieces = encode_documents([c.text or "" for c in conversations], tokenizer, seq_len)
    else:
        assert template is not None, "a chat layout comes with a template"
        kept, rendered, more_notes = _render(conversations, tokenizer, template, loss_on, dropped)
        notes += more_notes
        flat = encode_pieces([piece for pieces in rendered for piece in pieces], tokenizer, seq_len)
        ends = np.cumsum([len(pieces) for pieces in rendered]).tolist()
        pieces = [flat[end - len(some) : end] for end, some in zip(ends, rendered, strict=True)]
    kept, pieces, lost = _trainable(kept, pieces, seq_len, dropped)
    if not pieces:
        raise _nothing_left(table, dropped)
    if lost:
        notes.append(f"{lost} answers that need a context of their own start after seq_len {seq_len} and are left out")
    return _Source(table, layout, kept, pieces, {k: tuple(sorted(v)) for k, v in dropped.items()}, notes)


def _render(
    conversations: list[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    template: TemplateChoice,
    loss_on: str,
    dropped: dict[str, list[int]],
) -> tuple[list[Conversation], list[list[Piece]], list[str]]:
    finder, changes = SpanFinder(tokenizer, template), Adaptations()
    kept: list[Conversation] = []
    rendered: list[list[Piece]] = []
    for conversation in conversations:
        try:
            messages, tools = adapt(conversation, template, changes)
            pieces = finder.pieces(messages, tools, loss_on)
            rendered.append([replace(piece, question=_asked(conversation, piece.question)) for piece in pieces])
        except CannotRender as error:
            dropped[f"the chat template refuses it: {error}"].append(conversation.source_row)
        else:
            kept.append(conversation)
    notes = changes.notes()
    if finder.without_end:
        end = tokenizer.eos_token or "no token: it has none"
        notes.append(f"the template does not end answers; {end} was appended to the last answer of each record")
    return kept, rendered, notes


def _asked(conversation: Conversation, question: str) -> str:
    """The question as it was written, where adapting it to the template put other text (a system message) before it."""
    users = [m["content"] for m in conversation.messages if m["role"] == "user"]
    return next((text for text in reversed(users) if text and question.endswith(text)), question)


def _trainable(
    conversations: list[Conversation], pieces: list[list[Encoded]], seq_len: int, dropped: dict[str, list[int]]
) -> tuple[list[Conversation], list[list[Encoded]], int]:
    """Leave out pieces in which no token under loss is left, and conversations without any other.

    Returns:
        The conversations kept, their pieces, and how many pieces of kept conversations were left out.
    """
    kept, kept_pieces, lost = [], [], 0
    for conversation, some in zip(conversations, pieces, strict=True):
        useful = [piece for piece in some if piece.num_targets]
        if useful:
            kept.append(conversation)
            kept_pieces.append(useful)
            lost += len(some) - len(useful)
        else:
            cut = any(piece.num_cut for piece in some)
            reason = f"the answer starts after seq_len {seq_len}" if cut else "nothing to predict"
            dropped[reason].append(conversation.source_row)
    return kept, kept_pieces, lost


def _nothing_left(table: Table, dropped: Mapping[str, list[int]]) -> UserError:
    reasons = "; ".join(f"{len(rows)} x {reason}" for reason, rows in sorted(dropped.items(), key=lambda d: -len(d[1])))
    fix = "correct the file, or name other columns with --columns"
    if any("seq_len" in reason for reason in dropped):
        fix = "raise --seq-len, or shorten the prompts"
    elif any("text only" in reason for reason in dropped):
        fix = "give text data; fitune does not train image or video models"
    return UserError(f"none of the {len(table.rows)} records of {table.path} can be trained on", reasons, fix)


def _placeholder_notes(conversations: list[Conversation]) -> list[str]:
    answers = [
        "".join(m["content"] for m in c.messages if m["role"] == "assistant") for c in conversations if c.messages
    ]
    found: list[set[str]] = [names for answer in answers if (names := set(_PLACEHOLDER.findall(answer)))]
    if not found or len(found) < _PLACEHOLDER_SHARE * len(answers):
        return []
    shown = ", ".join(sorted(set.union(*found))[:5])
    return [f"{len(found)} answers hold unfilled placeholders ({shown}): fill them in, or the model learns to say them"]


# --- splitting and numbering ------------------------------------------------------------------------------------------


def _assemble(
    train: _Source,
    eval_source: _Source | None,
    template: TemplateChoice | None,
    data: str,
    eval_data: str | None,
    eval_share: float | None,
    seed: int,
    seq_len: int,
) -> DataSet:
    records, groups, questions = _records_of(train)
    notes = list(train.notes)
    if eval_source is not None:
        train_records = records
        held, _, questions = _records_of(eval_source)
        eval_records = [_with_prompt(*pair) for pair in zip(held, questions, strict=True)]
        eval_from = eval_data or "the bundled evaluation set"
        notes += [note for note in eval_source.notes if note not in notes]
    else:
        held_out = _held_out(groups, eval_share, seed)
        train_records = [r for i, r in enumerate(records) if i not in held_out]
        eval_records = [_with_prompt(r, questions[i]) for i, r in enumerate(records) if i in held_out]
        eval_from = f"held out at random, seed {seed}" if held_out else "none held out"
    numbered = [replace(r, index=i) for i, r in enumerate([*train_records, *eval_records])]
    sources = [s for s in (train, eval_source) if s is not None]
    dropped: dict[str, tuple[int, ...]] = {}
    for source in sources:
        for reason, rows in source.dropped.items():
            dropped[reason] = dropped.get(reason, ()) + rows
    report = report_lengths(
        numbered,
        num_rows=sum(len(s.table.rows) for s in sources),
        dropped=dropped,
        truncated=sum(len(s.truncated) for s in sources),
        truncated_tokens=sum(sum(s.truncated) for s in sources),
        split_rows=sum(s.split_rows for s in sources),
        seq_len=seq_len,
    )
    num = len(train_records)
    return DataSet(numbered[:num], numbered[num:], report, train.layout, template, notes, data, eval_from)


def _records_of(source: _Source) -> tuple[list[Record], list[str], list[str]]:
    """Records in the order of the source; the group of each (what must not be split between train and eval); and the
    question that each answers."""
    records: list[Record] = []
    groups: list[str] = []
    questions: list[str] = []
    for conversation, pieces in zip(source.conversations, source.pieces, strict=True):
        meta = {"language": conversation.language} if conversation.language else {}
        for piece in pieces:
            records.append(Record(len(records), piece.input_ids, piece.labels, conversation.source_row, meta))
            groups.append(_group(conversation, piece))
            questions.append(piece.question)
    return records, groups, questions


def _with_prompt(record: Record, question: str) -> Record:
    return replace(record, meta={**record.meta, "prompt": question}) if question.strip() else record


def _group(conversation: Conversation, piece: Encoded) -> str:
    """Equal conversations share a group (a copy of a training record would make the evaluation look better)."""
    if conversation.text is not None:
        return hashlib.sha256(piece.input_ids.tobytes()).hexdigest()
    content = json.dumps([conversation.messages, conversation.tools], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _held_out(groups: list[str], share: float | None, seed: int) -> set[int]:
    """Positions of the evaluation records: whole groups, in seeded order, until the share is reached."""
    num = len(groups)
    if share == 0 or num < (MIN_RECORDS_TO_SPLIT if share is None else 2):
        return set()
    wanted = max(1, round(num * (EVAL_SHARE if share is None else share)))
    if share is None:
        wanted = min(MAX_EVAL_RECORDS, wanted)
    members: dict[str, list[int]] = defaultdict(list)
    for position, group in enumerate(groups):
        members[group].append(position)
    names = list(members)
    held_out: set[int] = set()
    for i in np.random.default_rng(seed).permutation(len(names)):
        some = members[names[i]]
        if len(held_out) >= wanted:
            break
        # A group too large for what is left to hold out (many copies of one record) stays in training.
        if len(held_out) + len(some) <= wanted or (not held_out and len(some) < num / 2):
            held_out.update(some)
    return held_out if len(held_out) < num else set()
