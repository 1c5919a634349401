"""Formatting and parsing of bytes, counts, seconds and rates.

Memory is binary (1 GiB = 2^30 B), everything else is decimal (1 GB/s = 1e9 B/s, 8B = 8e9 parameters). Parsing accepts
both prefixes and never reads `16GB` as GiB, which would be an error of 7 %. Formatted numbers have about four digits.
A negative number has the minus sign `−`, and a percentage a space before its sign.

Quantities are plain numbers in bytes and seconds; names of variables say the unit.
"""

import math
import re

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("", "K", "M", "B", "T", "Q")  # thousand, million, billion, trillion, quadrillion
_SI = ("", "k", "M", "G", "T", "P", "E")
MINUS = "−"
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([A-Za-zµ]*)\s*")


def format_bytes(size: float) -> str:
    """`size` bytes in binary units: `512 B`, `382.1 MiB`, `12.59 GiB`."""
    return _scaled(size, 1024, _BINARY, gap=" ")


def format_count(count: float) -> str:
    """A count in short scale: `950`, `8.03B`, `16.38K`."""
    return _scaled(count, 1000, _DECIMAL)


def format_rate(rate: float, unit: str) -> str:
    """`rate` per second in decimal units: `format_rate(989e12, "FLOP")` is `989.0 TFLOP/s`."""
    return _scaled(rate, 1000, tuple(f"{prefix}{unit}/s" for prefix in _SI), gap=" ")


def format_seconds(seconds: float) -> str:
    """A duration in at most two units: `18.00 µs`, `412.0 ms`, `3.20 s`, `2 min 05 s`, `3 d 04 h`."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0:
        return MINUS + format_seconds(-seconds)
    if seconds < 59.995:
        subunits = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
        factor, unit = next((pair for pair in subunits if seconds >= pair[0]), subunits[-1 if seconds else 0])
        return f"{_digits(seconds / factor)} {unit}"
    for small, ratio, names in ((1, 60, ("min", "s")), (60, 60, ("h", "min")), (3600, 24, ("d", "h"))):
        high, low = divmod(round(seconds / small), ratio)
        if high < {"min": 60, "h": 24}.get(names[0], math.inf):
            return f"{high} {names[0]} {low:02d} {names[1]}"
    raise AssertionError("unreachable: days have no upper bound")


def format_percent(fraction: float, decimals: int = 0) -> str:
    """A fraction of a whole: `62 %`, `12.7 %`."""
    return f"{100 * fraction:.{decimals}f} %".replace("-", MINUS)


def format_change(change: float, decimals: int | None = None) -> str:
    """A relative change with its sign: `−9 %`, `+11 %`; tenths where it is small, or so many ``decimals``."""
    if decimals is None:
        decimals = 0 if abs(change) >= 0.0995 else 1
    return f"{100 * change:+.{decimals}f} %".replace("-", MINUS)


def format_difference(difference: float, decimals: int = 4) -> str:
    """A difference with its sign: `+0.0021`, `−0.3100`."""
    return f"{difference:+.{decimals}f}".replace("-", MINUS)


def format_more_bytes(size: float) -> str:
    """A difference in bytes with its sign: `+1.50 GiB`, `−33 B`."""
    return f"{'+' if size >= 0 else MINUS}{format_bytes(abs(size))}"


def parse_bytes(text: str | int) -> int:
    """Bytes from `16GiB`, `16 GB` (decimal), `512M` (decimal) or a number. Raises ValueError with a message."""
    number, unit = _split_unit(text, "a size such as 16GiB")
    name = unit.lower().removesuffix("b")
    factors = {"": 1} | {p: 1000**i for i, p in enumerate("kmgtpe", 1)}
    factors |= {f"{p}i": 1024**i for i, p in enumerate("kmgtpe", 1)}
    if name not in factors:
        raise ValueError(f"{unit!r} is not a unit of size; use B, KiB, MiB, GiB, TiB or KB, MB, GB, TB")
    return _whole_number(number * factors[name], text)


def parse_count(text: str | int) -> int:
    """A count from `8B`, `1.5M`, `300K`, `2T` or a plain number. Raises ValueError with a message."""
    number, unit = _split_unit(text, "a count such as 8B")
    if unit.upper() not in _DECIMAL:
        raise ValueError(f"{unit!r} is not a unit of count; use K, M, B, T or Q")
    return _whole_number(number * 1000 ** _DECIMAL.index(unit.upper()), text)


def parse_seconds(text: str | float) -> float:
    """Seconds from `30s`, `5 min`, `1.5h`, `250ms` or a plain number. Raises ValueError with a message."""
    number, unit = _split_unit(text, "a duration such as 30s")
    if (unit or "s") not in _SECONDS:
        raise ValueError(f"{unit!r} is not a unit of time; use {', '.join(_SECONDS)}")
    return number * _SECONDS[unit or "s"]


def _digits(size: float) -> str:
    """About four digits: two decimals below 100, one below 1000, none above."""
    return f"{size:.{2 if size < 99.995 else 1 if size < 999.95 else 0}f}"


def _scaled(value: float, base: int, units: tuple[str, ...], gap: str = "") -> str:
    """`value` in the largest unit in which it prints as at least 1; whole bytes without decimals."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    index = 0
    while index + 1 < len(units) and size >= base * (
        1 - 0.5e-4
    ):  # a value that prints as 1024 or 1000 takes the next unit
        size /= base
        index += 1
    number = f"{size:.0f}" if index == 0 and size == int(size) else _digits(size)
    return f"{MINUS if value < 0 else ''}{number}{gap}{units[index]}"


def _split_unit(text: str | float, example: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(str(text)) if not isinstance(text, bool) else None
    if match is None or not math.isfinite(float(match[1])):
        raise ValueError(f"{str(text)[:40]!r} is not {example}")
    return float(match[1]), match[2]


def _whole_number(value: float, text: object) -> int:
    if value > 2**63:
        raise ValueError(f"{str(text)[:40]!r} is out of range")
    return round(value)
