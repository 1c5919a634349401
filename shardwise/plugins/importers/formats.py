"""The formats that can be imported: tables of keys in TOML, one file each.

A table says for each key where its value goes (``[map]``), why it is not needed (``[[not_needed]]``), that there is no
equivalent (``[[no_equivalent]]``), or that it asks for a training that Shardwise cannot do (``[[refused]]``). A key
also covers the keys below it, unless those have entries of their own; ``datasets[].path`` is the path of every item of
a list. ``extends`` names a table whose entries hold too. ``other_trainers.toml`` lists trainers whose files are not
read.

An entry of ``[map]`` has ``to``, a key of the recipe or an @fact that ``facts.py`` combines with others, or ``values``,
which gives the keys and values for each value; ``else`` says why any other is lost, ``refuse`` why it is refused.
``default`` is the value that the other trainer uses when the key is absent. ``unset`` lists values that say nothing;
null is one, unless ``null`` has the value that it means. ``enables`` names the section that the key turns on.
``overrules`` lists keys of the file that names this one, which the other trainer then ignores.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from shardwise.core.errors import RecipeError, one_of
from shardwise.recipe.sections import ModelSpec

FORMATS_FOLDER = Path(__file__).parent
FORMAT_NAMES = (
    "deepspeed",
    "accelerate",
    "trainer",
    "trl",
    "llamafactory",
    "axolotl",
    "litgpt",
    "torchtitan",
)
OFF: tuple[object, ...] = (None, False, "", "no", "none", 0, [], {})
"""Values that turn a key off."""

STRANGE = 3
"""So many keys that a format does not have, and more than a quarter of all, make a file one of another trainer."""

Fate = Literal["not needed", "no equivalent", "refused"]


@dataclass(frozen=True)
class Mapped:
    """A key with a place in the recipe; the fields are those of a table's ``[map]``."""

    to: str | tuple[str, ...] = ""
    values: Mapping[str, Mapping[str, Any]] | None = None
    otherwise: str = ""
    refuse: str = ""
    default: Any = None
    unset: tuple[object, ...] = ()
    null: Any = None
    enables: str = ""
    overrules: tuple[str, ...] = ()

    @property
    def targets(self) -> set[str]:
        """All keys of the recipe and facts that a value may set."""
        if self.values is not None:
            return {target for chosen in self.values.values() for target in chosen}
        return {self.to} if isinstance(self.to, str) else set(self.to)


@dataclass(frozen=True)
class Unmapped:
    """A key without a place. ``off`` lists values that ask for nothing; ``match`` is a pattern of those that do.

    A group of a table has one ``off`` for all of its keys, which is added to ``OFF``, or by key in ``only_off``, which
    stands in the place of both: of some keys 0 or 1 asks for something.
    """

    why: str
    fate: Fate
    off: tuple[object, ...] = OFF
    match: str = ""

    def asks(self, value: Any) -> bool:
        """Whether a value asks for something; True is not 1."""
        if self.match:
            items = value if isinstance(value, list) else [value]
            return any(re.search(self.match, str(item), re.IGNORECASE) for item in items)
        return not any(isinstance(value, bool) == isinstance(off, bool) and value == off for off in self.off)


Entry = Mapped | Unmapped


@dataclass(frozen=True)
class ForeignFormat:
    """One kind of file.

    Attributes:
        signature: top-level keys of which every such file has one.
        requires: top-level keys that every such file has, as sections or lists.
        nested: keys that name a file of another format, or hold its content; of ``.``, a section of the same.
        complete: whether the other trainer fills an ``auto`` of a nested file by its own defaults.
        facts: @facts of every such file.
    """

    name: str
    title: str
    signature: tuple[str, ...]
    requires: tuple[str, ...]
    nested: Mapping[str, str]
    complete: bool
    facts: Mapping[str, Any]
    entries: Mapping[str, Entry]

    def entry(self, key: str) -> Entry | None:
        """The entry of ``key`` (``a.b[].c``), or of its nearest parent that is not mapped; None if unknown."""
        if key in self.entries:
            return self.entries[key]
        while (cut := max(key.rfind("."), key.rfind("[]"))) > 0:
            key = key[:cut]
            if isinstance(entry := self.entries.get(key), Unmapped):
                return entry
        return None

    def has_section(self, key: str) -> bool:
        """Whether the table has keys below ``key``."""
        return any(entry.startswith(f"{key}.") for entry in self.entries)

    @property
    def tops(self) -> set[str]:
        """The top-level keys of the table."""
        return {key.split(".")[0].split("[")[0] for key in (*self.entries, *self.nested)}


