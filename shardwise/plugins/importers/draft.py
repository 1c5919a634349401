"""The recipe that is being put together out of another trainer's files."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.plugins.importers.foreign import line_of

ASSUMED = "assumed"
"""The source of a value that no file says."""

DEFAULT_MARK = " (default)"
"""Ends the name of a key whose value is the other trainer's default."""


@dataclass(frozen=True)
class Statement:
    """What a key of a file says of a target.

    Attributes:
        name: the key as shown, with its file if another file names that.
        file: the file, or the section of one that is of another format.
        raw: the file's own value.
    """

    key: str
    name: str
    file: str
    raw: Any
    value: Any


@dataclass
class Draft:
    """A recipe that is being put together.

    Attributes:
        path: of the first file.
        notes: what a user should know of a value of the recipe that no file says exactly so.
        statements: what the files say, by target: a key of the recipe, or an @fact.
        files: for each key of the other file, by its name as shown, the file or section that it is from.
        autos: keys with the value ``auto``, by target; another file or a default says the value.
        values: value of each key of the recipe, by its dotted name.
        sources: the other file's keys that each value is from, or ASSUMED.
        facts: values by @name, and ``keys`` the keys that they are from.
        lost: reason for each key of the other file that could not be used after all.
        replaced: for each key of the other file that another value replaces, what that is.
        targets: keys of the recipe that a key of the other file has set.
    """

    path: Path = Path()
    notes: dict[str, str] = field(default_factory=dict)
    statements: dict[str, list[Statement]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    autos: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    targets: dict[str, list[str]] = field(default_factory=dict)

    def state(self, target: str, statement: Statement) -> None:
        """Add what a key says of a target."""
        self.statements.setdefault(target, []).append(statement)
        self.files[statement.name] = statement.file

    def settle(self) -> None:
        """Take over what the files say. Raises RecipeError where they contradict each other."""
        pairs = list[tuple[Statement, Statement]]()
        for target, stated in self.statements.items():
            if valid := [statement for statement in stated if statement.name not in self.replaced]:
                self.take(target, valid[0].value, *(statement.name for statement in valid))
                pairs += [(valid[0], other) for other in valid[1:] if other.value != valid[0].value]
        if not pairs:
            return
        files = list(dict.fromkeys(statement.file for pair in pairs for statement in pair))
        shown = [f"{a.key}: {a.raw} in {a.file}, {b.key}: {b.raw} in {b.file}" for a, b in pairs[:2]]
        more = [f"{len(pairs) - 2} more"] if len(pairs) > 2 else []
        what = "the file contradicts itself" if len(files) == 1 else "the files contradict each other"
        fix = "make them equal" + ("; in a DeepSpeed file, auto takes the other's" if len(files) > 1 else "")
        raise RecipeError(what, where=", ".join(files), why="; ".join([*shown, *more]), fix=fix)

    def take(self, target: str, value: Any, *names: str) -> None:
        """Set a target of the tables, a key of the recipe or an @fact, from keys of the other file."""
        fact = target.removeprefix("@")
        self.keys[fact] = list(names)
        if fact != target:
            self.facts[fact] = value
        else:
            self.put(target, value, target)

    def put(self, target: str, value: Any, *names: str) -> None:
        """Set a key of the recipe from these facts."""
        self.values[target] = value
        keys = [key for name in names for key in self.keys.get(name, []) if key not in self.lost]
        self.sources[target] = list(dict.fromkeys([*self.sources.get(target, []), *keys]))
        autos = [key for name in names for key in self.autos.get(name, [])]
        for key in [*keys, *autos]:
            self.targets.setdefault(key, []).append(target)

    def assume(self, target: str, value: Any) -> None:
        """Set a key that the other file does not say."""
        if target not in self.values:
            self.values[target], self.sources[target] = value, [ASSUMED]

    def lose(self, name: str, why: str) -> None:
        """The keys of a fact have no equivalent."""
        self.lost |= dict.fromkeys(self.keys.get(name, []), why)

    def replace(self, name: str, by: str) -> None:
        """The keys of a fact, or of a key of the recipe, give way to an option of the command line."""
        self.replaced |= dict.fromkeys(self.keys.get(name, []), by)
        self.facts.pop(name, None)
        self.keys[name] = []

    def drop(self, section: str) -> None:
        """Leave out the keys that begin with ``section``: nothing in the recipe would read them."""
        for target in [target for target in self.values if target.startswith(section)]:
            del self.values[target], self.sources[target]
            for targets in self.targets.values():
                targets[:] = [other for other in targets if other != target]

    def is_said(self, name: str) -> bool:
        """Whether a file says this fact or key of the recipe, and no default."""
        return any(not key.endswith(DEFAULT_MARK) for key in self.keys.get(name, ()))

    def origin(self, name: str) -> str:
        """The file, its line where it is known, and the key that a fact is from, for an error."""
        key = self.keys[name][0]
        if ": " in key:
            return key
        line = line_of(self.path, key)
        return f"{self.path.name}: {key}" if line is None else f"{self.path.name}:{line}: {key}"

    def share_a_file(self, one: str, other: str) -> bool:
        """Whether two facts are from the same file, or section of one."""
        first, second = (self.files.get(self.keys[name][0]) for name in (one, other))
        return first == second

    def shown(self, *names: str) -> str:
        """Facts with the keys that they are from, for an error."""
        return ", ".join(
            f"{'/'.join(self.keys[name])}: {self.facts.get(name, self.values.get(name))}"
            for name in names
            if self.keys.get(name)
        )

    def number(self, name: str) -> float | None:
        """A fact, or a key of the recipe, as a number; None if absent. Raises RecipeError for other values."""
        value = self.facts.get(name, self.values.get(name))
        if value is None or (isinstance(value, int | float) and math.isfinite(value)):
            return value
        key = self.origin(name).rpartition(": ")[2]
        raise RecipeError(f"{key} is no number", where=self.origin(name), why=f"it is {value!r}")

    def size(self, name: str) -> int | None:
        """A fact, or a key of the recipe, as a whole number from 1; None if absent. Raises RecipeError for others."""
        value = self.number(name)
        if value is None or (value >= 1 and float(value).is_integer()):
            return None if value is None else int(value)
        key = self.origin(name).rpartition(": ")[2]
        raise RecipeError(f"{key} is no whole number from 1", where=self.origin(name), why=f"it is {value}")
