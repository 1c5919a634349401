"""The colours can be told apart by everybody, the units read right at their edges."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from shardwise.core.ledger import CATEGORIES
from shardwise.core.units import GiB, MiB
from shardwise.report.notation import (
    COLOURS,
    deviation,
    of_capacity,
    percent_text,
    seconds,
    tokens_rate,
    unit_for,
)

Array = npt.NDArray[np.float64]

# Machado, Oliveira & Fernandes 2009, severity 1.0, on linear RGB.
VISION = {
    "full": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}


def linear(colour: str) -> Array:
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def cie_lab(rgb: Array) -> Array:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_every_two_colours_differ_for(vision: str) -> None:
    seen = {row: cie_lab(np.array(VISION[vision]) @ linear(colour)) for row, colour in COLOURS.items()}
    for one, other in combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 17, (one, other)


@pytest.mark.parametrize("background", ["#ffffff", "#14181c"])
def test_every_colour_shows_on(background: str) -> None:
    light = np.array([0.2126, 0.7152, 0.0722])
    behind = linear(background) @ light + 0.05
    for colour in COLOURS.values():
        front = linear(colour) @ light + 0.05
        assert max(front / behind, behind / front) > 1.7


def test_every_ledger_row_has_a_colour_of_its_own() -> None:
    assert tuple(COLOURS) == CATEGORIES
    assert len(set(COLOURS.values())) == len(CATEGORIES)


def test_a_column_has_one_unit() -> None:
    unit = unit_for(69.4 * GiB)
    assert [unit.write(size) for size in (69.4 * GiB, 2.5 * GiB, 1 * MiB, 0)] == [
        "69.40 GiB",
        "2.50 GiB",
        "<0.01 GiB",
        "0 GiB",
    ]
    assert unit_for(482.1 * MiB).write(16) == "<0.1 MiB"
    assert unit_for(0).write(0) == "0 B"
    assert unit_for(700).write(7) == "7 B"


def test_peak_beside_capacity() -> None:
    assert of_capacity(69.45 * GiB, 79.1 * GiB) == "69.5 of 79.1 GiB"
    assert of_capacity(482.1 * MiB, 11.77 * GiB) == "482 MiB of 11.8 GiB"
    assert of_capacity(0.5 * GiB, 0.75 * GiB) == "512 of 768 MiB"


def test_figures() -> None:
    assert [percent_text(0.62, 1), percent_text(0.001, 1), percent_text(0, 1), percent_text(1, 0)] == [
        "62 %",
        "<1 %",
        "0 %",
        "",
    ]
    assert [deviation(102, 100), deviation(98, 100), deviation(1, 0)] == ["+2.0 %", "−2.0 %", "–"]
    assert [tokens_rate(r) for r in (0.5, 42.25, 999.7, 79_682, 1.5e6)] == [
        "0.50 tokens/s",
        "42.2 tokens/s",
        "1.00 k tokens/s",
        "79.7 k tokens/s",
        "1.50 M tokens/s",
    ]
    assert seconds(0.0) == "–"