@dataclass(frozen=True)
class Likeness:
    """What a file looks like.

    Attributes:
        format: None for a trainer whose files are not read.
        keys: those by which the file was recognised.
        strange: its top-level keys that the format does not have.
    """

    title: str
    format: ForeignFormat | None
    keys: tuple[str, ...]
    strange: tuple[str, ...] = ()


@cache
def format_named(name: str) -> ForeignFormat:
    """The format of a table. Raises RecipeError for a name that is not in FORMAT_NAMES."""
    if name not in FORMAT_NAMES:
        fix = one_of(name, FORMAT_NAMES)
        raise RecipeError(f"unknown format {name!r}", where="--format", fix=fix)
    table = _toml(name)
    base = format_named(table["extends"]) if "extends" in table else None
    return ForeignFormat(
        name=name,
        title=table["title"],
        signature=tuple(table["signature"]),
        requires=tuple(table.get("requires", ())),
        nested={**(base.nested if base else {}), **table.get("nested", {})},
        complete=table.get("complete", base is not None and base.complete),
        facts=table.get("facts", {}),
        entries={**(base.entries if base else {}), **dict(_entries(table))},
    )


def _entries(table: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
    fates: tuple[Fate, ...] = ("not needed", "no equivalent", "refused")
    for fate in fates:
        for group in table.get(fate.replace(" ", "_"), ()):
            off = (*OFF, *group.get("off", ()))
            only_off = group.get("only_off", {})
            for key in group["keys"]:
                values = (None, *only_off[key]) if key in only_off else off
                yield key, Unmapped(group["why"], fate, values, group.get("match", ""))
    for key, values in table.get("map", {}).items():
        entry: dict[str, Any] = {
            {"else": "otherwise"}.get(name, name): tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        yield key, Mapped(**entry)


@cache
def _toml(name: str) -> dict[str, Any]:
    return tomllib.loads((FORMATS_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def recognised(values: Mapping[str, Any]) -> Likeness | None:
    """What a file looks like by its keys; None for a recipe, or an unknown file."""
    model = values.get("model")
    if isinstance(model, Mapping) and any(key in ModelSpec.model_fields for key in model):
        return None
    likeness = [_likeness(form, values) for form in map(format_named, FORMAT_NAMES) if _fits(form, values)]
    best = min(likeness, key=lambda like: (len(like.strange), -len(like.keys)), default=None)
    parts = set(_key_names(values)) - (best.format.tops if best and best.format else set())
    for title, keys in _toml("other_trainers").items():
        if evidence := tuple(key for key in keys if key in parts):
            return Likeness(title, None, evidence)
    return best


def _likeness(form: ForeignFormat, values: Mapping[str, Any]) -> Likeness:
    keys = tuple(key for key in form.signature if key in values)
    return Likeness(form.title, form, keys, tuple(key for key in values if key not in form.tops))


def _fits(form: ForeignFormat, values: Mapping[str, Any]) -> bool:
    sections = all(isinstance(values.get(key), Mapping | list) for key in form.requires)
    return sections and any(key in values for key in form.signature)


def _key_names(values: Any) -> Iterator[str]:
    """All names of keys, at any depth."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield str(key)
            yield from _key_names(value)
    elif isinstance(values, list):
        for value in values:
            yield from _key_names(value)
