"""Which rows of a test `make test` runs; `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Values for ``pytest.mark.parametrize``: those that are not ``chosen`` are marked ``long``.

    Raises:
        ValueError: a chosen value is not among the values.
    """
    rows = list(values)
    if missing := [value for value in chosen if value not in rows]:
        raise ValueError(f"not among the values: {missing}")
    return [row if row in chosen else _long(row) for row in rows]


def _long(row: Any) -> Any:
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.long)
