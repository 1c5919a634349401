"""Rows that cover pairs, and few of them."""

from __future__ import annotations

from itertools import combinations, product

from tests.harness.covering import Row, covering_rows, few_of

FACTORS = {"a": [0, 1, 2], "b": ["x", "y"], "c": [False, True], "d": [1, 2, 3, 4]}


def allowed(row: Row) -> bool:
    return not (row["a"] == 2 and row["c"]) and not (row["b"] == "y" and row["d"] == 4)


def held(rows: list[Row]) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for row in rows for pair in combinations(row.items(), 2)}


def test_every_pair_that_can_be_is_in_some_row_and_no_other() -> None:
    rows = covering_rows(FACTORS, allowed)
    every = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    assert all(map(allowed, rows))
    assert held(rows) == held([row for row in every if allowed(row)])
    assert len(rows) < 20 < len(every)


def test_only_pairs_that_are_wanted_have_rows() -> None:
    """A row holds other pairs as well, but none is made for them."""
    rows = covering_rows(FACTORS, allowed, lambda pair: ("a", 1) in pair)
    assert all(row["a"] == 1 for row in rows) and len(rows) < len(covering_rows(FACTORS, allowed))
    assert {p for p in held(rows) if ("a", 1) in p} == {
        p for p in held(covering_rows(FACTORS, allowed)) if ("a", 1) in p
    }


def test_few_hold_every_value_and_every_pair_beside_a_factor() -> None:
    rows = covering_rows(FACTORS, allowed)
    values = {value for row in rows for value in row.items()}
    few, anchored = few_of(rows), few_of(rows, "a")
    assert {value for row in few for value in row.items()} == values
    assert {pair for pair in held(anchored) if "a" in dict(pair)} == {p for p in held(rows) if "a" in dict(p)}
    assert len(few) <= len(anchored) <= len(rows) and len(few) < len(rows)
    assert all(row in rows for row in (*few, *anchored))
    assert all(
        {value for other in few if other is not row for value in other.items()} < values for row in few
    )
