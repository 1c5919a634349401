"""Whether the file of a user's module has what a recipe names in it, without importing anything."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from pathlib import Path

from shardwise.core.errors import RecipeError
from shardwise.core.user_objects import GIVEN

_ANY = "*"
"""Among the names of a module: it may have others, which its code makes."""


def require_defined(target: str, where: str) -> None:
    """Raise RecipeError if ``[FOLDER/]package.module:name`` is of no module, or of one whose file has no such name.

    Args:
        where: the key of the recipe, for errors.
    """
    folder, _, inner = target.rpartition("/")
    module, colon, name = inner.partition(":")
    if not colon or module == GIVEN:
        return
    here = folder or str(Path.cwd())
    if here not in sys.path:  # as where it is imported
        sys.path.insert(0, here)
    spec = _spec_of(module)
    if spec is None:
        why = f"there is no module {module!r}"
        without = f"leave out .py: {module.removesuffix('.py')}:{name}" if module.endswith(".py") else ""
        fix = without or f"it must be importable from {here}"
        raise RecipeError("cannot be imported", where=where, why=why, fix=fix)
    names = set(_names(spec))
    if name not in names and _ANY not in names:
        near = get_close_matches(name, names, n=1)
        why, fix = f"{spec.origin} has no {name!r}", f"did you mean {near[0]!r}?" if near else ""
        raise RecipeError("cannot be imported", where=where, why=why, fix=fix)


def _spec_of(module: str) -> ModuleSpec | None:
    """Where Python would find a module. Unlike ``importlib.util.find_spec`` it imports no package on the way."""
    spec, folders = None, None
    for end in [*(n for n, letter in enumerate(module) if letter == "."), len(module)]:
        specs = (finder.find_spec(module[:end], folders) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or [])
    return spec


def _names(spec: ModuleSpec) -> Iterator[str]:
    """The names that a module's file binds anywhere; ``_ANY`` where reading it does not tell."""
    try:
        tree = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):  # importing it tells the fault
        yield _ANY
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield _ANY if node.name == "__getattr__" else node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name):
            yield _ANY if node.id in ("globals", "exec", "setattr") else node.id
