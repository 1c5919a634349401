"""A user's own objects: named in a recipe as ``[FOLDER/]package.module:name``, or given in Python.

A recipe that is read gets the folder of a module that is next to it, or in the current folder (core/paths.py). So a run
finds the module again from any folder. Other modules are those that Python finds.

An object that was given in Python has the name ``python:NAME``. Worker processes get these objects in a file that only
this user can read (cloudpickle, so classes and functions of a notebook travel too); the launching process deletes it.
Nothing is unpickled from the folder of a run.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.core.errors import RecipeError

PATTERN = r"^(.*/)?[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
GIVEN = "python"
"""The module in the name of an object that was given in Python."""

_OBJECTS_VARIABLE = "SHARDWISE_OBJECTS"
_python_objects: dict[str, object] = {}


def without_folder(target: str | None) -> str | None:
    """``package.module:name`` of a target: what it names, wherever its folder is."""
    return None if target is None else target.rpartition("/")[2]


def resolve(target: str, where: str) -> Any:
    """The object that ``target`` names; its folder, or the current one, is importable.

    Args:
        where: the key of the recipe, for errors.

    Raises:
        RecipeError: it cannot be imported, or was given in another process.
    """
    folder, _, inner = target.rpartition("/")
    module, _, name = inner.partition(":")
    where = f"{where}: {target}"
    if not module or not name:
        raise RecipeError("an object is named package.module:name", where=where)
    if module == GIVEN:
        return _of_python(name, where)
    here = folder or str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module)
        attribute = getattr(imported, name)
    except Exception as error:  # not found, or an error during import
        without = f"leave out .py: {module.removesuffix('.py')}:{name}" if module.endswith(".py") else ""
        raise RecipeError(
            "cannot be imported",
            where=where,
            why=f"{type(error).__name__}: {error}",
            fix=without or f"it must be importable from {here}",
        ) from error
    if folder and _is_of_another_folder(imported, folder):
        raise RecipeError(
            "another module has this name",
            where=where,
            why=f"this process has imported {imported.__file__}",
            fix="start another process, or rename the module",
        )
    return attribute


def _is_of_another_folder(module: ModuleType, folder: str) -> bool:
    """Whether a module was imported from elsewhere before; an installed one wins over a folder of its name."""
    file = Path(getattr(module, "__file__", None) or folder).resolve()
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return not installed and not file.is_relative_to(Path(folder).resolve())


def _of_python(name: str, where: str) -> Any:
    if name not in _python_objects and _OBJECTS_VARIABLE in os.environ:
        import cloudpickle

        importable, pickled = cloudpickle.loads(Path(os.environ[_OBJECTS_VARIABLE]).read_bytes())
        sys.path += [folder for folder in importable if folder not in sys.path]
        _python_objects.update(cloudpickle.loads(pickled))
    if name not in _python_objects:
        raise RecipeError(
            "this object is not here",
            where=where,
            why="it was given to a function of Python, and is not in any file",
            fix="call that function again with the same objects",
        )
    return _python_objects[name]


@contextmanager
def here(objects: Mapping[str, object]) -> Iterator[None]:
    """Within it ``python:NAME`` names these objects in this process."""
    before = dict(_python_objects)
    _python_objects.update(objects)
    try:
        yield
    finally:
        _python_objects.clear()
        _python_objects.update(before)


@contextmanager
def giving(objects: Mapping[str, object]) -> Iterator[dict[str, str]]:
    """Within it ``python:NAME`` names these objects here, and in processes with the environment that it yields.

    Raises:
        RecipeError: an object cannot be pickled.
    """
    if not objects:
        yield {}
        return
    import cloudpickle

    with here(objects), tempfile.TemporaryDirectory(prefix="shardwise-") as folder:  # for this user alone
        path = Path(folder) / "objects"
        path.write_bytes(cloudpickle.dumps((sys.path, _pickled(objects, cloudpickle.dumps))))
        yield {_OBJECTS_VARIABLE: str(path)}


def _pickled(objects: Mapping[str, object], dumps: Any) -> bytes:
    for name, value in objects.items():
        try:
            dumps(value)
        except Exception as error:  # whatever the object's own code raises
            raise RecipeError(
                f"{name} cannot be sent to the processes of the run",
                where=f"{type(value).__name__} in Python",
                why=f"{type(error).__name__}: {error}",
                fix="leave out what belongs to this process: open files, locks, generators",
            ) from error
    return bytes(dumps(dict(objects)))
