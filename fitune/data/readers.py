"""Files to rows: JSON, JSONL, CSV, TSV, Parquet, plain text, the bundled demo set, or a dataset of a hub.

Nothing is dropped silently: a file is read whole or refused with the line (or byte) that is wrong.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fitune.errors import UserError
from fitune.files import parse_json

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent / "demo"

_READABLE = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
_READABLE_NAMES = ", ".join(_READABLE)
_UNPACK = {
    ".gz": "gunzip -k {0}",
    ".zst": "zstd -dk {0}",
    ".xz": "xz -dk {0}",
    ".bz2": "bunzip2 -k {0}",
    ".zip": "unzip {0}",
}
_MAX_CELL_CHARS = 2**31 - 1
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?(@[\w.\[\]:%+-]+)?")
_SHOWN_NAMES = 8


@dataclass(frozen=True)
class Table:
    """Rows as they stand in the source.

    Attributes:
        rows: one dict per record, in the order of the source.
        kind: ``jsonl json csv parquet text hub``: how it was read, whatever the file is called.
        notes: what a person should know about the reading, one line each.
        path: the file or the hub id, as given.
        has_header: False for a CSV file whose first row is data (columns are then ``column_1`` ...).
    """

    rows: list[dict[str, Any]]
    kind: str
    notes: list[str] = field(default_factory=list)
    path: str = ""
    has_header: bool = True

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))


def read(path_or_id: str, *, hub: str = "huggingface", split: str | None = None, limit: int | None = None) -> Table:
    """Read a data file, the bundled set (``demo``), or a dataset of a hub.

    Args:
        path_or_id: a file, ``demo``, or a dataset id: ``owner/name``, ``owner/name:config``, ``owner/name@split``.
        hub: ``huggingface`` or ``modelscope``, for ids.
        split: the split to read from a hub (``train`` unless given here or in the id); for ``demo``: train or eval.
        limit: keep only the first rows.

    Raises:
        UserError: missing, empty, broken, not UTF-8, of an unknown kind, or the hub cannot deliver it.
    """
    if path_or_id == DEMO:
        name = "eval" if split in ("eval", "validation", "test") else "train"
        table = read_file(DEMO_FOLDER / f"{name}.jsonl")
    elif _is_hub_id(path_or_id):
        from fitune.data.hub import read_hub

        return _limited(read_hub(path_or_id, hub=hub, split=split, limit=limit), limit)
    else:
        table = read_file(Path(path_or_id).expanduser())
    return _limited(table, limit)


def check_there(path_or_id: str) -> None:
    """Raise now when a local data file is missing or of an unknown kind; ids of a hub are not looked up.

    Raises:
        UserError: as `read`.
    """
    if path_or_id != DEMO and not _is_hub_id(path_or_id):
        _check_file(Path(path_or_id).expanduser())


def read_file(path: Path) -> Table:
    """Read one local file; the suffix says how, the content has the last word between JSON and JSONL."""
    _check_file(path)
    data = path.read_bytes()
    if not data.strip(b"\xef\xbb\xbf \t\r\n"):
        raise UserError(f"cannot train on {path.name}", "the file is empty", "give a file with at least one record")
    kind = _READABLE[path.suffix.lower()]
    if kind == "parquet":
        table = _read_parquet(path)
    else:
        text = _decode(path, data)
        reader = {"json": _read_json, "jsonl": _read_jsonl, "csv": _read_csv, "text": _read_text}[kind]
        table = reader(path, text)
    if not table.rows:
        raise UserError(f"cannot train on {path.name}", "it holds no records", "give a file with at least one record")
    return table


def _limited(table: Table, limit: int | None) -> Table:
    if limit is None or len(table.rows) <= limit:
        return table
    note = f"only the first {limit} of {len(table.rows)} records are used, as asked"
    return Table(table.rows[:limit], table.kind, [*table.notes, note], table.path, table.has_header)


def _is_hub_id(text: str) -> bool:
    """A name with no file behind it, no data suffix, and no look-alike in its folder."""
    path = Path(text).expanduser()
    if path.exists() or path.suffix.lower() in _READABLE or path.suffix.lower() in _UNPACK:
        return False
    if not _HUB_ID.fullmatch(text) or text.startswith("."):
        return False
    return "/" in text or not _nearest_names(path)


def _nearest_names(path: Path) -> list[str]:
    if not path.parent.is_dir():
        return []
    names = [p.name for p in path.parent.iterdir() if p.is_file()]
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    same_stem = [n for n in names if Path(n).stem == path.stem]
    return list(dict.fromkeys(near + same_stem))[:3]


def _check_file(path: Path) -> None:
    """Raise unless ``path`` is a file with a suffix that can be read."""
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix.lower() in _READABLE)
        held = f"it holds {', '.join(inside[:_SHOWN_NAMES])}" if inside else "it holds no data file"
        first = inside[0] if inside else "data.jsonl"
        raise UserError(f"{path} is a folder, not a data file", held, f"name one file, for example {path / first}")
    if not path.exists():
        if not path.parent.is_dir():
            why, fix = f"there is no folder {path.parent}", "check the path"
        else:
            near = _nearest_names(path)
            why = f"there is no such file in {path.parent.resolve()}"
            fix = f"did you mean {' or '.join(near)}?" if near else "check the name and the folder"
        raise UserError(f"cannot find the data file {path}", why, fix)
    if not path.is_file():
        raise UserError(
            f"cannot read {path.name}",
            "it is not a regular file (a pipe or a device may never end)",
            "write its content to a file first",
        )
    suffix = path.suffix.lower()
    if suffix in _READABLE:
        return
    if suffix in _UNPACK:
        raise UserError(f"cannot read {path.name}", "it is compressed", f"unpack it: {_UNPACK[suffix].format(path)}")
    if suffix in (".xlsx", ".xls", ".ods"):
        raise UserError(f"cannot read {path.name}", "it is a spreadsheet", "save the sheet as CSV (UTF-8)")
    raise UserError(
        f"cannot read {path.name}",
        f"the suffix {suffix!r} is not one fitune knows" if suffix else "the file has no suffix",
        f"convert or rename it to one of {_READABLE_NAMES}",
    )


def _decode(path: Path, data: bytes) -> str:
    """UTF-8 text without a byte order mark; otherwise an error that says where and how to convert."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        line = data.count(b"\n", 0, offset) + 1
        guess = _guess_encoding(data)
        converted = path.with_name(f"{path.stem}.utf8{path.suffix}")
        fix = f"convert it: iconv -f {guess} -t UTF-8 {path} > {converted}" if guess else "give a text file in UTF-8"
        seems = f"; it looks like {guess}" if guess else "; it looks like a binary file"
        raise UserError(
            f"cannot read {path.name}",
            f"it is not UTF-8: byte 0x{data[offset]:02x} at offset {offset} (line {line}){seems}",
            fix,
        ) from None


