"""A few cases of each fuzz tool; a tenth of its full count in the tier `long`."""

from __future__ import annotations

import pytest

from tests.harness.commands import Shell
from tests.harness.pool import Pool
from tests.torture import bitflips, files, kills, recipes
from tests.torture.cases import tortured

TOOLS = {"recipes": (recipes, 120, 500), "files": (files, 72, 200), "bitflips": (bitflips, 40, 100)}


def broken(name: str, count: int, seed: int) -> list[str]:
    tool = TOOLS[name][0]
    return tortured(tool.cases, count, seed, tool.ALLOWED).broken


@pytest.mark.parametrize("name", TOOLS)
def test_malformed_input_keeps_the_promises(name: str) -> None:
    assert broken(name, TOOLS[name][1], seed=3) == []


@pytest.mark.long
@pytest.mark.parametrize("name", TOOLS)
def test_much_malformed_input_keeps_the_promises(name: str) -> None:
    assert broken(name, TOOLS[name][2], seed=4) == []


@pytest.mark.long
def test_a_killed_run_ends_as_the_uninterrupted_one(pool: Pool) -> None:
    report = kills.chains(Shell(pool), 30, seed=2)
    assert report["kills"] == 30 and not report["different"]


@pytest.mark.long
def test_every_layout_resumes_every_other(pool: Pool) -> None:
    report = kills.pairs(Shell(pool), ("zero3", "tensor", "pipeline"))
    assert report["within"], report


def test_a_broken_promise_is_noticed() -> None:
    def cases(count, random):  # type: ignore[no-untyped-def]
        yield "raises", lambda: {}["key"]
        yield "fine", lambda: None

    assert ["KeyError" in each for each in tortured(cases, 2, 0, (0,)).broken] == [True]
