"""A copy of the package without its plugins, and an environment in which Python finds that copy alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import shardwise

CUSTOMIZE = """
import sys
# An editable install finds the modules that the copy lacks in the repository.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
"""


def copy_core(folder: Path) -> None:
    """Copy the package to ``folder``."""
    package = Path(shardwise.__file__).parent
    shutil.copytree(package, folder / "shardwise", ignore=shutil.ignore_patterns("plugins", "__pycache__"))
    (folder / "sitecustomize.py").write_text(CUSTOMIZE, encoding="utf-8")


def core_environment(folder: Path) -> Mapping[str, str]:
    """This environment, with the copy in ``folder``."""
    return {**os.environ, "PYTHONPATH": str(folder)}
