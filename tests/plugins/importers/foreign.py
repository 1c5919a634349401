"""Configuration files of other trainers, written and imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.plugins.importers.collect import KeyRow
from shardwise.plugins.importers.convert import Imported, imported


def written(folder: Path, files: Mapping[str, Any]) -> Path:
    """Write files, each as text or as data in JSON, which is YAML too; the path of the first."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder / next(iter(files))


def convert(folder: Path, files: Mapping[str, Any], **options: Any) -> Imported:
    """Write files, and import the first; its model is a preset, unless the options say another."""
    return imported(written(folder, files), **{"model": "llama-3-8b", **options})


def value(made: Imported, key: str) -> Any:
    """A value of the recipe by its dotted key; None if it has none."""
    found: Any = made.values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def row(made: Imported, key: str) -> KeyRow:
    """The row of a key."""
    (only,) = [each for each in made.rows if each.key == key]
    return only
