"""Rows of JSON arrays and of CSV files, with the position of each: ``file: item 3``, ``file:7``; columns of parquet.

A ``.json`` file is a list of objects, or one object a line like ``.jsonl``. A list is parsed item by item; the text of
the whole file is in memory, so large data belongs into ``.jsonl`` or parquet. A CSV file has a header; fields may be
quoted and hold newlines (RFC 4180). Malformed items end the run with their position, as malformed lines do.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.core.errors import DataError

LARGEST_LIST_BYTES = 1 << 31
_JSON_BLANKS = " \t\n\r"


def is_list(start: bytes) -> bool:
    """Whether a JSON file that starts so is a list, and not lines."""
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def rows_of_list(data: bytes, path: Path) -> Iterator[tuple[object, str]]:
    """(item, position) of a JSON list. ``data`` is the whole file, UTF-8.

    Raises:
        DataError: it is no list, or is cut off.
    """
    text = data.decode("utf-8-sig")
    at = text.index("[") + 1
    number = 0
    decoder = json.JSONDecoder()
    while True:
        at = _after_blanks(text, at)
        if text[at : at + 1] == "]":  # also behind a comma, which JSON does not allow
            break
        number += 1
        try:
            item, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, getattr(error, "pos", at)) + 1
            raise _malformed(path, number, line, str(error)) from None
        yield item, f"{path}: item {number}"
        at = _after_blanks(text, at)
        if text[at : at + 1] == ",":
            at += 1
        elif text[at : at + 1] != "]":
            raise _malformed(path, number, text.count("\n", 0, at) + 1, "no comma or bracket after it")
    if _after_blanks(text, at + 1) != len(text):
        raise _malformed(path, number, text.count("\n", 0, at) + 1, "there is text after the list")


def rows_of_csv(data: bytes, path: Path) -> Iterator[tuple[dict[str, object], str]]:
    """(fields, position) of each row after the header. ``data`` is the whole file, UTF-8.

    Raises:
        DataError: a row has another number of fields than the header, or quotes that do not end.
    """
    reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
    csv.field_size_limit(LARGEST_LIST_BYTES)
    header: list[str] | None = None
    line = 1
    try:
        for row in reader:
            # A row may have several lines: its own first one follows the last line of the row before.
            where = f"{path}:{line}"
            line = reader.line_num + 1
            if not row:
                continue
            if header is None:
                header = row
                _require_names(header, path)
            elif len(row) != len(header):
                why = f"it has {len(row)} fields, and the header {len(header)}"
                fix = "quote fields that hold commas or newlines"
                raise DataError("malformed CSV row", where=where, why=why, fix=fix)
            else:
                yield dict(zip(header, row, strict=True)), where
    except csv.Error as error:
        raise DataError(
            "malformed CSV row", where=f"{path}:{line}", why=str(error), fix="correct the quotes"
        ) from None


def _require_names(header: list[str], path: Path) -> None:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(f"two columns are named '{twice[0]}'", where=f"{path}:1", fix="rename one of them")


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in _JSON_BLANKS:
        at += 1
    return at


def _malformed(path: Path, item: int, line: int, why: str) -> DataError:
    fix = "write a list of objects, or one object a line"
    return DataError("malformed JSON list", where=f"{path}:{line}: item {item}", why=why, fix=fix)


def without_nulls(value: object) -> object:
    """A value of arrow without the nulls in its structs.

    Arrow gives all structs of a column the same fields, and those that a record does not have are null.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def columns_of(file: Any) -> frozenset[str] | None:
    """The columns of an open parquet file, from its footer; None if it has no rows."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as opened:
        return frozenset(opened.schema_arrow.names) if opened.metadata.num_rows else None


class ParquetRows:
    """An open parquet file; `number` counts the rows read or skipped so far."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.names: list[str] = list(file.schema_arrow.names)
        self.number = 0

    def values(self, name: str, skip: int) -> Iterator[object]:
        """The values of a column, behind `skip` rows; their row groups are not read."""
        groups = self._file.metadata
        first = 0
        while first < groups.num_row_groups and self.number + groups.row_group(first).num_rows <= skip:
            self.number += groups.row_group(first).num_rows
            first += 1
        later = list(range(first, groups.num_row_groups))
        for batch in self._file.iter_batches(batch_size=256, row_groups=later, columns=[name]):
            passed = min(batch.num_rows, max(0, skip - self.number))
            self.number += passed
            for value in _values_of_column(batch.column(0)[passed:]):
                self.number += 1
                yield value

    def fields(self, names: Sequence[str]) -> Iterator[dict[str, object]]:
        for batch in self._file.iter_batches(batch_size=256, columns=list(names)):
            for row in range(batch.num_rows):
                self.number += 1
                yield {name: without_nulls(batch.column(name)[row].as_py()) for name in names}


def _values_of_column(column: Any) -> Iterator[object]:
    """The Python values of an arrow array.

    If converting the whole array fails, convert one by one to find the bad row.
    """
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = (scalar.as_py() for scalar in column)
    yield from values
