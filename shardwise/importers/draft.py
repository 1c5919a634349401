"""The recipe that is being put together out of another trainer's file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwise.core.errors import RecipeError

ASSUMED = "assumed"
"""The source of a value that the other file does not say."""


@dataclass
class Draft:
    """A recipe that is being put together.

    Attributes:
        values: value of each key, by its dotted name.
        sources: the other file's keys that each value is from, or ASSUMED.
        facts: values by @name, and ``keys`` the keys that they are from.
        lost: reason for each key of the other file that could not be used after all.
        idle: reason for each key of the other file that asks for nothing.
        targets: keys of the recipe that a key of the other file has set.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    targets: dict[str, list[str]] = field(default_factory=dict)

    def put(self, target: str, value: Any, *names: str) -> None:
        """Set a key of the recipe from these facts."""
        self.values[target] = value
        keys = [key for name in names for key in self.keys.get(name, []) if key not in self.lost]
        self.sources[target] = list(dict.fromkeys([*self.sources.get(target, []), *keys]))
        for key in keys:
            self.targets.setdefault(key, []).append(target)

    def assume(self, target: str, value: Any) -> None:
        """Set a key that the other file does not say."""
        if target not in self.values:
            self.values[target], self.sources[target] = value, [ASSUMED]

    def lose(self, name: str, why: str) -> None:
        """The keys of a fact have no equivalent."""
        self.lost |= dict.fromkeys(self.keys.get(name, []), why)

    def drop(self, section: str) -> None:
        """Leave out the keys that begin with ``section``: nothing in the recipe would read them."""
        for target in [target for target in self.values if target.startswith(section)]:
            del self.values[target], self.sources[target]
            for targets in self.targets.values():
                targets[:] = [each for each in targets if each != target]

    def number(self, name: str) -> float | None:
        """A fact as a number; None if it is absent. Raises RecipeError for other values."""
        value = self.facts.get(name)
        if value is None or isinstance(value, int | float):
            return value
        raise RecipeError(
            f"{self.keys[name][0]} is no number", where=self.keys[name][0], why=f"it is {value!r}"
        )
