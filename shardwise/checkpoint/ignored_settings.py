"""Settings that the run in a folder would ignore: they are refused, with their names.

A finished run trains nothing. A run with a checkpoint of its own reads no weights of a base model or of another run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from shardwise.core.errors import RecipeError
from shardwise.core.paths import is_gone
from shardwise.core.user_objects import PATTERN, without_folder
from shardwise.recipe.section import Section
from shardwise.recipe.sections import Recipe

_HASHED_BYTES = 1 << 20
"""Bytes at both ends of a file of weights: of other weights, some of them differ."""


def require_same_settings(before: Recipe, recipe: Recipe, run_folder: Path) -> None:
    """Raise RecipeError if the recipe gives settings that the finished run in the folder does not have.

    They would be ignored. Steps are not compared: more of them are trained, and fewer are done.
    """
    was, now = _values_at_keys_of(recipe, before), _values_at_keys_of(recipe, recipe)
    other = [key for key, value in now.items() if not _is_same(was.get(key), value, key)]
    if other:
        shown = [f"{key} was {was.get(key)}, now {now[key]}" for key in other[:3]]
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        raise RecipeError(
            "the run in this folder is finished, with other settings",
            where=str(run_folder),
            why=", ".join(shown) + more,
            fix="give another --out, or set them back",
        )


def require_same_start(before: Recipe, recipe: Recipe, run_folder: Path) -> None:
    """Raise RecipeError if the recipe starts from other weights than the run in the folder did."""
    pairs: dict[str, tuple[str | None, str | None]] = {
        "checkpoint.start_from": (before.checkpoint.start_from, recipe.checkpoint.start_from),
        "model.hf": (before.model.hf, recipe.model.hf),
    }
    if before.adapter is not None and recipe.adapter is not None:
        pairs["adapter.start_from"] = before.adapter.start_from, recipe.adapter.start_from
    for key, (was, now) in pairs.items():
        if now is not None and not _is_same(was, now, key):
            raise RecipeError(
                f"{key} would be ignored",
                where=str(run_folder),
                why=f"it was {was}, now {now}, and the run goes on from a checkpoint of its own",
                fix="set it back, or train into another folder",
            )


def _values_at_keys_of(keys: Recipe, recipe: Recipe) -> dict[str, Any]:
    """The values of ``recipe`` for the keys that are set in ``keys``, by dotted name.

    Steps and epochs are left out, and the tokenizer, whose content is compared (resume_checks.py).
    """
    values: dict[str, Any] = {}
    for name in sorted(keys.model_fields_set - {"steps", "epochs"}):
        section, set_in = getattr(recipe, name), getattr(keys, name)
        if isinstance(set_in, Section) and isinstance(section, Section):
            values |= {f"{name}.{key}": getattr(section, key) for key in sorted(set_in.model_fields_set)}
        elif isinstance(set_in, Mapping):
            values |= {f"{name}.{key}": section.get(key) for key in set_in}
        else:
            values[name] = section
    values.pop("data.tokenizer", None)
    return values


def _is_same(before: Any, now: Any, key: str = "") -> bool:
    """Whether a setting is the same. A path is if it has the same content, or the former is gone: it may have moved."""
    if before == now:
        return True
    if isinstance(before, Section) and isinstance(now, Section):
        return _is_same(dict(before), dict(now))
    if isinstance(before, tuple) and isinstance(now, tuple):
        return len(before) == len(now) and all(map(_is_same, before, now))
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return before.keys() == now.keys() and all(_is_same(before[name], now[name]) for name in now)
    if not isinstance(before, str) or not isinstance(now, str):
        return False
    if key == "model.hf" and before.startswith("/") != now.startswith("/"):
        return True  # an id, and perhaps a copy of it
    module = without_folder(before)
    if module == without_folder(now) and re.fullmatch(PATTERN, module or ""):
        return True
    return is_gone(before) or _same_content(Path(before), Path(now))


def _same_content(before: Path, now: Path) -> bool:
    """Whether two paths have the same content."""
    if not before.is_absolute() or not before.exists() or not now.exists():
        return False
    return before.samefile(now) or _file_digests(before) == _file_digests(now)


def _file_digests(path: Path) -> dict[str, tuple[int, str]]:
    """Size, and a hash of both ends, of a file or of every file of a folder, by name."""
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    hashes = {}
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as opened:
            ends = xxhash.xxh3_128(opened.read(_HASHED_BYTES))
            opened.seek(max(0, size - _HASHED_BYTES))
            ends.update(opened.read(_HASHED_BYTES))
        hashes["" if path.is_file() else file.name] = size, ends.hexdigest()
    return hashes
