"""Quantities read and written."""

import ast
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise
from shardwise.core.units import (
    GiB,
    KiB,
    MiB,
    TiB,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1.5, "1.50 B"),
        (KiB, "1.00 KiB"),
        (MiB - 1, "1.00 MiB"),  # not 1024 KiB
        (382.1 * MiB, "382.1 MiB"),
        (1010 * MiB, "1010 MiB"),
        (12.594 * GiB, "12.59 GiB"),
        (-3 * GiB, "−3.00 GiB"),
        (2 * TiB, "2.00 TiB"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_format_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.99, "1.00K"),
        (16384, "16.38K"),
        (8.03e9, "8.03B"),
        (405e9, "405.0B"),
        (1e12, "1.00T"),
    ],
)
def test_format_count(count: float, text: str) -> None:
    assert format_count(count) == text


def test_format_rate() -> None:
    assert format_rate(989e12, "FLOP") == "989.0 TFLOP/s"
    assert format_rate(50e9, "B") == "50.00 GB/s"
    assert format_rate(12, "step") == "12 step/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (5e-9, "5.00 ns"),
        (18e-6, "18.00 µs"),
        (0.412, "412.0 ms"),
        (3.2, "3.20 s"),
        (59.999, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h 00 min"),
        (15000, "4 h 10 min"),
        (86399, "1 d 00 h"),
        (3e5, "3 d 11 h"),
        (-2, "−2.00 s"),
        (math.inf, "inf"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (12, 12),
        ("12", 12),
        ("16GiB", 16 * GiB),
        ("16 gib", 16 * GiB),
        ("16 GB", 16 * 10**9),
        ("512M", 512 * 10**6),
        ("1.5KiB", 1536),
        ("1e3", 1000),
        (".5KiB", 512),
    ],
)
def test_parse_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


def test_parse_count_and_seconds() -> None:
    assert parse_count("8B") == 8 * 10**9
    assert parse_count("1.5m") == 1_500_000
    assert parse_count(7) == 7
    assert parse_seconds("250ms") == 0.25
    assert parse_seconds("5 min") == 300
    assert parse_seconds(1.5) == 1.5


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1 GiX", "nan", "inf", "1e999", "1,000", "1e30", True, "1 2"]
)
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|out of range"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("parse", "text"), [(parse_count, "8X"), (parse_count, "B"), (parse_seconds, "3 weeks")]
)
def test_other_units_are_refused(parse: object, text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        parse(text)  # type: ignore[operator]


def test_what_is_formatted_parses_back_within_its_digits() -> None:
    generator = random.Random(0)
    for _ in range(500):
        size = 2 ** generator.uniform(0, 60)
        assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=6e-3, abs=0.6)
        count = 10 ** generator.uniform(0, 15)
        assert parse_count(format_count(count)) == pytest.approx(count, rel=6e-3, abs=0.6)


PACKAGE = Path(shardwise.__file__).parent


def own_formats(path: Path) -> Iterator[str]:
    """Format specs of a percentage or of a sign, which only core/units.py writes in the style of the project."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            parts = node.format_spec.values if isinstance(node.format_spec, ast.JoinedStr) else []
            spec = "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
            if "%" in spec or "+" in spec:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {spec}"


def test_every_percentage_and_every_signed_number_has_one_style() -> None:
    """`62 %` and `−9 %` in each message, table and page: no f-string of another module writes its own."""
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "core" / "units.py"]
    assert not [found for path in files for found in own_formats(path)]
    assert list(own_formats(PACKAGE / "core" / "units.py")), "the test sees such formats"
