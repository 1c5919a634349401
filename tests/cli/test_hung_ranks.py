"""Ranks that hang under the command ``train``; tests/torture/hangs.py draws many of them at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands import Shell
from tests.torture.hanging_model import FAULTS
from tests.torture.hangs import Fault, prepare, trial


def test_a_rank_that_holds_its_gil_is_named(shell: Shell, tmp_path: Path) -> None:
    fault = Fault("gil", rank=1, watchdog=1.0)
    verdict = trial(shell, tmp_path, fault)
    assert verdict.is_right(fault), verdict
    assert (
        "in your code, holding_the_gil (hanging_model.py:" in verdict.line
        and "; the same command" in verdict.line
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "says"), [("lock", "in your code, locked (hanging_model.py:"), ("gil", "it does not answer")]
)
def test_ranks_of_torchrun_name_it_themselves(shell: Shell, tmp_path: Path, kind: str, says: str) -> None:
    """Rank 0 is the one that hangs, so another has to judge. A rank whose GIL is held is left to torchrun."""
    prepare(tmp_path, Fault(kind, rank=0))
    words = ("train", "recipe.yaml", "--out", "run")
    with shell.start_ranks(2, *words, folder=tmp_path) as ranks:
        ranks[1].wait(60)  # the code is lost: the process ends without Python's end
        if kind == "lock":
            ranks[0].wait(10)
        lines = [line for rank in ranks for line in rank.stderr.splitlines() if line.startswith("error: ")]
    (line,) = lines
    assert line.startswith("error: rank 0 hung" + " in step 4" * (kind == "lock") + " (of 2, on ")
    assert f"): no progress for 3 s, {says}" in line


@pytest.mark.long
def test_a_folder_that_looks_like_an_option(shell: Shell, tmp_path: Path) -> None:
    prepare(tmp_path, Fault("sleep", rank=-1, ranks=1))
    done = shell.run("train", "recipe.yaml", "steps=1", "--out", "-x", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "-x" / "report.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_every_kind_of_hang(shell: Shell, tmp_path: Path, kind: str, rank: int) -> None:
    fault = Fault(kind, rank, ranks=3 if kind == "skip" else 2, stage=3 if rank else 1)
    verdict = trial(shell, tmp_path, fault)
    assert verdict.is_right(fault), verdict
