"""Figures of plans and runs, short and the same in terminal, pictures, page and Python.

A table has one unit, so that a column of sizes compares at a glance. A small row then reads `<0.01`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.core.units import GiB, KiB, MiB, TiB

_BYTE_UNITS = (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB), ("B", 1))


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
    name, size = next((pair for pair in _BYTE_UNITS if largest >= pair[1]), _BYTE_UNITS[-1])
    decimals = 0 if size == 1 else 2 if largest / size < 99.995 else 1
    return MemoryUnit(name, size, decimals)


def percent_text(part: float, whole: float) -> str:
    """`part` of `whole` in percent: `62 %`, `<1 %`, or "" if `whole` is 0."""
    if not whole:
        return ""
    percent = 100 * part / whole
    return "<1 %" if 0 < percent < 0.5 else f"{percent:.0f} %"


def measure_label(name: str) -> str:
    """The name of a measure in words: `reward margin`."""
    return name.replace("_", " ")


def tokens_rate(rate: float, unit: str = "tokens") -> str:
    """Tokens, samples or pairs per second, three digits: `79.7 k tokens/s`."""
    prefix = ""
    for larger in ("k ", "M ", "G "):
        if rate < 999.5:
            break
        rate /= 1000
        prefix = larger
    return f"{rate:.{2 if rate < 9.995 else 1 if rate < 99.95 else 0}f} {prefix}{unit}/s"


def of_capacity(peak: float, capacity: float) -> str:
    """A peak and the capacity: `69.4 of 79.1 GiB`, `482 MiB of 11.8 GiB`."""
    (few, unit), (many, capacity_unit) = _three_digits(peak), _three_digits(capacity)
    return f"{few}{'' if unit == capacity_unit else f' {unit}'} of {many} {capacity_unit}"


def _three_digits(size: float) -> tuple[str, str]:
    unit = unit_for(size)
    value = size / unit.size
    return f"{value:.{0 if unit.size == 1 or value >= 99.95 else 1 if value >= 9.995 else 2}f}", unit.name