def _guess_encoding(data: bytes) -> str | None:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16"
    sample = data[:65536]
    if b"\x00" in sample:
        return None
    for name, pattern in (("GB18030", r"[\u4e00-\u9fff]"), ("SHIFT_JIS", r"[\u3040-\u30ff]")):
        text = sample.decode(name.lower(), errors="replace")
        # A guess must explain nearly all of it: one character in fifty may fail (the sample is cut somewhere).
        if text.count("\ufffd") * 50 <= len(text) and len(re.findall(pattern, text)) * 20 >= len(text):
            return name
    return "WINDOWS-1252"


# --- JSON and JSONL ---------------------------------------------------------------------------------------------------


def _read_json(path: Path, text: str) -> Table:
    try:
        value = parse_json(text)
    except ValueError as problem:
        error = _as_decode_error(problem)
        first_line = text.lstrip().split("\n", 1)[0]
        if error.msg.startswith("Extra data") and _is_json_object(first_line):
            table = _read_jsonl(path, text)
            notes = [*table.notes, f"{path.name} is JSON Lines, whatever its name"]
            return Table(table.rows, "jsonl", notes, str(path))
        raise _broken_json(path, error.lineno, error.colno, error.msg) from None
    rows, notes = _rows_of_json(path, value)
    return Table(rows, "json", notes, str(path))


