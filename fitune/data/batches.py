"""Records to micro-batches: which records make a step, rows padded or packed, positions that restart.

Shapes: ``B`` rows of a micro-batch, ``T`` tokens of its longest row. Everything here is a pure function of its
arguments (seed and epoch among them), so that a resumed run and every rank compute the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fitune.data.encode import IGNORED

NO_RECORD = -1
# With length grouping, records are sorted by length within stretches of this many steps: long enough to find
# neighbours of like length, short enough to keep the order random.
_STEPS_PER_STRETCH = 50


class Tokens(Protocol):
    """What batching needs of a record."""

    @property
    def index(self) -> int: ...
    @property
    def input_ids(self) -> np.ndarray: ...
    @property
    def labels(self) -> np.ndarray: ...


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together; all arrays int64 [B, T].

    Attributes:
        input_ids: tokens, ``pad_id`` after the end of a row.
        targets: the label of the *next* token of the same record, -100 where there is none or it is not under loss.
        position_ids: from 0 in every record; 0 on padding.
        record_ids: the record's ``index``; -1 on padding.
        doc_lengths: per row the lengths of its records, in order; padding is not a document.
    """

    input_ids: np.ndarray
    targets: np.ndarray
    position_ids: np.ndarray
    record_ids: np.ndarray
    doc_lengths: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(map(sum, self.doc_lengths))

    @property
    def num_targets(self) -> int:
        """Tokens under loss."""
        return int(np.count_nonzero(self.targets != IGNORED))


def plan_epoch(
    records: Sequence[Tokens], batch: int, seed: int, epoch: int, group_by_length: bool = False
) -> list[list[int]]:
    """Which records (positions in ``records``) make each optimizer step of an epoch.

    Every record appears once; the last step may be short. Step 0 of epoch 0 holds the longest records, so that what
    can run out of memory does so in the first minute. With ``group_by_length`` records of like length share a step.
    """
    num = len(records)
    lengths = np.array([len(r.input_ids) for r in records], dtype=np.int64)
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(num)
    first: list[int] = []
    if epoch == 0 and num:
        first = np.argsort(-lengths, kind="stable")[:batch].tolist()
        order = order[~np.isin(order, first)]
    steps = [order[i : i + batch] for i in range(0, len(order), batch)]
    if group_by_length and len(order):
        steps = _grouped(order, lengths, batch, rng)
    return ([first] if first else []) + [step.tolist() for step in steps]


