"""The ZeRO paper's table of model state per rank, all 54 cells (Rajbhandari et al. 2020, table 1)."""

from __future__ import annotations

from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest

from shardwise.plan.estimate import MIXED_16_BIT, model_state_bytes

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


@pytest.mark.parametrize(("parameters", "stage", "ranks", "printed"), CELLS)
def test_cell_of_the_paper(parameters: float, stage: int, ranks: int, printed: str) -> None:
    """Equal to the printed figure, which the paper rounds in some cells and cuts in others."""
    exact = Decimal(model_state_bytes(parameters, stage, ranks)) / 10**9
    digits = Decimal(printed)
    assert digits in {exact.quantize(digits, ROUND_HALF_UP), exact.quantize(digits, ROUND_DOWN)}


def test_there_are_54_cells() -> None:
    assert len(CELLS) == 54


def test_stage_0_is_16_bytes_a_parameter_everywhere() -> None:
    assert model_state_bytes(1e9, 0, 64) == 16e9
    assert MIXED_16_BIT.weights + MIXED_16_BIT.gradients + MIXED_16_BIT.optimizer == 16
