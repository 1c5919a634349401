"""Reading a JSON or YAML file of another trainer, and its keys as paths."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from shardwise.core.errors import RecipeError, one_line

LARGEST_FILE = 1024 * 1024


def read_foreign(path: Path) -> dict[str, Any]:
    """The content of a JSON or YAML file. Raises RecipeError if it is missing, malformed or no mapping."""
    where = str(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST_FILE + 1)
        if len(raw) > LARGEST_FILE:
            raise ValueError("it is larger than 1 MiB")
        text = raw.decode("utf-8-sig")
        values = json.loads(text) if path.suffix == ".json" else YAML(typ="safe", pure=True).load(text)
    except FileNotFoundError:
        raise RecipeError("file not found", where=where, why="there is no such file") from None
    except OSError as error:
        raise RecipeError("cannot read the file", where=where, why=str(error.strerror).lower()) from None
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RecipeError("not a YAML file", where=where + line, why=one_line(str(error.problem))) from None
    except json.JSONDecodeError as error:
        raise RecipeError("not a JSON file", where=f"{where}:{error.lineno}", why=error.msg) from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise RecipeError("cannot read the file", where=where, why=one_line(str(error))) from None
    if not isinstance(values, dict):
        raise RecipeError("this is not a configuration", where=where, why="it has no keys at its top level")
    return {str(key): value for key, value in values.items()}


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
