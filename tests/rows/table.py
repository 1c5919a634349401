"""rows.json: named tables of rows, one row a line, and which of the rows `make test` runs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.covering import Row

FILE = Path(__file__).parent / "rows.json"


@dataclass(frozen=True)
class Rows:
    """All rows of a table, and the few of the fast tier."""

    rows: Sequence[Row]
    few: Sequence[Row]

    def cases(self, made: Callable[[Row], Any] = lambda row: row) -> list[Any]:
        """A parameter of a test for each row; rows that are not among the few are ``long``."""
        marks = [() if row in self.few else (pytest.mark.long,) for row in self.rows]
        return [
            pytest.param(made(row), marks=some, id=name_of(row))
            for row, some in zip(self.rows, marks, strict=True)
        ]


def name_of(row: Row) -> str:
    return "-".join(str(value) for value in row.values())


def text_of(tables: Mapping[str, Rows]) -> str:
    """The file's text."""
    return (
        "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines(table)}" for name, table in tables.items()) + "\n}\n"
    )


def read(name: str) -> Rows:
    return _tables()[name]


def _lines(table: Rows) -> str:
    factors = list(table.rows[0])
    lines = [json.dumps([row in table.few, *(row[factor] for factor in factors)]) for row in table.rows]
    return f'{{"factors": {json.dumps(factors)}, "rows": [\n' + ",\n".join(lines) + "\n]}"


@functools.cache
def _tables() -> dict[str, Rows]:
    found = {}
    for name, table in json.loads(FILE.read_text(encoding="utf-8")).items():
        rows = [dict(zip(table["factors"], values, strict=True)) for _, *values in table["rows"]]
        few = [row for row, (fast, *_) in zip(rows, table["rows"], strict=True) if fast]
        found[name] = Rows(rows, few)
    return found
