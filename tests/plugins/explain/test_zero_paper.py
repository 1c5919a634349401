"""docs/concepts/zero.md quotes the ZeRO paper's formulas; they give its table of model state per rank, all 54 cells.

Rajbhandari et al. 2020 (arXiv 1910.02054), table 1: bytes per parameter in 16-bit training with Adam, N ranks.
"""

from __future__ import annotations

import re
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "zero.md"
TABLE = re.compile(r"^\| stage \| the paper \|.*?\n\n", re.MULTILINE | re.DOTALL)
TERM = re.compile(r"(\d+)(/N)?")

RANKS = (1, 4, 16, 64, 256, 1024)
PRINTED = {
    (7.5e9, 1): "120 52.5 35.6 31.4 30.4 30.1",
    (7.5e9, 2): "120 41.3 21.6 16.6 15.4 15.1",
    (7.5e9, 3): "120 30 7.5 1.88 0.47 0.12",
    (128e9, 1): "2048 896 608 536 518 513",
    (128e9, 2): "2048 704 368 284 263 257",
    (128e9, 3): "2048 512 128 32 8 2",
    (1e12, 1): "16000 7000 4750 4187 4046 4011",
    (1e12, 2): "16000 5500 2875 2218 2054 2013",
    (1e12, 3): "16000 4000 1000 250 62.5 15.6",
}
CELLS = [
    (parameters, stage, ranks, printed)
    for (parameters, stage), row in PRINTED.items()
    for ranks, printed in zip(RANKS, row.split(), strict=True)
]


def bytes_per_parameter(stage: int, ranks: int) -> Decimal:
    """The paper's formula for a stage, as the page has it: terms such as ``4`` and ``12/N``."""
    [table] = TABLE.findall(PAGE.read_text(encoding="utf-8"))
    [formula] = re.findall(rf"^\| {stage} \| ([^|]+?) \|", table, re.MULTILINE)
    terms = [TERM.fullmatch(term) for term in formula.split(" + ")]
    assert all(terms), formula
    return sum((Decimal(term[1]) / (ranks if term[2] else 1) for term in terms if term), Decimal(0))


@pytest.mark.parametrize(("parameters", "stage", "ranks", "printed"), CELLS)
def test_cell_of_the_paper(parameters: float, stage: int, ranks: int, printed: str) -> None:
    """Equal to the printed figure, which the paper rounds in some cells and cuts in others."""
    exact = Decimal(parameters) * bytes_per_parameter(stage, ranks) / 10**9
    digits = Decimal(printed)
    assert digits in {exact.quantize(digits, ROUND_HALF_UP), exact.quantize(digits, ROUND_DOWN)}


def test_there_are_54_cells() -> None:
    assert len(CELLS) == 54


def test_stage_0_is_16_bytes_on_any_number_of_ranks() -> None:
    assert {bytes_per_parameter(0, ranks) for ranks in RANKS} == {16}
