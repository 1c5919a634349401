"""The formats that can be imported: tables of keys in TOML, one file each.

A table says for each key where its value goes (``[map]``), why it is not needed (``[[not_needed]]``), or that there is
no equivalent (``[[no_equivalent]]``). A key also covers the keys below it, unless those have entries of their own;
``datasets[].path`` is the path of every item of a list.

An entry of ``[map]`` has ``to``, a key of the recipe or an @fact that ``facts.py`` combines with others, or ``values``,
which gives the keys and values for each value, with ``else`` as the reason for any other. ``default`` is the value that
the other trainer uses when the key is absent. ``enables`` names the section that the key turns on.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.core.errors import RecipeError

FOLDER = Path(__file__).parent
NAMES = ("deepspeed", "accelerate", "trainer", "axolotl", "litgpt")
OFF: tuple[object, ...] = (None, False, "", "no", "none", 0, [], {})
"""Values that turn a key off."""


@dataclass(frozen=True)
class Mapped:
    """A key with a place in the recipe; the fields are those of a table's ``[map]``."""

    to: str = ""
    values: Mapping[str, Mapping[str, Any]] | None = None
    otherwise: str = ""
    default: Any = None
    enables: str = ""


@dataclass(frozen=True)
class Unmapped:
    """A key without a place: ``needed`` says whether the recipe lacks it, ``off`` which values ask for nothing."""

    why: str
    needed: bool
    off: tuple[object, ...] = OFF


Entry = Mapped | Unmapped


@dataclass(frozen=True)
class ForeignFormat:
    """One kind of file.

    Attributes:
        signature: top-level keys of which every such file has one.
        requires: top-level keys that every such file has, as sections or lists.
        nested: keys that name a file of another format, or hold its content.
        auto: whether the value ``auto`` leaves a key to the program that reads the file.
    """

    name: str
    title: str
    signature: tuple[str, ...]
    requires: tuple[str, ...]
    nested: Mapping[str, str]
    auto: bool
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


@cache
def format_named(name: str) -> ForeignFormat:
    """The format of a table. Raises RecipeError for a name that is not in NAMES."""
    if name not in NAMES:
        raise RecipeError(
            f"unknown format {name!r}", where="--format", fix=f"choose one of {', '.join(NAMES)}"
        )
    table = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    entries: dict[str, Entry] = {}
    for kind in ("not_needed", "no_equivalent"):
        for group in table.get(kind, ()):
            off = (*OFF, *group.get("off", ()))
            entry = Unmapped(group["why"], kind == "no_equivalent", off)
            entries |= dict.fromkeys(group["keys"], entry)
    for key, found in table["map"].items():
        entries[key] = Mapped(**{("otherwise" if k == "else" else k): v for k, v in found.items()})
    return ForeignFormat(
        name=name,
        title=table["title"],
        signature=tuple(table["signature"]),
        requires=tuple(table.get("requires", ())),
        nested=table.get("nested", {}),
        auto=table.get("auto", False),
        entries=entries,
    )


def recognised(values: Mapping[str, Any]) -> ForeignFormat | None:
    """The format of a file by its top-level keys; None for a recipe, or an unknown file."""
    if isinstance(values.get("model"), Mapping):
        return None
    fitting = [each for each in map(format_named, NAMES) if _fits(each, values)]
    return max(fitting, key=lambda each: _known(each, values), default=None)


def _fits(candidate: ForeignFormat, values: Mapping[str, Any]) -> bool:
    sections = all(isinstance(values.get(key), Mapping | list) for key in candidate.requires)
    return sections and any(key in values for key in candidate.signature)


def _known(candidate: ForeignFormat, keys: Iterable[str]) -> int:
    tops = {key.split(".")[0].split("[")[0] for key in candidate.entries}
    return sum(key in tops for key in keys)
