"""Whether the file of a user's module has what a recipe names in it, without importing anything."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from shardwise.core.errors import RecipeError, did_you_mean
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
    spec = _module_spec(module)
    if spec is None:
        why = f"there is no module {module!r}"
        without = f"leave out .py: {module.removesuffix('.py')}:{name}" if module.endswith(".py") else ""
        fix = without or f"it must be importable from {here}"
        raise RecipeError("cannot be imported", where=where, why=why, fix=fix)
    names = set(_names(spec))
    if name not in names and _ANY not in names:
        why = f"{spec.origin} has no {name!r}"
        fix = did_you_mean(name, names)
        raise RecipeError("cannot be imported", where=where, why=why, fix=fix)


def defined(target: str) -> tuple[str, ast.FunctionDef | ast.ClassDef | None]:
    """The file of a module, below the target's folder, and what there defines the name.

    None if the file does not define it plainly and once.
    """
    folder, _, inner = target.rpartition("/")
    module, _, name = inner.partition(":")
    spec = None if module == GIVEN else _module_spec(module)
    tree = _tree(spec) if spec is not None else None
    nodes = list(ast.walk(tree)) if tree is not None else []
    defining = [node for node in nodes if name in _bound(node)]
    plain = [node for node in (tree.body if tree is not None else []) if node in defining]
    if len(defining) != 1 or len(plain) != 1 or not isinstance(plain[0], ast.FunctionDef | ast.ClassDef):
        return "", None
    file = str(spec and spec.origin).removeprefix(f"{folder}/" if folder else "")
    return file, None if plain[0].decorator_list else plain[0]


def _module_spec(module: str) -> ModuleSpec | None:
    """Where Python would find a module. Unlike ``importlib.util.find_spec`` it imports no package on the way."""
    spec: ModuleSpec | None = None
    folders: list[str] | None = None
    for end in [*(n for n, letter in enumerate(module) if letter == "."), len(module)]:
        spec = _spec_in(module[:end], folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or [])
    return spec


def _spec_in(module: str, folders: list[str] | None) -> ModuleSpec | None:
    """The spec of a module whose package is in ``folders``; None for a top-level one."""
    try:
        specs = (finder.find_spec(module, folders) for finder in sys.meta_path)
        return next((spec for spec in specs if spec is not None), None)
    except (
        KeyError
    ):  # a folder without __init__.py, whose path follows that of its package once that is imported
        spec = ModuleSpec(module, None, is_package=True)
        inner = (Path(folder, module.rpartition(".")[2]) for folder in folders or ())
        spec.submodule_search_locations = [str(path) for path in inner if path.is_dir()]
        return spec


def _tree(spec: ModuleSpec) -> ast.Module | None:
    """What the file of a module says; None where reading it does not tell."""
    try:
        return ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):  # importing it tells the fault
        return None


def _names(spec: ModuleSpec) -> Iterator[str]:
    """The names that a module's file binds anywhere, or reads; ``_ANY`` where it may have others."""
    tree = _tree(spec)
    if tree is None:
        yield _ANY
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield _ANY if node.id in ("globals", "exec", "setattr") else node.id
        for name in _bound(node):
            yield _ANY if name == "__getattr__" else name


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a node of a file binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
