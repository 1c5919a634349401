"""Overrides from the command line, `section.key=value`, applied to a document.

A value is a plain scalar of YAML's core schema, so a glob needs only the shell's quotes. A value that starts with a
bracket or a quote is read as YAML. An override cannot set one item of a list; write the whole list.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise.core.errors import RecipeError, one_line, shorten
from shardwise.recipe.yaml_source import (
    COMMAND_LINE,
    Composer,
    KeyPath,
    Origin,
    Value,
    YamlDocument,
    describe,
    dotted,
    require_printable,
    resolve_scalar,
)

NAMED: KeyPath = ("objective",)
"""The section that may be written as its name alone: ``objective: dpo``."""

_KEY_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")


def overridden(
    document: YamlDocument, overrides: Sequence[str], replaces: Mapping[KeyPath, Sequence[str]]
) -> YamlDocument:
    """Apply each `section.key=value` to `document`, in order. Missing sections are created.

    Args:
        replaces: key -> other keys of its section that are an alternative to it. Setting the key on the command
            line removes those that the file has, unless the file also has the key.

    Raises:
        RecipeError: for a malformed override, or one with a parent that is not a section.
    """
    values = copy.deepcopy(document.values)
    origins = dict(document.origins)
    for position, override in enumerate(overrides, 1):
        path, value, inner = _read_override(override)
        if path == NAMED and isinstance(value, str):
            value = {"name": value}
            inner = {("name",): Origin(position, 1)}
        section, first_new = _innermost_section(values, path)
        if value is not None and path not in document.origins:
            for neighbour in replaces.get(path, ()):
                _drop_from_file(section, origins, (*path[:-1], neighbour))
        _forget(origins, path)
        section[str(path[-1])] = value
        origins |= {path[:depth]: Origin(position, 1) for depth in range(first_new, len(path) + 1)}
        origins |= {path + below: Origin(position, 1) for below in inner}
    return replace(document, values=values, origins=origins)


def _read_override(override: str) -> tuple[KeyPath, Value, Mapping[KeyPath, Origin]]:
    """Split `section.key=value` into path, value, and the key paths inside the value. Raises RecipeError."""
    key, equals, text = override.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not _KEY_PATH.fullmatch(key):
        shown = shorten(one_line(override), 60)
        why = "an override is section.key=value"
        raise RecipeError(f"'{shown}' is not an override", where=COMMAND_LINE, why=why)
    path: KeyPath = tuple(key.split("."))
    where = f"{COMMAND_LINE}: {shorten(key, 70)}"
    if not text:
        raise RecipeError(f"no value for {path[-1]}", where=where, fix=f"write {key}=null to unset it")
    try:
        if require_printable(text)[0] not in "[{\"'":
            return path, resolve_scalar(text), {}
        composer = Composer(text, COMMAND_LINE)
        return path, composer.document(), composer.origins
    except ValueError as error:
        raise RecipeError("cannot read the override", where=where, why=f"found {error}") from None
    except RecipeError as error:
        why = error.why if error.what.startswith("cannot") else error.what
        raise RecipeError("cannot read the override", where=where, why=why, fix=error.fix) from None


def _innermost_section(values: dict[str, Value], path: KeyPath) -> tuple[dict[str, Value], int]:
    """The mapping with the last key of `path`, created if missing, and the depth of the first one created."""
    section = values
    first_new = len(path)
    for depth, key in enumerate(path[:-1], 1):
        inner = section.get(str(key))
        if inner is None:
            inner = section[str(key)] = {}
            first_new = min(first_new, depth)
        if not isinstance(inner, dict):
            what = f"{dotted(path[:depth])} has no keys"
            where = f"{COMMAND_LINE}: {dotted(path)}"
            fix = f"override it whole, as {dotted(path[:depth])}=..."
            raise RecipeError(what, where=where, why=f"it is {describe(inner)}", fix=fix)
        section = inner
    return section, first_new


def _drop_from_file(section: dict[str, Value], origins: dict[KeyPath, Origin], path: KeyPath) -> None:
    """Remove the last key of `path` from `section` if it came from the file."""
    origin = origins.get(path)
    if origin is not None and not origin.override:
        del section[str(path[-1])]
        _forget(origins, path)


def _forget(origins: dict[KeyPath, Origin], path: KeyPath) -> None:
    for known in [known for known in origins if known[: len(path)] == path]:
        del origins[known]
