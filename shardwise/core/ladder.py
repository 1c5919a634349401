"""The ladder: what to change, in which order, when training does not fit; and what each change would cost.

Rungs are data (technique/ladder.py), as rules are. A rung replaces what those before it changed: it says itself which
of that it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.core.plan import Candidate


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        name: a few words.
        why: what it gives and takes, in words.
        tries: values of settings, tried in this order; what a recipe pins stays as it is.
        adapter: keys of the ``adapter:`` section, over those of the recipe; None trains what the recipe trains.
    """

    name: str
    why: str
    tries: tuple[Mapping[str, object], ...]
    adapter: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Foothold:
    """One try of a rung, as predicted. ``overrides`` are what the command line needs for it: section.key=value."""

    rung: Rung
    overrides: tuple[str, ...]
    candidate: Candidate

    @property
    def fits(self) -> bool:
        return self.candidate.verdict == "fits"


@dataclass(frozen=True)
class Ladder:
    """Everything that was tried, in order.

    Attributes:
        advised: the first that is worth taking; None where nothing fits.
        reasons: how it was arrived at, in sentences.
    """

    footholds: tuple[Foothold, ...]
    advised: Foothold | None
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """What ``plan --json`` prints."""
        return {
            "advised": list(self.advised.overrides) if self.advised else None,
            "reasons": list(self.reasons),
            "rungs": list(self._rungs()),
        }

    def _rungs(self) -> Iterator[dict[str, Any]]:
        for foothold in self.footholds:
            found = foothold.candidate
            yield {
                "rung": foothold.rung.name,
                "overrides": list(foothold.overrides),
                "line": found.line,
                "peak_bytes": found.peak_bytes,
                "step_seconds": found.step_seconds,
                "verdict": found.verdict,
                "reason": found.reason,
            }
