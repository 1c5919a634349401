"""Tiers of tests, and fixtures for all of them.

Every test is in one tier: ``long`` where it is marked so, ``cli`` in tests/cli and where it runs a command, ``ranks``
where it forks ranks from the pool, ``plan`` in tests/planner, in tests/dryrun and where it shares dry runs, ``unit``
otherwise. Each process of pytest-xdist takes whole files, so the trials of a test (harness/parity.py) share forks.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.harness.pool import Pool

if TYPE_CHECKING:  # torch takes seconds, and the process that only distributes tests needs none
    from tests.harness.commands import Shell
    from tests.harness.parity import Parity, Trial

# The time of one example depends on the load of the machine, and the suite runs two processes.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

TIERS = ("ranks", "cli", "plan", "unit", "long")
"""In the order in which they run. Short tests run last, so that both processes end at about the same time."""

TESTS = Path(__file__).parent
FOLDERS = {"cli": "cli", "planner": "plan", "dryrun": "plan"}
"""Those whose tests are of another tier than ``unit``."""

_CACHE = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """One cache folder for all processes of the session, no measurement, and no hub: tests leave the user alone."""
    os.environ["SHARDWISE_MEASURE"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: its retries take 20 seconds
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.stash[_CACHE] = tempfile.TemporaryDirectory(
            prefix="shardwise-tests-", ignore_cleanup_errors=True
        )
        os.environ["SHARDWISE_CACHE"] = config.stash[_CACHE].name


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CACHE in config.stash:
        config.stash[_CACHE].cleanup()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-steps", type=int, default=3, help="the most optimizer steps of a parity trial")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers = {item: _tier(item) for item in items}
    for item, tier in tiers.items():
        item.add_marker(tier)
    items.sort(key=lambda item: TIERS.index(tiers[item]))


def _tier(item: pytest.Item) -> str:
    fixtures = getattr(item, "fixturenames", ())
    marked = next((tier for tier in ("long", "cli", "plan") if item.get_closest_marker(tier)), None)
    folder = FOLDERS.get(item.path.relative_to(TESTS).parts[0]) if TESTS in item.path.parents else None
    if marked is not None or folder == "cli":
        return marked or "cli"
    if "shell" in fixtures or "pool" in fixtures:
        return "cli" if "shell" in fixtures else "ranks"
    return "plan" if "remembered_dry_runs" in fixtures else folder or "unit"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names what failed when it fails: a run that is cut short has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-2000:]}", file=sys.stderr, flush=True)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to 8 ranks with a gloo group: `pool.run(world_size, function, *args)` (see harness/pool.py)."""
    running = Pool(8)
    yield running
    running.close()


@pytest.fixture
def shell(pool: Pool) -> Shell:
    """Runs commands in forks that have torch: `shell.run("plan", "recipe.yaml")` (see harness/commands.py)."""
    from tests.harness.commands import Shell

    return Shell(pool)


@pytest.fixture(scope="session")
def parity(request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Parity:
    """Verdicts on trials: `parity.verdict(trial)` (see harness/parity.py)."""
    from tests.harness.parity import Parity, batches

    tests: dict[str, list[Trial]] = {}
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if "trial" in parameters:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(parameters["trial"])
    together = [batch for trials in tests.values() for batch in batches(trials)]
    steps = request.config.getoption("--parity-steps")
    return Parity(pool, tmp_path_factory.mktemp("parity"), steps, together)
