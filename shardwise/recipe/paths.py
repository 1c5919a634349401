"""Which keys of a recipe are paths, and where they start (core/paths.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardwise.core.call_signatures import Call, require_callable
from shardwise.core.errors import RecipeError
from shardwise.core.module_files import require_defined
from shardwise.core.paths import PathBase, path_of
from shardwise.core.strategy import FolderForm, Setting
from shardwise.hardware.profiles import OWN
from shardwise.recipe.yaml_source import KeyPath, YamlDocument

_LONGEST_NAME, _LONGEST_PATH = 250, 3000
"""Bytes of a file's name and of a path; file systems take 255 and 4095, and folders and ``.py`` are added to them."""

Locate = Callable[[PathBase, str], str]

_PATHS: dict[KeyPath, Locate] = {
    ("model", "hf"): PathBase.located,
    ("model", "factory"): PathBase.located_module,
    ("data", "source"): PathBase.located_source,
    ("data", "mixture", "*", "source"): PathBase.located_source,
    ("data", "tokenizer"): lambda base, name: name if name == "bytes" else base.located(name),
    ("evaluation", "sets", "*"): PathBase.located_source,
    ("evaluation", "metrics"): PathBase.located_module,
    ("adapter", "start_from"): PathBase.located,
    ("checkpoint", "start_from"): PathBase.located,
    ("cluster", "device"): lambda base, name: base.located(name) if name.endswith(OWN) else name,
    ("optimizer", "factory"): PathBase.located_module,
    ("schedule", "factory"): PathBase.located_module,
    ("objective", "factory"): PathBase.located_module,
    ("objective", "rewards", "*"): PathBase.located_module,
    ("objective", "reward_model"): PathBase.located,
    ("callbacks", "*"): PathBase.located_module,
}
"""The keys that are paths, ids or modules, with * for every item."""


_CALLS: dict[KeyPath, Call] = {
    ("model", "factory"): Call(),
    ("evaluation", "metrics"): Call(("predictions", "batch")),
    ("optimizer", "factory"): Call(("named_parameters",), optional=("lr",)),
    ("schedule", "factory"): Call(("step", "steps")),
    ("objective", "factory"): Call(("recipe",)),
    ("objective", "rewards", "*"): Call(("prompts", "completions"), keywords=None),
    ("callbacks", "*"): Call(("values",), methods="on_"),
}
"""How the objects are called; a factory gets the ``arguments`` of its section, too."""


def require_modules(document: YamlDocument) -> None:
    """Raise RecipeError, with file and line, for an object of a user's module that is not there or cannot be called.

    Imports nothing.
    """
    for pattern in (pattern for pattern, locate in _PATHS.items() if locate is PathBase.located_module):
        for section, key, path in _matching(document.values, pattern, ()):
            if isinstance(section[key], str):
                require_defined(section[key], document.where(path))
                arguments = section.get("arguments") if isinstance(section, dict) else None
                call = _CALLS[pattern]
                if arguments:
                    call = replace(call, keywords=arguments)
                require_callable(section[key], document.where(path), call)


def with_whole_paths(document: YamlDocument, settings: Sequence[Setting[Any]] = ()) -> YamlDocument:
    """The document with whole paths for those that exist, so that it can be read from any folder.

    Args:
        settings: the keys of ``strategy:``, for values with the path of a folder.

    Raises:
        RecipeError: a path is of a user without a home folder, or no file system has names as long as one in it.
    """
    values = copy.deepcopy(document.values)
    bases = {False: _base_of(document), True: PathBase.here()}
    for pattern, locate in (*_PATHS.items(), *_folders(settings), (("law",), _law_path)):
        for section, key, path in _matching(values, pattern, ()):
            value = section[key]
            if isinstance(value, str) and value:
                _require_short(value, document.where(path))
                section[key] = locate(bases[document.origin(path).override > 0], value)
    return replace(document, values=values)


def _require_short(name: str, where: str) -> None:
    """Looking for a file with a longer name would raise OSError, whatever is there."""
    longest = max(map(_size, name.split("/")))
    whole = _size(name)
    for size, most in ((longest, _LONGEST_NAME), (whole, _LONGEST_PATH)):
        if "://" not in name and size > most:
            raise RecipeError(
                "a name is too long for a file",
                where=where,
                why=f"it has {size} bytes, and file systems take {most}",
                fix="give the path, id or module that is meant",
            )


def _size(name: str) -> int:
    return len(name.encode(errors="replace"))


def _base_of(document: YamlDocument) -> PathBase:
    return PathBase.here() if document.file is None else PathBase.of_file(document.file)


def _folders(settings: Sequence[Setting[Any]]) -> Iterator[tuple[KeyPath, Locate]]:
    """The keys of ``strategy:`` with values such as ``nvme:FOLDER``."""
    for setting in settings:
        forms = [form for form in setting.forms if isinstance(form, FolderForm)]

        def located(base: PathBase, value: str, forms: list[FolderForm] = forms) -> str:
            for form in forms:
                if (folder := form.folder(value)) is not None:
                    return form.value(base.located(folder))
            return value

        if forms:
            yield ("strategy", setting.key), located


def _law_path(base: PathBase, name: str) -> str:
    """The path of a file; a published law is a word."""
    return base.located(name) if "/" in name or path_of(name).suffix else name


def _matching(value: Any, pattern: KeyPath, path: KeyPath) -> Iterator[tuple[Any, str | int, KeyPath]]:
    """(section or list, key, path) of every value of the pattern that is there."""
    key = pattern[0]
    rest = pattern[1:]
    keys: Sequence[str | int] = ()
    if isinstance(value, dict):
        keys = list(value) if key == "*" else [key] if key in value else []
    elif isinstance(value, list) and key == "*":
        keys = range(len(value))
    for inner in keys:
        if rest:
            yield from _matching(value[inner], rest, (*path, inner))
        else:
            yield value, inner, (*path, inner)
