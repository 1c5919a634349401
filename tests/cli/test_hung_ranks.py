"""Ranks that hang under the command ``train``; tests/torture/hangs.py draws many of them at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands import Shell
from tests.torture.hanging_model import FAULTS
from tests.torture.hangs import Fault, trial


def test_a_rank_that_holds_its_gil_is_named(shell: Shell, tmp_path: Path) -> None:
    fault = Fault("gil", rank=1, watchdog=1.0)
    verdict = trial(shell, tmp_path, fault)
    assert verdict.is_right(fault), verdict
    assert (
        "in your code, holding_the_gil (hanging_model.py:" in verdict.line
        and "; the same command" in verdict.line
    )


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_every_kind_of_hang(shell: Shell, tmp_path: Path, kind: str, rank: int) -> None:
    fault = Fault(kind, rank, ranks=3 if kind == "skip" else 2, stage=3 if rank else 1)
    verdict = trial(shell, tmp_path, fault)
    assert verdict.is_right(fault), verdict
