"""The JSON Schema of recipes, for editors that complete keys and mark mistakes (``shardwise schema``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.core.strategy import Setting
from shardwise.recipe.section import Section
from shardwise.recipe.sections import Recipe

_JSON_TYPES: Mapping[type, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}


def recipe_schema(settings: Sequence[Setting[Any]]) -> dict[str, Any]:
    """The schema, with each key's documentation.

    Args:
        settings: the keys of ``strategy:``.
    """
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Shardwise recipe"
    _document(schema, Recipe)
    for section in Section.__subclasses__():
        if section.__name__ in schema["$defs"]:
            _document(schema["$defs"][section.__name__], section)
    schema["properties"]["strategy"] = {
        "type": "object",
        "description": Recipe.meanings()["strategy"],
        "additionalProperties": False,
        "properties": {setting.key: _setting_schema(setting) for setting in settings},
    }
    return schema


def _document(schema: dict[str, Any], section: type[Section]) -> None:
    for key, meaning in section.meanings().items():
        if key in schema["properties"]:
            schema["properties"][key]["description"] = " ".join(meaning.split())


def _setting_schema(setting: Setting[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": setting.doc}
    if setting.choices and not setting.forms:
        return schema | {"enum": [*setting.choices, None]}
    schema["type"] = [_JSON_TYPES[setting.kind], "null"]
    limits = {"minimum": setting.minimum, "maximum": setting.maximum}
    return schema | {name: limit for name, limit in limits.items() if limit is not None}
