"""What the keys of a file say, and of the files that it names: one row for every key, and what it sets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from os.path import isfile
from pathlib import Path
from typing import Any, Literal

from shardwise.core.errors import RecipeError, shorten
from shardwise.core.paths import path_of
from shardwise.plugins.importers.draft import DEFAULT_MARK, Draft, Statement
from shardwise.plugins.importers.foreign import leaves, read_foreign
from shardwise.plugins.importers.formats import OFF, ForeignFormat, Mapped, format_named
from shardwise.recipe.yaml_source import resolve_scalar

Status = Literal["no equivalent", "unknown", "mapped", "not needed", "default", "assumed"]


@dataclass(frozen=True)
class KeyRow:
    """One key of the other file: ``detail`` is the recipe's keys, or the reason."""

    key: str
    value: Any
    status: Status
    detail: str


@dataclass(frozen=True)
class File:
    """A file, or a section of one that is of another format.

    Attributes:
        parent: of its keys in the format's table.
        prefix: of its keys as shown.
        section: the key whose value it is, if it has no file of its own.
    """

    path: Path
    format: ForeignFormat
    values: Mapping[str, Any]
    parent: str = ""
    prefix: str = ""
    section: str = ""

    @property
    def name(self) -> str:
        """Of the file, or of the section."""
        return self.path.name + (f": {self.section}" if self.section else "")


@dataclass
class Collection:
    """The rows of all keys, and a draft with what they say; mapped rows are finished when the recipe is.

    Attributes:
        stated: the names of keys that say something.
    """

    draft: Draft = field(default_factory=Draft)
    rows: list[KeyRow] = field(default_factory=list)
    stated: set[str] = field(default_factory=set)
    files: list[File] = field(default_factory=list)

    def read(self, file: File) -> None:
        """Collect a file and those that it names. Raises RecipeError for a training that Shardwise cannot do."""
        self.files.append(file)
        named = list[File]()
        for key, shown, value in leaves(file.values, file.parent):
            inside = next((own for own in file.format.nested if key == own or key.startswith(f"{own}.")), "")
            other = file.format.nested.get(inside, "")
            if other and file.parent != inside and value not in OFF and (key == inside or other != "."):
                if key == inside:
                    named += self._named(file, key, shown, value, other)
            else:
                self._key(file, key, file.prefix + shown, value)
        for inside, other in file.format.nested.items():
            inner = _find(file.values, inside) if other != "." else None
            if isinstance(inner, Mapping) and inner:
                prefix = f"{file.prefix}{inside}."
                named.append(File(file.path, format_named(other), inner, "", prefix, inside))
        for inner_file in named:
            self.read(inner_file)

    def settle(self) -> None:
        """Take over what the files say, and where they say nothing, what their trainers do, the first file's first."""
        self._overrule()
        self.draft.settle()
        for file in self.files:
            for key, entry in file.format.entries.items():
                if isinstance(entry, Mapped) and entry.default is not None:
                    self._default(file, entry, file.prefix + key + DEFAULT_MARK)

    def _default(self, file: File, entry: Mapped, name: str) -> None:
        draft = self.draft
        if entry.default == "auto":
            for target in entry.targets - {f"@{fact}" for fact in draft.keys}:
                draft.autos.setdefault(target.removeprefix("@"), []).append(name)
            return
        chosen = _mapped_values(entry, entry.default)
        if name.removesuffix(DEFAULT_MARK) in self.stated | draft.lost.keys():
            return
        if entry.values is not None and next(iter(chosen), "").removeprefix("@") in draft.keys:
            return  # of the whole choice, another key says another
        for target, value in chosen.items():
            target = re.sub("^@dataset:", "@dataset:0:", target)
            fact = target.removeprefix("@")
            if fact not in draft.keys and (file.format.complete or fact not in draft.autos):
                draft.take(target, value, name)

    def _key(self, file: File, key: str, name: str, value: Any) -> None:
        entry = file.format.entry(key)
        if entry is None and value in OFF and file.format.has_section(key):
            self.rows.append(KeyRow(name, value, "not needed", "off"))
        elif entry is None:
            near = get_close_matches(key, file.format.entries, n=1, cutoff=0.7)
            why = f"no key of {file.format.title}" + (f"; did you mean {near[0]}?" if near else "")
            self.rows.append(KeyRow(name, value, "unknown", why))
        elif isinstance(entry, Mapped):
            self.rows.append(KeyRow(name, value, "mapped", ""))
            self._map(file, entry, key, name, value)
        elif not entry.asks(value) or _is_auto(value):
            off = entry.why if entry.fate == "not needed" else "off"
            self.rows.append(KeyRow(name, value, "not needed", off))
        elif entry.fate == "refused":
            raise _refused_training(file, key, value, entry.why)
        else:
            self.rows.append(KeyRow(name, value, entry.fate, entry.why))

    def _map(self, file: File, entry: Mapped, key: str, name: str, value: Any) -> None:
        draft = self.draft
        if _is_auto(value) and "auto" not in (entry.values or {}):
            for target in entry.targets:
                draft.autos.setdefault(target.removeprefix("@"), []).append(name)
            return
        value = entry.null if value is None else value
        if value in (None, "", [], *entry.unset):
            return
        try:
            chosen = _mapped_values(entry, value)
        except ValueError as problem:
            if entry.refuse:
                raise _refused_training(file, key, value, entry.refuse) from None
            draft.lost[name] = str(problem)
            return
        self.stated.add(name)
        position = (re.findall(r"\[(\d+)\]", name) or ["0"])[-1]
        for target, meant in chosen.items():
            target = re.sub("^@(dataset|validation):", rf"@\1:{position}:", target)
            draft.state(target, Statement(key, name, file.name, value, meant))

    def _named(self, file: File, key: str, name: str, value: Any, other: str) -> list[File]:
        """The file that a key names, relative to the file that names it or to the current folder."""
        form = file.format if other == "." else format_named(other)
        parent = key if other == "." else ""
        text = str(value)
        if text.startswith("{"):
            content = _json(text, f"{file.path}: {key}")
            return [File(file.path, form, content, parent, f"{file.prefix}{name}.", key)]
        name_of_file = path_of(text)
        path = next((path for path in (file.path.parent / name_of_file, name_of_file) if isfile(path)), None)
        if path is not None:
            self.rows.append(KeyRow(file.prefix + name, value, "not needed", "its keys are in this list"))
            return [File(path, form, read_foreign(path), parent, f"{path.name}: ")]
        if isinstance(file.format.entry(key), Mapped):
            self._key(file, key, file.prefix + name, value)
        else:
            why = "there is no such file: import it on its own"
            self.rows.append(KeyRow(file.prefix + name, value, "no equivalent", why))
        return []

    def _overrule(self) -> None:
        """Mark the keys that a key of another file replaces, because the other trainer ignores them then."""
        statements = [statement for stated in self.draft.statements.values() for statement in stated]
        for file in self.files:
            for statement in [statement for statement in statements if statement.file == file.name]:
                entry = file.format.entries[statement.key]
                if isinstance(entry, Mapped) and entry.overrules:
                    self.draft.replaced |= {
                        other.name: f"{statement.name}: {statement.raw}"
                        for other in statements
                        if other.file != file.name and other.key.startswith(entry.overrules)
                    }


