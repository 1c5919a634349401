"""Names, colours and number formats of quantities, the same in terminal, pictures and page.

Each ledger row has one colour. A search found the nine colours: under full protanopia, deuteranopia and tritanopia
(Machado, Oliveira & Fernandes 2009) any two have a CIE Lab distance of at least 17, and each is visible on white and on
near-black. The two rows that are not tensors of the model are grey.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.core.figures import MemoryUnit as MemoryUnit
from shardwise.core.figures import measure_label as measure_label
from shardwise.core.figures import of_capacity as of_capacity
from shardwise.core.figures import percent_text as percent_text
from shardwise.core.figures import tokens_rate as tokens_rate
from shardwise.core.figures import unit_for as unit_for
from shardwise.core.ledger import Ledger
from shardwise.core.plan import Candidate, PeakIs
from shardwise.core.units import MiB, format_bytes, format_change, format_seconds

COLOURS: Mapping[str, str] = {
    "parameters": "#47639c",
    "master_weights": "#6cc8ee",
    "gradients": "#bd2f3d",
    "optimizer_state": "#a777d8",
    "activations": "#eda83e",
    "temporaries": "#1f8a5b",
    "communication": "#93cc9c",
    "fragmentation": "#b8bcc2",
    "overhead": "#727882",
}
"""Ledger row -> sRGB."""

PEAK_SIGNS: Mapping[PeakIs, str] = {"counted": "", "estimated": "~ ", "at least": "≥ "}


def row_label(row: str) -> str:
    """A ledger row for display: `optimizer_state` becomes `optimizer state`."""
    return row.replace("_", " ")


def by_size(ledger: Ledger) -> list[tuple[str, int]]:
    """The non-empty rows, largest first."""
    rows = [(row, size) for row, size in ledger.as_dict().items() if size]
    return sorted(rows, key=lambda pair: -pair[1])


def peak_of(candidate: Candidate) -> str:
    """A candidate's peak, with a sign if it is not the one that the candidate's own plan has."""
    if not candidate.peak_bytes:
        return "–"
    return PEAK_SIGNS[candidate.peak_is] + format_bytes(candidate.peak_bytes)


def deviation(predicted: float, measured: float) -> str:
    """Signed error of a prediction: `+1.8 %` means that the prediction was too high."""
    return format_change(predicted / measured - 1, 1) if measured > 0 else "–"


def error_in_words(predicted: float, measured: float) -> str:
    """The error of a prediction as words: `1.8 % too high`."""
    if measured <= 0:
        return "–"
    percent = 100 * (predicted / measured - 1)
    return f"{abs(percent):.1f} % too {'high' if percent >= 0 else 'low'}"


SMALL_ERROR = 4 * MiB
"""A CPU rank reuses memory that its warm-up freed, so a small peak is measured too low. A percentage would blame the
prediction.
"""


def peak_error(predicted: float, measured: float) -> str:
    """The error of a predicted peak as words: a percentage, or that it is small in bytes."""
    if 0 < 0.05 * measured < abs(predicted - measured) < SMALL_ERROR:
        return f"less than {format_bytes(SMALL_ERROR)} off"
    return error_in_words(predicted, measured)


def seconds(value: float) -> str:
    """A duration; `–` if it was not measured."""
    return format_seconds(value) if value > 0 else "–"
