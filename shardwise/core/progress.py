"""Lines that say what a long computation is doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str], None]
"""Is called with a line now and then; each replaces the one before."""


Say: TypeAlias = Callable[[str], None]
"""Gets each sentence for the user, which stays."""


def silent(line: str) -> None:
    """Show nothing."""
