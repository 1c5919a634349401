"""Paths that a user writes: in a recipe, on the command line, in Python, in the environment.

``~`` and ``~user`` are expanded. Variables such as ``$HOME`` are not: a shell expands them, and a recipe reads no
environment. A relative path starts at the folder of the file that names it, and where it is not there at the current
folder; on the command line and in Python it starts at the current folder.

Many keys take a path or an id on the Hugging Face hub. A name is a path where it exists, so data and models on the disk
are not downloaded. Where it does not exist, ``only_a_path`` tells whether it could still be an id.

A recipe in the folder of a run has whole paths and ids, and no name in it is looked up in the current folder. Where
such a path is gone, and the run's folder has moved since it was written, the path is looked up as it was seen from the
folder: a run that is moved together with its model and data works.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path

from shardwise.core.errors import RecipeError
from shardwise.core.identity import starts
from shardwise.core.user_objects import GIVEN

STANDARD_LIBRARY = "stdlib"
"""The data source that is no path."""

RUN_RECIPES = ("recipe.yaml", "finetune.yaml")
"""The recipes that are written into the folder of a run."""

_WILDCARDS = re.compile(r"[*?\[]")


def path_of(name: str | os.PathLike[str]) -> Path:
    """The path with ``~`` and ``~user`` expanded. Raises RecipeError for a user without a home folder."""
    path = Path(name)
    try:
        return path.expanduser()
    except RuntimeError:
        why = f"{path.parts[0]} has no home folder here"
        fix = "write the whole path"
        raise RecipeError("a path cannot be read", where=str(path), why=why, fix=fix) from None


def only_a_path(name: str) -> bool:
    """Whether a name cannot be an id on the hub (``NAME`` or ``OWNER/NAME``), or OWNER is a folder here."""
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1:
        return True
    return "/" in name and path_of(name).parent.is_dir()


def missing(name: str) -> str:
    """Why a local path is not there: the folders in which it was looked up."""
    if path_of(name).is_absolute():
        return "no file or folder of this name exists"
    return f"no file or folder of this name is next to the recipe or in {Path.cwd()}"


def no_folder(path: Path) -> str:
    """Why a path that a command names is no folder."""
    return "it is a file" if path.exists() else "there is no such folder"


def is_gone(name: str) -> bool:
    """Whether a whole path, PATH#SPLIT or glob leads to nothing any more; False for an id."""
    if not os.path.isabs(name) or os.path.lexists(name) or os.path.lexists(name.rpartition("#")[0]):
        return False
    return not (_WILDCARDS.search(name) and _matches(name))


def seen_from(path: str, folder: Path) -> str:
    """A whole path as a file in ``folder`` names it: relative if it is below, else as it is.

    A path that leads to nothing stays whole: its end could be taken for an id.
    """
    inner = Path(path)
    above = folder.absolute()
    below = inner.is_absolute() and inner.is_relative_to(above) and not is_gone(path)
    return str(inner.relative_to(above)) if below else path


@dataclass(frozen=True)
class PathBase:
    """Where relative paths start.

    Attributes:
        folders: in order; the first with the path counts.
        moved: the former and the present folder of a run; None if the file is of no run, or the run has not moved.
    """

    folders: tuple[Path, ...]
    moved: tuple[Path, Path] | None = None

    @classmethod
    def here(cls) -> PathBase:
        """The current folder."""
        return cls((Path.cwd(),))

    @classmethod
    def of_file(cls, file: Path) -> PathBase:
        """Of a file, which may be one that a run has written."""
        folder = _absolute(file).parent
        started = starts(folder) if file.name in RUN_RECIPES else []
        if not started:
            return cls(tuple(dict.fromkeys((folder, Path.cwd()))))
        before = Path(started[-1].folder)
        return cls((folder,), (before, folder) if before.is_absolute() and before != folder else None)

    def located(self, name: str) -> str:
        """The whole path of a file or folder; ``name`` itself if it does not exist, or is an id."""
        path = path_of(name)
        if path.is_absolute():
            return str(path if os.path.lexists(path) else self._after_move(path))
        there = next((at for folder in self.folders if os.path.lexists(at := folder / path)), None)
        return name if there is None else str(_absolute(there))

    def located_source(self, name: str) -> str:
        """The same for a data source: ``stdlib``, a URL, PATH, PATH#SPLIT, a glob or an id."""
        if name == STANDARD_LIBRARY or "://" in name:
            return name
        if self._is_local(location := self.located(name)):
            return location
        dataset, mark, split = name.rpartition("#")
        if dataset and mark and self._is_local(path := self.located(dataset)):
            return f"{path}#{split}"
        return self._located_glob(name) if _WILDCARDS.search(name) else location

    def located_module(self, target: str) -> str:
        """``FOLDER/package.module:object`` for ``package.module:object``, if a folder has the module."""
        parent, slash, inner = target.rpartition("/")
        module, colon, _ = inner.partition(":")
        if not colon or (module == GIVEN and not slash):
            return target
        if slash:
            return f"{self.located(parent or '/')}/{inner}"
        for folder in self.folders:
            file = folder.joinpath(*module.split("."))
            if file.with_name(f"{file.name}.py").is_file() or (file / "__init__.py").is_file():
                return f"{folder}/{inner}"
        return target

    def _located_glob(self, pattern: str) -> str:
        path = str(path_of(pattern))
        tried = [path] if os.path.isabs(path) else [f"{glob.escape(str(at))}/{path}" for at in self.folders]
        if self.moved is not None and os.path.isabs(path):
            before, now = (glob.escape(str(folder)) for folder in self.moved)
            tried.append(os.path.normpath(f"{now}/{os.path.relpath(path, before)}"))
        return next(
            (candidate for candidate in tried if _matches(candidate)),
            path if os.path.isabs(path) else pattern,
        )

    def _after_move(self, path: Path) -> Path:
        """A path that is gone as it was seen from the moved folder; itself if that is not there either."""
        if self.moved is None:
            return path
        before, now = self.moved
        there = Path(os.path.normpath(now / os.path.relpath(path, before)))
        return there if os.path.lexists(there) else path

    @staticmethod
    def _is_local(path: str) -> bool:
        return os.path.isabs(path) and os.path.lexists(path)


def _matches(pattern: str) -> bool:
    return next(glob.iglob(pattern, recursive=True), None) is not None


def _absolute(path: Path) -> Path:
    """An absolute path; links are followed only where ``..`` comes after one."""
    return path.resolve() if ".." in path.parts else path.absolute()
