"""`section.key=value` from the command line, put over a document.

Chosen: the value is literal text read by YAML's core schema for plain scalars, so a glob needs no quotes beyond
the shell's; only what opens with a bracket or a quote is read as YAML. Refused: reaching into lists
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


METHOD
    def overridden(
        self, overrides: Sequence[str], replaces: Mapping[KeyPath, Sequence[str]] | None = None
    ) -> "Document":
        """This document with each `section.key=value` set over it, in order; missing sections are made.

        `replaces` lists, for a key, its neighbours that mean the same thing in another way: naming the key on
        the command line drops those of the file, unless the file names the key itself.
        Raises RecipeError for what is not an override, or reaches through a value that is not a section.
        """
        values, origins = copy.deepcopy(self.values), dict(self.origins)
        for position, override in enumerate(overrides, 1):
            path, value, inner = _read_override(override)
            for neighbour in (replaces or {}).get(path, ()) if value is not None else ():
                other = (*path[:-1], neighbour)
                if path not in self.origins and other in self.origins and not origins[other].override:
                    _section(values, path)[0].pop(neighbour, None)
                    _forget(origins, other)
            section, made = _section(values, path)
            section[str(path[-1])] = value
            _forget(origins, path)
            origins |= {path[:depth]: Origin(position, 1) for depth in range(made, len(path) + 1)}
            origins |= {path + below: Origin(position, 1) for below in inner}
        return Document(self.name, values, {p: o for p, o in origins.items() if _exists(values, p)})




def _read_override(override: str) -> tuple[KeyPath, Value, Mapping[KeyPath, Origin]]:
    """`section.key=value` to its path, value, and the key paths inside the value.

    The value is literal text by the core schema, so a glob needs no quotes beyond the shell's; only what
    opens with a bracket or a quote is read as YAML.
    """
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
        if _checked(text)[0] not in "[{\"'":
            return path, resolve_scalar(text), {}
        composer = _Composer(text, COMMAND_LINE)
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


def _forget(origins: dict[KeyPath, Origin], path: KeyPath) -> None:
    for known in [known for known in origins if known[: len(path)] == path]:
        del origins[known]


def _exists(values: Value, path: KeyPath) -> bool:
    for key in path:
        if isinstance(values, dict) and key in values:
            values = values[str(key)]
        elif isinstance(values, list) and isinstance(key, int) and key < len(values):
            values = values[key]
        else:
            return False
    return True
