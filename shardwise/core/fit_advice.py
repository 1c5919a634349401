"""Advice when a model does not fit: the remedies to try, in order, and what each one would cost.

Remedies are data (technique/fit_advice.py), as rules are. Each remedy states all its settings; it does not add to those
of the remedy before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.core.plan import Candidate


@dataclass(frozen=True)
class Remedy:
    """One way to need less memory.

    Attributes:
        name: a few words.
        why: what it does, and what it costs.
        tries: values of settings, tried in this order. Pinned settings keep the recipe's value.
        adapter: keys of the ``adapter:`` section that override the recipe's; None leaves the section as it is.
        optimizer: the same of the ``optimizer:`` section.
    """

    name: str
    why: str
    tries: tuple[Mapping[str, object], ...]
    adapter: Mapping[str, object] | None = None
    optimizer: Mapping[str, object] | None = None

    @property
    def changes_recipe(self) -> bool:
        """Whether it changes more than the strategy."""
        return self.adapter is not None or self.optimizer is not None


@dataclass(frozen=True)
class RemedyOutcome:
    """The prediction of one try of a remedy.

    Attributes:
        overrides: what the command line needs for it: section.key=value.
        unpinned: keys of the recipe's strategy that were not kept.
    """

    remedy: Remedy
    overrides: tuple[str, ...]
    candidate: Candidate
    unpinned: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.candidate.verdict == "fits"

    @property
    def in_words(self) -> str:
        """What to do: drop the pins that were not kept, or use the remedy."""
        overrides = " ".join(self.overrides)
        if self.unpinned:
            return f"unpin {' and '.join(f'strategy.{key}' for key in self.unpinned)}: fits with {overrides}"
        return f"use {self.remedy.name}: {overrides}" if overrides else "unpin strategy settings"


@dataclass(frozen=True)
class FitAdvice:
    """All outcomes in order, and the advice.

    Attributes:
        advised: the outcome to use; None if nothing fits, or if the plan itself does.
        reasons: sentences on why it is advised.
        planned: whether the plan itself fits, so that nothing has to change.
    """

    outcomes: tuple[RemedyOutcome, ...]
    advised: RemedyOutcome | None
    reasons: tuple[str, ...]
    planned: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The ``ladder`` object that ``plan --json`` prints."""
        return {
            "advised": list(self.advised.overrides) if self.advised else [] if self.planned else None,
            "reasons": list(self.reasons),
            "rungs": list(self._rows()),
        }

    def _rows(self) -> Iterator[dict[str, Any]]:
        for outcome in self.outcomes:
            candidate = outcome.candidate
            yield {
                "rung": outcome.remedy.name,
                "overrides": list(outcome.overrides),
                "line": candidate.line,
                "peak_bytes": candidate.peak_bytes,
                "step_seconds": candidate.step_seconds,
                "verdict": candidate.verdict,
                "reason": candidate.reason,
            }
