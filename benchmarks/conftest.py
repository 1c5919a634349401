"""Tests of the benchmarks import them as the commands do: by their names alone, from this folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not the user's, where calibrations of this machine are."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
