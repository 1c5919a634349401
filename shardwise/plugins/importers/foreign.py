"""Reading a JSON, TOML or YAML file of another trainer, and its keys as paths."""

from __future__ import annotations

import json
import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MantissaNoDotYAML1_1Warning, MarkedYAMLError, YAMLError

from shardwise.core.errors import RecipeError, one_line

LARGEST_FOREIGN_FILE = 1024 * 1024


def read_foreign(path: Path) -> dict[str, Any]:
    """The content of a JSON, TOML or YAML file. Raises RecipeError if it is missing, malformed or no mapping."""
    where = str(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST_FOREIGN_FILE + 1)
        if len(raw) > LARGEST_FOREIGN_FILE:
            raise ValueError("it is larger than 1 MiB")
        values = _parsed(path.suffix, raw.decode("utf-8-sig"))
    except FileNotFoundError:
        raise RecipeError("file not found", where=where, why="there is no such file") from None
    except OSError as error:
        raise RecipeError("cannot read the file", where=where, why=str(error.strerror).lower()) from None
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        what = "a key comes twice" if isinstance(error, DuplicateKeyError) else "not a YAML file"
        raise RecipeError(what, where=where + line, why=one_line(str(error.problem))) from None
    except json.JSONDecodeError as error:
        raise RecipeError("not a JSON file", where=f"{where}:{error.lineno}", why=error.msg) from None
    except tomllib.TOMLDecodeError as error:
        why, _, position = str(error).removesuffix(")").partition(" (at ")
        line = ":".join(["", *re.findall(r"line (\d+)", position)])
        raise RecipeError("not a TOML file", where=where + line, why=one_line(why)) from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise RecipeError("cannot read the file", where=where, why=one_line(str(error))) from None
    if not isinstance(values, dict):
        raise RecipeError("this is not a configuration", where=where, why="it has no keys at its top level")
    return {str(key): value for key, value in values.items()}


def _parsed(suffix: str, text: str) -> Any:
    if suffix == ".json":
        return json.loads(text, object_pairs_hook=_unique)
    if suffix == ".toml":
        return tomllib.loads(text)
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)  # PyYAML's, with which the other trainers read: `no` is false
    with warnings.catch_warnings(action="ignore", category=MantissaNoDotYAML1_1Warning):  # 1e-4
        return yaml.load(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A section of JSON. Raises ValueError for a key that it has twice, as YAML and TOML do."""
    section = dict(pairs)
    if len(section) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has twice the key {next(name for name in names if names.count(name) > 1)}")
    return section


def line_of(path: Path, key: str) -> int | None:
    """The line, from 1, in which a YAML or JSON file has a key, ``a.b`` or ``a[0].b``; None if it is not known."""
    try:
        node = YAML(pure=True).compose(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, YAMLError):
        return None
    line = None
    for name, position in re.findall(r"([^.\[\]]+)|\[(\d+)\]", key):
        inner = getattr(node, "value", None)
        if not isinstance(inner, list):
            return None
        if position:
            node = inner[int(position)] if int(position) < len(inner) else None
        else:
            pairs = (pair for pair in inner if isinstance(pair, tuple) and pair[0].value == name)
            named, node = next(pairs, (None, None))
            line = None if named is None else named.start_mark.line + 1
    return line


def leaves(values: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, str, Any]]:
    """(key, key with its list positions, value) of every value that is no section: ``a[].b``, ``a[0].b``."""
    yield from _leaves(values, parent, parent)


def _leaves(value: Any, key: str, shown: str) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, Mapping) and value:
        dot = "." if key else ""
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}{dot}{name}", f"{shown}{dot}{name}")
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for position, item in enumerate(value):
            yield from _leaves(item, f"{key}[]", f"{shown}[{position}]")
    else:
        yield key, shown, value
