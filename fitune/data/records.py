"""Tokenised records and the report on their lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fitune.data.encode import IGNORED


@dataclass(frozen=True, eq=False)
class Record:
    """One training sequence.

    Attributes:
        index: its number in the data set; training records come first (``train[i].index == i``), then evaluation.
        input_ids: int32 [T].
        labels: int32 [T], unshifted: the token itself where it is under loss, else -100.
        source_row: row of the source it came from, from 0.
        meta: ``language`` where the source has it; on evaluation records ``prompt``, the person's last question before
            the first answer under loss, without template or system message.
    """

    index: int
    input_ids: np.ndarray
    labels: np.ndarray
    source_row: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_targets(self) -> int:
        """Tokens under loss that have a token before them."""
        return int(np.count_nonzero(self.labels[1:] != IGNORED))


@dataclass(frozen=True)
class LengthReport:
    """Counts and lengths in tokens over training and evaluation records.

    Attributes:
        num_rows: rows read from the source(s).
        num_records: sequences made of them.
        median_tokens, p95_tokens, longest_tokens: lengths of records.
        longest_row: the source row of the longest record, from 0.
        total_tokens, loss_tokens: over all records.
        truncated: records cut on the right at ``seq_len``; truncated_tokens: tokens lost by it.
        split_rows: rows that became several records (long documents, turns that need their own context).
        dropped: reason -> rows (from 0) that are not trained on.
        duplicates: records that repeat an earlier one exactly (they are kept).
        seq_len: the limit.
    """

    num_rows: int
    num_records: int
    median_tokens: int
    p95_tokens: int
    longest_tokens: int
    longest_row: int
    total_tokens: int
    loss_tokens: int
    truncated: int
    truncated_tokens: int
    split_rows: int
    dropped: Mapping[str, tuple[int, ...]]
    duplicates: int
    seq_len: int

    @property
    def num_dropped(self) -> int:
        return sum(map(len, self.dropped.values()))

    def lines(self) -> list[str]:
        """For people; rows are counted from 1."""
        share = 100 * self.loss_tokens / max(1, self.total_tokens)
        lines = [
            f"{self.num_records:,} records from {self.num_rows:,} rows: {self.total_tokens:,} tokens, "
            f"{self.loss_tokens:,} under loss ({share:.0f} %)",
            f"length: median {self.median_tokens:,}, 95 % within {self.p95_tokens:,}, "
            f"longest {self.longest_tokens:,} tokens (row {self.longest_row + 1})",
        ]
        if self.split_rows:
            lines.append(f"{self.split_rows:,} {_rows(self.split_rows)} made several records each")
        if self.truncated:
            lines.append(
                f"{self.truncated:,} {_records(self.truncated)} cut at seq_len {self.seq_len:,} "
                f"({self.truncated_tokens:,} tokens lost); a larger --seq-len keeps them whole"
            )
        for reason, rows in self.dropped.items():
            shown = ", ".join(str(row + 1) for row in rows[:5]) + (" ..." if len(rows) > 5 else "")
            lines.append(f"{len(rows):,} {_rows(len(rows))} left out: {reason} (row {shown})")
        if self.duplicates:
            lines.append(f"{self.duplicates:,} {_records(self.duplicates)} repeating an earlier one exactly (kept)")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; rows from 0."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {"dropped": {reason: list(rows) for reason, rows in self.dropped.items()}}


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"


def _records(count: int) -> str:
    return "record" if count == 1 else "records"


def report_lengths(
    records: Sequence[Record],
    *,
    num_rows: int,
    dropped: Mapping[str, tuple[int, ...]],
    truncated: int,
    truncated_tokens: int,
    split_rows: int,
    seq_len: int,
) -> LengthReport:
    """The report over records (at least one)."""
    lengths = np.array([len(r) for r in records])
    longest = int(np.argmax(lengths))
    contents = {(r.input_ids.tobytes(), r.labels.tobytes()) for r in records}
    return LengthReport(
        num_rows=num_rows,
        num_records=len(records),
        median_tokens=int(np.median(lengths)),
        # The length that at least 95 % of the records do not exceed, a length that occurs.
        p95_tokens=int(np.quantile(lengths, 0.95, method="inverted_cdf")),
        longest_tokens=int(lengths[longest]),
        longest_row=records[longest].source_row,
        total_tokens=int(lengths.sum()),
        loss_tokens=sum(r.num_targets for r in records),
        truncated=truncated,
        truncated_tokens=truncated_tokens,
        split_rows=split_rows,
        dropped=dropped,
        duplicates=len(records) - len(contents),
        seq_len=seq_len,
    )
