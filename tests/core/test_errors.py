"""One line, one exit code, and the same error on the other side of a process boundary."""

import pickle

import pytest

from shardwise.core import errors
from shardwise.core.errors import LONGEST_LINE, RecipeError, ShardwiseError, one_line, shorten

CODES = {
    "RecipeError": 2,
    "DataError": 3,
    "CheckpointError": 4,
    "RankError": 5,
    "NumericsError": 6,
    "ResourceError": 7,
    "Preempted": 75,
}


def test_every_class_has_the_exit_code_of_the_contract() -> None:
    found = {kind.__name__: kind.exit_code for kind in ShardwiseError.__subclasses__()}
    assert found == CODES


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({}, "error: it broke"),
        ({"where": "r.yaml:3: model.width"}, "error: it broke (r.yaml:3: model.width)"),
        ({"why": "it was old"}, "error: it broke: it was old"),
        ({"fix": "buy another"}, "error: it broke: buy another"),
        (
            {"where": "here", "why": "it was old", "fix": "buy another"},
            "error: it broke (here): it was old; buy another",
        ),
        ({"why": "two\nlines\r\n and\ttabs\x1b[31m"}, "error: it broke: two lines and tabs [31m"),
        ({"why": "left\u202eright \ud800"}, "error: it broke: left right"),
    ],
)
def test_line_leaves_out_what_is_empty(parts: dict[str, str], line: str) -> None:
    assert RecipeError("it broke", **parts).line() == line
    assert str(RecipeError("it broke", **parts)) == line.removeprefix("error: ")


@pytest.mark.parametrize("name", sorted(CODES))
def test_pickling_keeps_all_parts(name: str) -> None:
    error = getattr(errors, name)("what", where="where", why="why", fix="fix")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 (bytes of our own making)
    assert type(copy) is type(error)
    assert (copy.what, copy.where, copy.why, copy.fix) == ("what", "where", "why", "fix")
    assert copy.line() == error.line()


@pytest.mark.parametrize("part", ["what", "where", "why", "fix"])
def test_a_long_part_is_cut_and_the_others_stay(part: str) -> None:
    parts = {"what": "broken thing", "where": "a.yaml:7: steps", "why": "reason", "fix": "remedy"}
    long = "begin " + "x" * 5000 + " end"
    line = RecipeError(**{**parts, part: long}).line()
    assert len(line) <= LONGEST_LINE
    assert "begin" in line and "end" in line and "…" in line
    assert all(text in line for key, text in parts.items() if key != part)


def test_all_parts_long_still_fit_and_the_place_keeps_its_end() -> None:
    where = "/long" * 100 + "/recipe.yaml:12: optimizer.learning_rate"
    line = RecipeError("w" * 900, where=where, why="y" * 900, fix="f" * 900).line()
    assert len(line) <= LONGEST_LINE
    assert "recipe.yaml:12: optimizer.learning_rate)" in line


def test_shorten_and_one_line() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("abcdefghij", 5) == "ab…ij"
    assert one_line("  a \n\n b\u2028c ") == "a b c"
