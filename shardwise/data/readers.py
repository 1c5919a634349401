"""Read documents from txt, jsonl and parquet files, as a stream of pieces of about 1 MiB or less.

A *document* is a whole .txt file, the text of one JSON line, or one row of a parquet column. It is read in *pieces*, so
tokenizing a 50 MB line, or a file larger than memory, needs the memory of one piece. A piece ends after a line if
possible, else after a blank, else between two characters.

Pieces are bytes, checked to be UTF-8 without NUL. 0x00 separates documents in the bytes vocabulary; in text it means
damage: a hole in a sparse file, UTF-16, a binary. The first malformed byte, line or row ends the run with its position:
file:line, byte. Skipping malformed data, or replacing it by U+FFFD, would silently train on less than the recipe says.
The source is tokenized before the first step, so the error comes before the first step too.

*Records* are the same lines and rows with all their fields, for data with completions (`formats`).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, cast

from shardwise.core.errors import DataError
from shardwise.core.extras import install
from shardwise.data.tables import LARGEST_LIST_BYTES, ParquetRows, is_list, rows_of_csv, rows_of_list

PIECE_BYTES = 1 << 20
LONGEST_LINE_BYTES = 1 << 28

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet")
NAMED_ONLY = (".json", ".json.gz")
"""Suffixes that are read when a file is named or matched by a glob: in folders, such files are often settings."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_JSON_NAMES = {dict: "object", bool: "boolean", int: "number", float: "number", type(None): "null"}


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of a document: valid UTF-8 without NUL. It is empty only at the end of a document (`ends`)."""

    data: bytes
    ends: bool


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object or a row, with its position."""

    fields: Mapping[str, object]
    where: str


def is_data_file(path: Path, named: bool = True) -> bool:
    """Whether `read_file` reads files with this suffix; a file of a folder is not ``named``."""
    return path.name.lower().endswith((*SUFFIXES, *NAMED_ONLY) if named else SUFFIXES)


def read_file(path: Path, text_key: str, skip: int = 0) -> Iterator[TextPiece]:
    """The documents of a data file, by its suffix; `text_key` is the JSON key or the parquet column.

    Args:
        skip: number of documents to leave out at the start; they are not parsed.

    Raises:
        DataError: the file is unreadable, empty or malformed.
    """
    with _reading_errors(path):
        kind = _kind_of(path)
        if kind == "parquet":
            yield from _read_parquet(path, text_key, skip)
        elif kind == "txt":
            yield from () if skip else _read_text_file(path)
        else:
            for row, where in _rows_of(path, kind, skip):
                yield from pieces(_text_of(row, text_key, where))


def read_records(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    """The records of a jsonl or parquet file; from parquet only the columns in `keys`.

    Raises:
        DataError: the file is unreadable, empty, malformed, or a text file.
    """
    with _reading_errors(path):
        kind = _kind_of(path)
        if kind == "parquet":
            yield from _records_of_parquet(path, keys)
        elif kind != "txt":
            for row, where in _rows_of(path, kind):
                yield Record(_object(row, where, "write one JSON object a line"), where)
        else:
            raise DataError(
                "no records in a text file",
                where=str(path),
                why="only .jsonl, .json, .csv and .parquet have records with fields",
                fix="name those as data.source, or write data.format: text",
            )


@contextmanager
def _reading_errors(path: Path) -> Iterator[None]:
    """Turn errors from reading `path` into DataErrors."""
    try:
        if path.stat().st_size == 0:
            raise DataError(
                "empty data file",
                where=str(path),
                why="0 bytes, perhaps an interrupted copy",
                fix="restore or remove it",
            )
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            "damaged gzip file", where=str(path), why=str(error), fix="restore it, or remove it"
        ) from None
    except OSError as error:
        raise DataError(
            "cannot read data file", where=str(path), why=error.strerror or str(error), fix="check the file"
        ) from None