def _grouped(order: np.ndarray, lengths: np.ndarray, batch: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Steps of like length in random order; the short step, if any, stays the last."""
    full_steps: list[np.ndarray] = []
    rest = order[len(order) - len(order) % batch :]
    stretch = _STEPS_PER_STRETCH * batch
    body = order[: len(order) - len(rest)]
    for start in range(0, len(body), stretch):
        part = body[start : start + stretch]
        part = part[np.argsort(-lengths[part], kind="stable")]
        full_steps += [part[i : i + batch] for i in range(0, len(part), batch)]
    shuffled = [full_steps[i] for i in rng.permutation(len(full_steps))]
    return shuffled + ([rest] if len(rest) else [])


class StepStream:
    """The records of every optimizer step of a run, by its number: ``stream[step] -> (epoch, positions)``.

    Random access, so that a run resumed at any step sees the same records. ``step`` counts from 0 over all epochs.

    Args:
        records: the training records.
        batch: records per optimizer step.
        seed: of the order.
        group_by_length: see :func:`plan_epoch`.
    """

    def __init__(self, records: Sequence[Tokens], batch: int, seed: int, group_by_length: bool = False):
        assert len(records) and batch >= 1, "a stream needs records and a batch"
        self.steps_per_epoch = -(-len(records) // batch)
        self._plan = functools.lru_cache(maxsize=2)(
            lambda epoch: plan_epoch(records, batch, seed, epoch, group_by_length)
        )

    def __getitem__(self, step: int) -> tuple[int, list[int]]:
        if step < 0:
            raise IndexError(step)
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch, list(self._plan(epoch)[within])


def step_batches(
    records: Sequence[Tokens], *, micro_batch: int, packing: bool, seq_len: int, pad_id: int, pad_multiple: int = 1
) -> list[MicroBatch]:
    """The micro-batches of one optimizer step, the largest first.

    Without packing each row is one record, rows sorted by length. With packing rows are filled with whole records up
    to ``seq_len`` (first fit, longest first). Rows are padded on the right to the longest of their micro-batch,
    rounded up to a multiple of ``pad_multiple``. Which records make the step is the caller's business.
    """
    rows = _rows([len(r.input_ids) for r in records], packing, seq_len)
    rows_of = [rows[i : i + micro_batch] for i in range(0, len(rows), micro_batch)]
    return [_micro_batch([[records[i] for i in row] for row in some], pad_id, pad_multiple) for some in rows_of]


def _rows(lengths: Sequence[int], packing: bool, seq_len: int) -> list[list[int]]:
    """Positions of the records in each row, rows by falling number of tokens; ties keep the records' order."""
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if not packing:
        return [[i] for i in longest_first]
    rows: list[list[int]] = []
    room: list[int] = []
    for i in longest_first:
        assert lengths[i] <= seq_len, "records are cut to seq_len before they are batched"
        fits = next((row for row, free in enumerate(room) if free >= lengths[i]), None)
        if fits is None:
            rows.append([i])
            room.append(seq_len - lengths[i])
        else:
            rows[fits].append(i)
            room[fits] -= lengths[i]
    return [rows[r] for r in sorted(range(len(rows)), key=lambda r: (room[r], r))]


def _micro_batch(rows: list[list[Tokens]], pad_id: int, pad_multiple: int) -> MicroBatch:
    doc_lengths = tuple(tuple(len(r.input_ids) for r in row) for row in rows)
    width = -(-max(map(sum, doc_lengths)) // pad_multiple) * pad_multiple
    shape = (len(rows), width)
    input_ids: np.ndarray = np.full(shape, pad_id, dtype=np.int64)
    targets: np.ndarray = np.full(shape, IGNORED, dtype=np.int64)
    position_ids: np.ndarray = np.zeros(shape, dtype=np.int64)
    record_ids: np.ndarray = np.full(shape, NO_RECORD, dtype=np.int64)
    for b, row in enumerate(rows):
        at = 0
        for record in row:
            end = at + len(record.input_ids)
            input_ids[b, at:end] = record.input_ids
            targets[b, at : end - 1] = record.labels[1:]
            position_ids[b, at:end] = np.arange(end - at)
            record_ids[b, at:end] = record.index
            at = end
    return MicroBatch(input_ids, targets, position_ids, record_ids, doc_lengths)


def packing_gain(
    records: Sequence[Tokens], batch: int, seq_len: int, micro_batch: int | None = None, seed: int = 0
) -> float:
    """Tokens with padding over tokens when packed (at least about 1; 1.6 means 60 % more work without packing).

    Counted over the first epoch's steps without length grouping.

    Args:
        records: the training records.
        batch: records per optimizer step.
        seq_len: length of a packed row at most.
        micro_batch: rows per micro-batch (default: the whole step).
        seed: of the order.
    """
    padded = packed = 0
    for step in plan_epoch(records, batch, seed, 0):
        lengths = [len(records[i].input_ids) for i in step]
        padded += _area(lengths, False, seq_len, micro_batch or batch)
        packed += _area(lengths, True, seq_len, micro_batch or batch)
    return padded / packed if packed else 1.0


def _area(lengths: list[int], packing: bool, seq_len: int, micro_batch: int) -> int:
    """Tokens of a step's micro-batches, padding included."""
    totals = [sum(lengths[i] for i in row) for row in _rows(lengths, packing, seq_len)]
    some = [totals[i : i + micro_batch] for i in range(0, len(totals), micro_batch)]
    return sum(max(rows) * len(rows) for rows in some)
