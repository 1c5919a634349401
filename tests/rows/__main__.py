"""Writes rows.json anew: ``python -m tests.rows``."""

from __future__ import annotations

from tests.rows import memory, mixes, parity
from tests.rows.table import FILE, text_of


def current() -> str:
    """What the file has to hold now."""
    return text_of(parity.tables() | memory.tables() | mixes.tables())


if __name__ == "__main__":
    FILE.write_text(current(), encoding="utf-8")