def _refused_training(file: File, key: str, value: Any, why: str) -> RecipeError:
    where = f"{file.path}: {key}: {shorten(str(value), 60)}"
    fix = f"train this with {file.format.title}, or remove {key}"
    return RecipeError("this training cannot be done here", where=where, why=why, fix=fix)


def _mapped_values(entry: Mapped, value: Any) -> dict[str, Any]:
    """What a value sets. Raises ValueError for a value that has no place."""
    on = {f"@enables:{entry.enables}": True} if entry.enables else {}
    if entry.values is not None:
        chosen = entry.values.get(str(value).lower())
        if chosen is None:
            raise ValueError(entry.otherwise or f"the values are {', '.join(entry.values)}")
        return {**chosen, **on} if chosen else {}
    if isinstance(entry.to, str):
        return {entry.to: value if entry.to in _TEXT else _scalar(value), **on}
    if not isinstance(value, list | tuple) or len(value) != len(entry.to):
        raise ValueError(f"it is no list of {len(entry.to)}")
    return dict(zip(entry.to, map(_scalar, value), strict=True))


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecipeError("not JSON", where=where, why=error.msg) from None
    return dict(values)


_TEXT = ("data.source", "@model")


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value.lower() == "auto"


def _scalar(value: Any) -> Any:
    """A number or a truth value that is written as text, as itself."""
    plain = resolve_scalar(value) if isinstance(value, str) and len(value) < 40 else value
    return plain if isinstance(plain, int | float) else value


def _find(values: Mapping[str, Any], key: str) -> Any:
    inner: Any = values
    for part in key.split("."):
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner
