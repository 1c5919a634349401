"""Objects of Python in another process."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.core.user_objects import giving

READS = "from shardwise.core.user_objects import resolve; print(resolve('python:answer', 'here')())"


def test_objects_import_from_where_the_script_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script started from another directory has its own folder in sys.path, and its module is sent by its name."""
    folder, elsewhere = tmp_path / "scripts", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "beside_the_script.py").write_text("def answer():\n    return 42\n", encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    answer = importlib.import_module("beside_the_script").answer
    with giving({"answer": answer}) as environment:
        said = subprocess.run(
            [sys.executable, "-c", READS],
            cwd=elsewhere,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
    assert said.stdout.strip() == "42", said.stderr
