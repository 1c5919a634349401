"""The command for an optional dependency works in the environment of Shardwise, wherever it is run."""

from __future__ import annotations

import ast
import importlib.metadata
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from shardwise.core.extras import install

PACKAGE = Path(shardwise.__file__).parent


def calls() -> dict[str, str]:
    """The extras that the package names in words, and where."""
    named = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "install":
                [extra] = node.args
                if isinstance(extra, ast.Constant):
                    named[str(extra.value)] = f"{path.name}:{node.lineno}"
    return named


def test_every_extra_exists() -> None:
    extras = importlib.metadata.metadata("shardwise").get_all("Provides-Extra") or []
    assert {"hf", "fp8"} <= calls().keys() <= set(extras)
    assert {"tensorboard", "wandb", "mlflow", "trackio"} <= set(extras), "trackers name their own"


@pytest.mark.parametrize("extra", ["hf", "gguf"])
def test_the_command_finds_shardwise_in_another_shell(extra: str, tmp_path: Path) -> None:
    """With no environment active and without any index: pip says that Shardwise is installed already."""
    words = [*shlex.split(install(extra)), "--no-deps", "--no-index", "--dry-run"]
    assert words[0] == sys.executable
    done = subprocess.run(
        words, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and f"already satisfied: shardwise[{extra}]" in done.stdout, done.stderr


def test_no_message_names_another_pip() -> None:
    """The first pip on the path may be of another environment, and no index has Shardwise."""
    own = PACKAGE / "core" / "extras.py"
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path != own]
    assert not [text for text in texts if "shardwise[" in text and "pip install" in text]
