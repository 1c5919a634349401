"""The core's own tests of the tiers unit and plan, on a copy of the package that has no plugins.

    python -m tests.core_only [ARGUMENTS AND TESTS FOR PYTEST]

A core test that needs a plugin fails here: it belongs to tests/plugins.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.harness.core_copy import copy_core, core_environment

REPOSITORY = Path(__file__).resolve().parents[1]
WHOLE = (
    *("test_api.py", "test_architecture.py", "test_docs.py", "test_prose.py", "test_without_plugins.py"),
    *("test_agreement.py", "test_combinations.py", "test_mixes.py", "test_mutation_check.py"),
    *("test_torture.py", "test_soak.py", "cli"),
)
"""Tests of the whole repository, plugins included: its pages, rows of all settings; and those without unit tests."""


def main(arguments: list[str]) -> int:
    """The exit code of pytest."""
    with tempfile.TemporaryDirectory(prefix="shardwise-core-") as name:
        folder = Path(name)
        copy_core(folder)
        left_out = shutil.ignore_patterns("plugins", "__pycache__", *WHOLE)
        shutil.copytree(REPOSITORY / "tests", folder / "tests", ignore=left_out)
        for path in REPOSITORY.iterdir():
            if not path.name.startswith(".") and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
        command = [sys.executable, "-m", "pytest", "-m", "unit or plan", *(arguments or ["tests"])]
        return subprocess.run(command, cwd=folder, env=core_environment(folder), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
