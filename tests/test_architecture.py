"""The taste of the code, as tests: imports go one way, files and functions stay small, torch stays out of core."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.technique import SETTINGS

PACKAGE = Path(__file__).parent.parent / "shardwise"
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
# Each layer may import from itself and from those before it; dryrun and train are siblings.
LAYERS = ("core", "model", "technique", "engine", "dryrun", "train", "serve", "plan", "report", "cli")
FORBIDDEN = {
    ("train", "dryrun"),
    ("dryrun", "train"),
    ("serve", "dryrun"),
    ("plan", "train"),
    ("plan", "serve"),
    ("report", "train"),
    ("report", "serve"),
    ("report", "plan"),
}
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


def layer_of(path: Path) -> str | None:
    """The subpackage, or None for the top level, which may import everything."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def imported(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            yield node.module, node


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    layer = layer_of(path)
    if layer is None:
        return
    for name, node in imported(path):
        parts = name.split(".")
        if parts[0] != "shardwise" or len(parts) == 1:
            continue
        assert LAYERS.index(parts[1]) <= LAYERS.index(layer), f"{path}:{node.lineno} imports {name}"
        assert (layer, parts[1]) not in FORBIDDEN, f"{path}:{node.lineno} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_are_small_and_annotated(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_FILE
    tree = ast.parse(text)
    if path.name != "__init__.py" or text:
        assert ast.get_docstring(tree), "every module opens with its design note"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < LONGEST_FUNCTION, f"{node.name} is long"
            assert node.returns is not None, f"{node.name} does not say what it returns"


def test_technique_names_stay_in_their_files() -> None:
    """The trainer and the planner know techniques only through technique/__init__.py and technique/base.py."""
    allowed = {"shardwise.technique", "shardwise.technique.base"}
    for path in FILES:
        if layer_of(path) in ("technique", "core", "model", None):
            continue
        for name, _ in imported(path):
            assert not name.startswith("shardwise.technique") or name in allowed, f"{path} imports {name}"


def test_no_dumping_grounds() -> None:
    assert not [path for path in FILES if path.stem in ("utils", "helpers", "misc", "common_utils")]


def test_nothing_unpickles_or_evaluates() -> None:
    banned = {"pickle", "marshal", "shelve"}
    for path in FILES:
        for name, node in imported(path):
            assert name.split(".")[0] not in banned, f"{path}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno}"


def test_recipes_are_checked_without_torch() -> None:
    """Reading and checking a recipe, its cluster and the rules must not load torch (it takes seconds)."""
    code = (
        "import sys; import shardwise.cli.main; from shardwise.cli.common import read;"
        " from pathlib import Path; read(Path('recipes/quickstart.yaml'), []);"
        " assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_every_key_is_one_settings() -> None:
    """Of two settings of one key, a recipe would be read by the one and a technique by the other."""
    keys = [setting.key for setting in SETTINGS]
    assert len(keys) == len(set(keys))
