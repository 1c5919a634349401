"""Plans in these tests share their dry runs."""

from __future__ import annotations

import pytest

from tests.harness.dry_runs import remembered_dry_runs

__all__ = ["remembered_dry_runs"]


@pytest.fixture(autouse=True)
def _remembered(remembered_dry_runs: None) -> None: ...