def _kind_of(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return next((kind for kind in ("parquet", "jsonl", "json", "csv") if name.endswith(f".{kind}")), "txt")


def _open(path: Path) -> IO[bytes]:
    if path.name.lower().endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")


# -- text


def _read_text_file(path: Path) -> Iterator[TextPiece]:
    line = 1
    offset = 0
    rest = b""
    with _open(path) as file:
        while True:
            # The rest is shorter than a piece, so a read that does not fill one is the last.
            data = rest + file.read(PIECE_BYTES - len(rest))
            at_end = len(data) < PIECE_BYTES
            cut = len(data) if at_end else _piece_length(data)
            piece = data[:cut]
            rest = data[cut:]
            _check_text(piece, path, line, offset)
            bare = piece.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else piece
            # The last piece may be empty; it ends the document.
            yield TextPiece(bare, ends=at_end)
            if at_end:
                return
            line += piece.count(b"\n")
            offset += cut


def _piece_length(data: bytes) -> int:
    """Length of the first piece of `data`: up to a line end, else a blank, else a character boundary."""
    for mark in (b"\n", b" "):
        if (index := data.rfind(mark)) > 0:
            return index + 1
    # A character of UTF-8 has at most three continuation bytes, 10xxxxxx, behind its first byte, 11xxxxxx.
    cut = len(data)
    while cut > len(data) - 3 and data[cut - 1] & 0xC0 == 0x80:
        cut -= 1  # skip the continuation bytes of the last character
    return cut - 1 if data[cut - 1] >= 0xC0 else len(data)


def _check_text(data: bytes, path: Path, line: int, offset: int) -> None:
    """Raise DataError at the first byte of `data` that is not text. `data` starts at `line` and `offset`."""
    bad = data.find(0)
    what = "NUL in text"
    why = "the file is damaged, binary or UTF-16"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        if bad < 0 or error.start < bad:
            bad = error.start
            what = "text is not UTF-8"
            why = f"byte 0x{data[bad]:02x}: {error.reason}"
    if bad >= 0:
        where = _line_position(path, line + data.count(b"\n", 0, bad), offset + bad)
        raise DataError(what, where=where, why=why, fix="convert it to UTF-8 text, or remove it")


def pieces(data: bytes) -> Iterator[TextPiece]:
    """Split a document in memory into pieces."""
    start = 0
    while len(data) - start > PIECE_BYTES:
        piece = data[start : start + PIECE_BYTES]
        cut = _piece_length(piece)
        yield TextPiece(piece[:cut], ends=False)
        start += cut
    yield TextPiece(data[start:], ends=True)


def _line_position(path: Path, line: int, byte: int) -> str:
    return f"{path}:{line}, byte {byte}"


# -- JSON lines


def _rows_of_jsonl(path: Path, skip: int) -> Iterator[tuple[object, str]]:
    """(parsed line, position) of each line that is not blank, behind `skip` of them."""
    number = 0
    offset = 0
    with _open(path) as file:
        while line := file.readline(LONGEST_LINE_BYTES + 1):
            number += 1
            where = _line_position(path, number, offset)
            if len(line) > LONGEST_LINE_BYTES:  # a file without newlines would fill the memory
                raise DataError(
                    "line too long",
                    where=where,
                    why=f"more than {LONGEST_LINE_BYTES >> 20} MiB",
                    fix="write one JSON object a line",
                )
            # A line is counted as below: blank ones are no records. Skipped ones are not parsed.
            if skip and line.strip(b"\xef\xbb\xbf \t\r\n\v\f"):
                skip -= 1
                offset += len(line)
                continue
            _check_text(line, path, number, offset)
            bare = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if bare := bare.strip():
                yield _parse(bare, where), where
            offset += len(line)


def _rows_of(path: Path, kind: str, skip: int = 0) -> Iterator[tuple[object, str]]:
    """(row, position) of a CSV file, of JSON lines, or of a JSON list, behind `skip` of them."""
    with _open(path) as file:
        if kind == "jsonl" or (kind == "json" and not is_list(file.read(PIECE_BYTES))):
            yield from _rows_of_jsonl(path, skip)
            return
        file.seek(0)
        data = file.read(LARGEST_LIST_BYTES + 1)
    if len(data) > LARGEST_LIST_BYTES:
        why = f"more than {LARGEST_LIST_BYTES >> 30} GiB, which would be read at once"
        raise DataError(
            "file too large", where=str(path), why=why, fix="write one JSON object a line, as .jsonl"
        )
    _check_text(data, path, 1, 0)
    yield from islice(rows_of_list(data, path) if kind == "json" else rows_of_csv(data, path), skip, None)


def _parse(line: bytes, where: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        why = f"{error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits; brackets nested 100,000 deep
        why = str(error)
    raise DataError("malformed JSON line", where=where, why=why, fix="write one JSON object a line")


def _text_of(row: object, text_key: str, where: str) -> bytes:
    """The text of one JSON object, checked."""
    fields = _object(row, where, f'write {{"{text_key}": "..."}} on every line')
    if text_key not in fields:
        raise missing_key(text_key, list(fields), where)
    return checked_text(fields[text_key], text_key, where)


def _object(row: object, where: str, fix: str) -> dict[str, object]:
    if not isinstance(row, dict):
        raise DataError(
            "line is not a JSON object", where=where, why=f"it is of type {json_kind(row)}", fix=fix
        )
    return row


# -- values, also those of parquet and datasets


def missing_key(text_key: str, present: list[str], where: str) -> DataError:
    """The error for a row, a schema or a dataset without `text_key`."""
    return DataError(
        f"no '{text_key}'",
        where=where,
        why=f"it has {', '.join(present[:8]) or 'nothing'}{', …' if len(present) > 8 else ''}",
        fix="set data.text_key to the field that holds the text",
    )


def checked_text(
    value: object,
    text_key: str,
    where: str,
    fix: str = "make it a string, or name another key as data.text_key",
) -> bytes:
    """`value` as UTF-8.

    Raises:
        DataError: it is not a string, or contains NUL or a lone surrogate; the error names `where`.
    """
    if not isinstance(value, str):
        raise DataError(
            f"'{text_key}' is not text",
            where=where,
            why=f"it is of type {json_kind(value)}",
            fix=fix,
        )
    if "\0" in value:
        raise DataError(
            "NUL in text", where=where, why=f"character {value.index(chr(0))} is U+0000", fix="remove it"
        )
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        why = f"character {error.start} is half of a surrogate pair"
        raise DataError("text is not Unicode", where=where, why=why, fix="remove it") from None


def json_kind(value: object) -> str:
    """JSON's name for the type of `value`."""
    return _JSON_NAMES.get(type(value), type(value).__name__)


# -- parquet


def _read_parquet(path: Path, text_key: str, skip: int) -> Iterator[TextPiece]:
    with _parquet(path) as rows:
        if text_key not in rows.names:
            raise missing_key(text_key, rows.names, str(path))
        for value in rows.values(text_key, skip):
            yield from pieces(checked_text(value, text_key, f"{path}: row {rows.number}"))


def _records_of_parquet(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    with _parquet(path) as rows:
        names = [name for name in rows.names if name in keys]
        for fields in rows.fields(names or rows.names):
            yield Record(fields, f"{path}: row {rows.number}")


@contextmanager
def _parquet(path: Path) -> Iterator[ParquetRows]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            "cannot read parquet",
            where=str(path),
            why="the package pyarrow is not installed",
            fix=install("hf"),
        ) from None
    rows: ParquetRows | None = None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = ParquetRows(file)
            _require_one_each(rows.names, path)
            yield rows
    except UnicodeDecodeError as error:
        where = f"{path}: row {rows.number + 1 if rows else 1}, byte {error.start}"
        raise DataError("text is not UTF-8", where=where, why=error.reason, fix="rewrite the file") from None
    except pyarrow.ArrowException as error:
        raise DataError(
            "unreadable parquet file",
            where=f"{path}: after row {rows.number}" if rows and rows.number else str(path),
            why=str(error),
            fix="restore it from its origin, or remove it",
        ) from None


def _require_one_each(names: Sequence[str], path: Path) -> None:
    """Raise DataError for two columns of one name, of which neither can be read by its name."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"two columns are named '{twice[0]}'", where=str(path), fix="rename one of them, or remove it"
        )
