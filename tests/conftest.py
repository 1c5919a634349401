"""Fixtures for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that tests and pool workers find `pool`

from pool import Pool

# How long an example takes says how busy the machine is, and the tests keep two processes busy.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names what failed when it fails: a run that is cut short has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-2000:]}", file=sys.stderr, flush=True)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to 4 ranks with a gloo group: `pool.run(world_size, function, *args)` (see pool.py)."""
    running = Pool(4)
    yield running
    running.close()
