"""`section.key=value` from the command line, put over a document.

Chosen: the value is literal text read by YAML's core schema for plain scalars, so a glob needs no quotes
beyond the shell's; only what opens with a bracket or a quote is read as YAML. Refused: reaching into lists
(`optimizer.betas.1=0.99`), which would need a second path syntax; the price is writing the whole list.
"""

import copy
import re
from collections.abc import Mapping, Sequence

from shardwise.core.document import (
    COMMAND_LINE,
    Composer,
    Document,
    KeyPath,
    Origin,
    Value,
    describe,
    dotted,
    printable,
    resolve_scalar,
)
from shardwise.core.errors import RecipeError, one_line, shorten

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")


def overridden(
    document: Document, overrides: Sequence[str], replaces: Mapping[KeyPath, Sequence[str]]
) -> Document:
    """`document` with each `section.key=value` put over it, in order; missing sections are made.

    `replaces` lists, for a key, its neighbours that say the same thing another way: naming the key on the
    command line drops those of the file, unless the file names the key itself.
    Raises RecipeError for what is not an override, or reaches through a value that is not a section.
    """
    values, origins = copy.deepcopy(document.values), dict(document.origins)
    for position, override in enumerate(overrides, 1):
        path, value, inner = _read_override(override)
        section, made = _section(values, path)
        if value is not None and path not in document.origins:
            for neighbour in replaces.get(path, ()):
                _drop_from_file(section, origins, (*path[:-1], neighbour))
        _forget(origins, path)
        section[str(path[-1])] = value
        origins |= {path[:depth]: Origin(position, 1) for depth in range(made, len(path) + 1)}
        origins |= {path + below: Origin(position, 1) for below in inner}
    return Document(document.name, values, origins)


def _read_override(override: str) -> tuple[KeyPath, Value, Mapping[KeyPath, Origin]]:
    """`section.key=value` to its path, value, and the key paths inside the value. Raises RecipeError."""
    key, equals, text = override.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not _KEY.fullmatch(key):
        shown = shorten(one_line(override), 60)
        why = "an override is section.key=value"
        raise RecipeError(f"'{shown}' is not an override", where=COMMAND_LINE, why=why)
    path: KeyPath = tuple(key.split("."))
    where = f"{COMMAND_LINE}: {shorten(key, 70)}"
    if not text:
        raise RecipeError(f"no value for {path[-1]}", where=where, fix=f"write {key}=null to unset it")
    try:
        if printable(text)[0] not in "[{\"'":
            return path, resolve_scalar(text), {}
        composer = Composer(text, COMMAND_LINE)
        return path, composer.document(), composer.origins
    except ValueError as error:
        raise RecipeError("cannot read the override", where=where, why=f"found {error}") from None
    except RecipeError as error:
        why = error.why if error.what.startswith("cannot") else error.what
        raise RecipeError("cannot read the override", where=where, why=why, fix=error.fix) from None


def _section(values: dict[str, Value], path: KeyPath) -> tuple[dict[str, Value], int]:
    """The mapping that holds the last key of `path`, made where missing, and the depth of the first made."""
    section, made = values, len(path)
    for depth, key in enumerate(path[:-1], 1):
        inner = section.get(str(key))
        if inner is None:
            inner = section[str(key)] = {}
            made = min(made, depth)
        if not isinstance(inner, dict):
            what, where = f"{dotted(path[:depth])} has no keys", f"{COMMAND_LINE}: {dotted(path)}"
            fix = f"override it whole, as {dotted(path[:depth])}=..."
            raise RecipeError(what, where=where, why=f"it is {describe(inner)}", fix=fix)
        section = inner
    return section, made


def _drop_from_file(section: dict[str, Value], origins: dict[KeyPath, Origin], path: KeyPath) -> None:
    """Remove the last key of `path` from `section`, when it was the file that wrote it."""
    origin = origins.get(path)
    if origin is not None and not origin.override:
        del section[str(path[-1])]
        _forget(origins, path)


def _forget(origins: dict[KeyPath, Origin], path: KeyPath) -> None:
    for known in [known for known in origins if known[: len(path)] == path]:
        del origins[known]