def _read_jsonl(path: Path, text: str) -> Table:
    if text.lstrip().startswith("["):
        try:
            rows, notes = _rows_of_json(path, parse_json(text))
        except ValueError:
            pass  # not one array: the line by line reading below says which line is wrong
        else:
            return Table(rows, "json", [*notes, f"{path.name} is one JSON array, whatever its name"], str(path))
    rows, blank, first_error, bad = [], 0, None, []
    lines = text.removesuffix("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            blank += 1
            continue
        try:
            row = parse_json(line)
        except ValueError as problem:
            error = _as_decode_error(problem)
            first_error = first_error or (number, error.colno, error.msg)
            bad.append(number)
            continue
        if not isinstance(row, dict):
            message = f"a {_json_type(row)} where an object {{...}} is expected"
            first_error = first_error or (number, 1, message)
            bad.append(number)
            continue
        rows.append(row)
    if first_error:
        raise _broken_json(path, *first_error, bad_lines=bad, num_lines=len(lines))
    notes = [f"{blank} blank {'line' if blank == 1 else 'lines'} skipped"] if blank else []
    return Table(rows, "jsonl", notes, str(path))


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _as_decode_error(problem: ValueError) -> json.JSONDecodeError:
    """The other reasons for which JSON cannot be read (nesting, a number of thousands of digits), at its beginning."""
    if isinstance(problem, json.JSONDecodeError):
        return problem
    return json.JSONDecodeError(str(problem).split(";")[0], "", 0)


def _broken_json(path: Path, line: int, column: int, message: str, bad_lines: Iterable[int] = (), num_lines: int = 0):
    message = message[0].lower() + message[1:]
    message = message.replace("string starting at", "string that starts there")
    bad = list(bad_lines)
    others = ""
    if bad:
        shown = ", ".join(map(str, bad[:_SHOWN_NAMES])) + (" ..." if len(bad) > _SHOWN_NAMES else "")
        others = f"; {len(bad)} of {num_lines} lines cannot be read (line {shown})"
    return UserError(
        f"cannot read {path.name}",
        f"line {line}, column {column} is not valid JSON: {message}{others}",
        f"correct line {line}, or remove it; fitune does not skip broken lines by itself",
    )


def _rows_of_json(path: Path, value: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of a parsed JSON document: a list, an object holding one list, or an object of equal columns."""
    notes: list[str] = []
    if isinstance(value, dict):
        lists = {k: v for k, v in value.items() if isinstance(v, list) and v and isinstance(v[0], (dict, list))}
        chosen = next((k for k in ("train", "data") if k in lists), next(iter(lists)) if len(lists) == 1 else None)
        if chosen is not None and not _is_one_record(value):
            notes.append(f"records taken from {chosen!r} of the JSON object")
            value = value[chosen]
        elif _is_columns(value):
            notes.append("the JSON object holds columns; turned into records")
            value = [dict(zip(value, cells, strict=True)) for cells in zip(*value.values(), strict=True)]
        else:
            value = [value]
    if not isinstance(value, list):
        raise UserError(
            f"cannot read {path.name}",
            f"its JSON is a {_json_type(value)}",
            'write a list of records: [{"prompt": "...", "response": "..."}, ...]',
        )
    if value and all(isinstance(v, str) for v in value):
        return [{"text": v} for v in value], [*notes, "a list of strings: each is one text"]
    if value and all(isinstance(v, list) and v and all(isinstance(m, dict) for m in v) for v in value):
        return [{"messages": v} for v in value], [*notes, "a list of lists: each is one conversation"]
    for number, row in enumerate(value, start=1):
        if not isinstance(row, dict):
            raise UserError(
                f"cannot read {path.name}",
                f"record {number} is a {_json_type(row)} where an object {{...}} is expected",
                "make every record an object with the same columns",
            )
    return value, notes


def _is_columns(value: dict[str, Any]) -> bool:
    """Several lists of one length."""
    lists = [v for v in value.values() if isinstance(v, list)]
    return 1 < len(lists) == len(value) and len(set(map(len, lists))) == 1


def _is_one_record(value: dict[str, Any]) -> bool:
    """One conversation (or one nested alpaca task) as the whole file, rather than a wrapper around records."""
    return any(k in value for k in ("messages", "conversations", "instruction"))


def _json_type(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "number", float: "number", list: "list", dict: "object"}
    return names.get(type(value), "null")


# --- CSV --------------------------------------------------------------------------------------------------------------

_HEADER_WORDS = {
    *("prompt", "response", "completion", "question", "answer", "query", "instruction", "input", "output", "text"),
    *("system", "context", "messages", "conversations", "history", "chosen", "rejected", "id", "label", "category"),
    *("问题", "答案", "回答", "提问", "指令", "输入", "输出", "文本"),
}


def _read_csv(path: Path, text: str) -> Table:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter(text)
    old_limit = csv.field_size_limit(_MAX_CELL_CHARS)
    records: list[tuple[int, list[str]]] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        start = 1
        for cells in reader:
            if any(cell.strip() for cell in cells):
                records.append((start, cells))
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"cannot read {path.name}",
            f"the record that starts at line {start} is not valid CSV: {error}",
            'quote cells that hold commas, quotes or line breaks, and write a quote inside them twice ("")',
        ) from None
    finally:
        csv.field_size_limit(old_limit)
    if not records:
        return Table([], "csv", [], str(path))
    has_header = _first_row_is_header([cells for _, cells in records])
    width = len(records[0][1])
    names = [c.strip() for c in records[0][1]] if has_header else [f"column_{i + 1}" for i in range(width)]
    names = [name or f"column_{i + 1}" for i, name in enumerate(names)]
    if len(set(names)) < width:
        double = next(n for n in names if names.count(n) > 1)
        why = f"two columns are called {double!r}"
        raise UserError(f"cannot read {path.name}", why, "give every column its own name")
    for line, cells in records:
        if len(cells) != width:
            raise UserError(
                f"cannot read {path.name}",
                f"line {line} has {len(cells)} cells where the first row has {width}",
                "quote cells that hold the separator, or correct that line",
            )
    notes = [] if has_header else [f"no header row: the columns are called {', '.join(names)}"]
    body = records[1:] if has_header else records
    return Table([dict(zip(names, cells, strict=True)) for _, cells in body], "csv", notes, str(path), has_header)


def _delimiter(text: str) -> str:
    """The separator seen most often outside quotes in the first record; a comma when none is."""
    outside = re.sub(r'"(?:[^"]|"")*"', "", text[:65536]).split("\n", 1)[0]
    return max(",;\t|", key=lambda mark: (outside.count(mark), mark == ","))


def _first_row_is_header(rows: list[list[str]]) -> bool:
    """Known column names, or short distinct labels above clearly longer cells."""
    first = [cell.strip() for cell in rows[0]]
    if any(cell.lower() in _HEADER_WORDS for cell in first) and all(len(cell) <= 40 for cell in first):
        return True
    if len(rows) < 2 or len(set(first)) < len(first) or not all(first):
        return False
    labels = all(re.fullmatch(r"[^\W\d][\w .\-/()]{0,30}", cell) and len(cell.split()) <= 3 for cell in first)
    below = rows[1:101]
    mean_below = sum(len(cell) for row in below for cell in row) / max(1, sum(len(row) for row in below))
    mean_first = sum(map(len, first)) / len(first)
    return labels and mean_below > 2 * mean_first


# --- Parquet and text -------------------------------------------------------------------------------------------------


def _read_parquet(path: Path) -> Table:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"cannot read {path.name}", "pyarrow is not installed", "pip install pyarrow") from None
    try:
        rows = pq.ParquetFile(path).read().to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).split("\n", 1)[0]
        raise UserError(
            f"cannot read {path.name}",
            f"it is not a whole Parquet file: {reason}",
            "download or write it again, or convert it to JSONL",
        ) from None
    return Table(rows, "parquet", [], str(path))


def _read_text(path: Path, text: str) -> Table:
    notes = [f"{path.name} is one document"]
    if "\r\n" in text:
        text = text.replace("\r\n", "\n")
        notes.append("Windows line ends (CRLF) turned into LF")
    return Table([{"text": text}], "text", notes, str(path))
