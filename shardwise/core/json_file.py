"""JSON files of a run as dataclasses: one class writes a file, reads it and checks it.

A file's fields, types and limits are declared once, on a plain dataclass. pydantic checks them when a file is read,
because files are also written by other versions and edited by hand. Building an object in Python is not checked, so
it costs nothing. Types are strict ("1" is not 1). Unknown keys are ignored unless a class forbids them: a newer
version may write more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, GetPydanticSchema, TypeAdapter, ValidationError
from pydantic_core import core_schema

from shardwise.core.errors import DataError

T = TypeVar("T")
# What a signed 64-bit integer holds, for readers in other languages.
Size = Annotated[int, Field(ge=0, lt=2**63)]
Total = Annotated[int, Field(ge=0, lt=2**128)]
"""A number that 64 bits may not hold, as the FLOPs of a batch of 405B weights."""
PositiveInt = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

CLOSED = ConfigDict(extra="forbid")
"""For ``__pydantic_config__`` of a class that accepts no other keys."""

_JSON_POSITION = re.compile(r" at line (\d+) column \d+")
_OTHER_VERSION = {"value_error", "unexpected_keyword_argument", "literal_error"}
"""Kinds of faults in files that are well-formed but hold what this version does not know."""
_type_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def written_as(
    kind: object, read: Callable[[Any], object], write: Callable[[Any], object]
) -> GetPydanticSchema:
    """For ``Annotated``: the file holds a ``kind``, which ``read`` turns into the annotated type and ``write`` back."""
    return GetPydanticSchema(
        lambda _, schema_of: core_schema.no_info_after_validator_function(
            read, schema_of(kind), serialization=core_schema.plain_serializer_function_ser_schema(write)
        )
    )


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as the data that its file holds: dictionaries, lists, numbers and text."""
    return _type_adapter(type(value)).dump_python(value, mode="json")


def text_of(value: Any) -> str:
    """The text of a dataclass's file. NaN is written as NaN, which Python's readers of JSON accept."""
    return json.dumps(plain(value), indent=1)


def read_json(path: Path, kind: type[T]) -> T:
    """Read a file that ``text_of`` wrote. Raises DataError, with the line or the key at fault."""
    return parse_json(read_text(path), kind, path)


def parse_json(text: str, kind: type[T], path: Path, line: int | None = None) -> T:
    """The value in ``text``, a whole file or its line ``line``. Raises DataError."""
    try:
        return checked(text, kind)
    except ValidationError as error:
        invalid = error.errors(include_url=False)[0]["type"]
        key, why = fault_of(error)
    if invalid == "json_invalid":
        inner = _JSON_POSITION.search(why)
        number = (line or 1) + (int(inner[1]) if inner else 1) - 1
        raise DataError(f"{path.name} is not JSON", where=f"{path}:{number}", why=_JSON_POSITION.sub("", why))
    where = f"{path}:{line}" if line else str(path)
    other = f"{path.name} is not a {path.stem} of this version"
    raise DataError(
        other if invalid in _OTHER_VERSION else "unexpected content",
        where=f"{where}: {key}" if key else where,
        why=why,
    )


def checked(text: str | bytes, kind: type[T], context: Any = None) -> T:
    """The value in ``text``. Raises pydantic's ValidationError."""
    value: T = _type_adapter(kind).validate_json(text, strict=True, context=context)
    return value


def fault_of(error: ValidationError) -> tuple[str, str]:
    """The key path of the first fault, and a description of the fault."""
    fault = error.errors(include_url=False)[0]
    why = fault["msg"].removeprefix("Value error, ").removeprefix("Invalid JSON: ")
    return ".".join(str(part) for part in fault["loc"]), why


def read_text(path: Path) -> str:
    """The text of a file in UTF-8. Raises DataError."""
    return decoded(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises DataError."""
    try:
        return path.read_bytes()
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError(f"cannot read {path.name}", where=str(path), why=why) from error


def decoded(raw: bytes, path: Path) -> str:
    """UTF-8 as text. Raises DataError with the line at fault."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(f"{path.name} is not text", where=f"{path}:{line}", why="it is not UTF-8") from error
