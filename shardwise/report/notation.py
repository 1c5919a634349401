"""Names, colours and number formats of quantities, the same in terminal, pictures and page.

Each ledger row has one colour. A search found the nine colours: under full protanopia, deuteranopia and tritanopia
(Machado, Oliveira & Fernandes 2009) any two have a CIE Lab distance of at least 17, and each is visible on white and on
near-black. The two rows that are not tensors of the model are grey.

A table has one unit, so that a column of sizes compares at a glance. A small row then reads `<0.01`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.core.ledger import Ledger
from shardwise.core.units import GiB, KiB, MiB, TiB, format_seconds

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

_UNITS = (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB), ("B", 1))


def label(row: str) -> str:
    """A ledger row for display: `optimizer_state` becomes `optimizer state`."""
    return row.replace("_", " ")


def by_size(ledger: Ledger) -> list[tuple[str, int]]:
    """The non-empty rows, largest first."""
    rows = [(row, size) for row, size in ledger.as_dict().items() if size]
    return sorted(rows, key=lambda pair: -pair[1])


@dataclass(frozen=True)
class MemoryUnit:
    """The unit of a column of sizes, and its number of decimals."""

    name: str
    size: int
    decimals: int

    def number(self, size: float) -> str:
        """`size` bytes without the unit: `43.12`, `0`, or `<0.01` for a size that would round to 0."""
        text = f"{size / self.size:.{self.decimals}f}"
        if size and float(text) == 0:
            return f"<{10.0**-self.decimals:.{self.decimals}f}"
        return text if size else "0"

    def write(self, size: float) -> str:
        """`size` bytes with the unit."""
        return f"{self.number(size)} {self.name}"


def unit_for(largest: float) -> MemoryUnit:
    """The unit for a table with this largest size."""
    name, size = next((pair for pair in _UNITS if largest >= pair[1]), _UNITS[-1])
    decimals = 0 if size == 1 else 2 if largest / size < 99.995 else 1
    return MemoryUnit(name, size, decimals)


def share(part: float, whole: float) -> str:
    """`part` of `whole` in percent: `62 %`, `<1 %`, or "" if `whole` is 0."""
    if not whole:
        return ""
    percent = 100 * part / whole
    return "<1 %" if 0 < percent < 0.5 else f"{percent:.0f} %"


def deviation(predicted: float, measured: float) -> str:
    """Signed error of a prediction: `+1.8 %` means that the prediction was too high."""
    return f"{100 * (predicted / measured - 1):+.1f} %".replace("-", "−") if measured > 0 else "–"


def in_words(predicted: float, measured: float) -> str:
    """The error of a prediction as words: `1.8 % too high`."""
    if measured <= 0:
        return "–"
    percent = 100 * (predicted / measured - 1)
    return f"{abs(percent):.1f} % too {'high' if percent >= 0 else 'low'}"


def seconds(value: float) -> str:
    """A duration; `–` if it was not measured."""
    return format_seconds(value) if value > 0 else "–"


def tokens_rate(rate: float) -> str:
    """Tokens per second, three digits: `79.7 k tokens/s`."""
    prefix = ""
    for larger in ("k ", "M ", "G "):
        if rate < 999.5:
            break
        rate, prefix = rate / 1000, larger
    return f"{rate:.{2 if rate < 9.995 else 1 if rate < 99.95 else 0}f} {prefix}tokens/s"


def of_capacity(peak: float, capacity: float) -> str:
    """A peak and the capacity: `69.4 of 79.1 GiB`, `482 MiB of 11.8 GiB`."""
    (few, unit), (many, capacity_unit) = _three_digits(peak), _three_digits(capacity)
    return f"{few}{'' if unit == capacity_unit else f' {unit}'} of {many} {capacity_unit}"


def _three_digits(size: float) -> tuple[str, str]:
    unit = unit_for(size)
    value = size / unit.size
    return f"{value:.{0 if unit.size == 1 or value >= 99.95 else 1 if value >= 9.995 else 2}f}", unit.name
