"""The recipe that is being put together out of another trainer's files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.core.errors import RecipeError

ASSUMED = "assumed"
"""The source of a value that no file says."""

DEFAULT = " (default)"
"""Ends the name of a key whose value is the other trainer's default."""


@dataclass(frozen=True)
class Said:
    """What a key of a file says: ``name`` is the key as shown, with its file if another names that; ``raw`` the file's
    own value."""

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
        said: what the files say, by target: a key of the recipe, or an @fact.
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
    said: dict[str, list[Said]] = field(default_factory=dict)
    autos: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    targets: dict[str, list[str]] = field(default_factory=dict)

    def settle(self) -> None:
        """Take over what the files say. Raises RecipeError where they contradict each other."""
        for target, said in self.said.items():
            heard = [each for each in said if each.name not in self.replaced]
            if heard:
                self.take(target, heard[0].value, *(each.name for each in heard))
        pairs = list(self._contradictions())
        if not pairs:
            return
        files = list(dict.fromkeys(each.file for pair in pairs for each in pair))
        shown = [f"{a.key}: {a.raw} in {a.file}, {b.key}: {b.raw} in {b.file}" for a, b in pairs[:2]]
        more = [f"{len(pairs) - 2} more"] if len(pairs) > 2 else []
        what = "the file contradicts itself" if len(files) == 1 else "the files contradict each other"
        fix = "make them equal" + ("; in a DeepSpeed file, auto takes the other's" if len(files) > 1 else "")
        raise RecipeError(what, where=", ".join(files), why="; ".join([*shown, *more]), fix=fix)

    def _contradictions(self) -> Iterator[tuple[Said, Said]]:
        for said in self.said.values():
            heard = [each for each in said if each.name not in self.replaced]
            yield from ((heard[0], each) for each in heard[1:] if each.value != heard[0].value)

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
                targets[:] = [each for each in targets if each != target]

    def is_said(self, name: str) -> bool:
        """Whether a file says this fact or key of the recipe, and no default."""
        return any(not key.endswith(DEFAULT) for key in self.keys.get(name, ()))

    def place(self, name: str) -> str:
        """The file and the key that a fact is from, for an error."""
        key = self.keys[name][0]
        return key if ": " in key else f"{self.path.name}: {key}"

    def share_a_file(self, one: str, other: str) -> bool:
        """Whether two facts are from the same file."""
        return self.place(one).partition(": ")[0] == self.place(other).partition(": ")[0]

    def shown(self, *names: str) -> str:
        """Facts with the keys that they are from, for an error."""
        return ", ".join(
            f"{'/'.join(self.keys[name])}: {self.facts.get(name, self.values.get(name))}"
            for name in names
            if self.keys.get(name)
        )

    def number(self, name: str) -> float | None:
        """A fact as a number; None if it is absent. Raises RecipeError for other values."""
        value = self.facts.get(name)
        if value is None or isinstance(value, int | float):
            return value
        raise RecipeError(
            f"{self.keys[name][0]} is no number", where=self.keys[name][0], why=f"it is {value!r}"
        )
