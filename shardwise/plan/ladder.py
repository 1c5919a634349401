"""Climbing the ladder: every rung predicted for a recipe on its hardware, and which one to take.

The order and what each rung changes are data (technique/ladder.py); here they are dry-run. All of them, also those
behind the first that fits: what the next one would cost is what one wants to know. Predictions are quick ones, each
with the largest micro-batch that fits; up to the one that is advised they are dry-run in full, fragmentation and all.

A rung changes the strategy alone, or the recipe's adapter too. What the recipe pins stays pinned: a rung that would
change nothing else than that is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwise.core.cluster import Cluster
from shardwise.core.errors import RecipeError
from shardwise.core.ladder import Foothold, Ladder, Rung
from shardwise.core.plan import Candidate
from shardwise.core.recipe import Recipe
from shardwise.core.sections import AdapterSpec
from shardwise.core.strategy import Strategy
from shardwise.core.units import format_bytes
from shardwise.model.blueprint import blueprint_of
from shardwise.plan.search import Search
from shardwise.technique import LADDER, WHOLE, broken_rules, strategy_from


def climb(recipe: Recipe, cluster: Cluster) -> Ladder:
    """Predict every rung. Raises what building the recipe's own model raises."""
    footholds: list[Foothold] = []
    seen: set[tuple[AdapterSpec | None, Strategy]] = set()
    searches: dict[AdapterSpec | None, Search] = {}
    for rung in LADDER:
        asked = _with_adapter(recipe, rung)
        if asked.adapter not in searches:
            searches[asked.adapter] = Search(asked, blueprint_of(asked), cluster)
        for values in rung.tries:
            strategy = strategy_from({**values, **recipe.strategy})
            if (asked.adapter, strategy) in seen:
                continue
            seen.add((asked.adapter, strategy))
            settled = any(foothold.fits and foothold.rung is not WHOLE for foothold in footholds)
            candidate = _candidate(searches[asked.adapter], strategy, quick=settled)
            footholds.append(Foothold(rung, _overrides(recipe, asked, values), candidate))
            if footholds[-1].fits:
                break
    advised = _advised(footholds)
    return Ladder(tuple(footholds), advised, tuple(_reasons(footholds, advised, cluster)))


def _with_adapter(recipe: Recipe, rung: Rung) -> Recipe:
    if rung.adapter is None:
        return recipe
    given = recipe.adapter or AdapterSpec()
    return recipe.model_copy(update={"adapter": given.model_copy(update=dict(rung.adapter))})


def _candidate(search: Search, strategy: Strategy, quick: bool) -> Candidate:
    """As predicted, and unless ``quick`` dry-run in full where that fits.

    What a rule forbids, or what cannot be built here, has that as its reason.
    """
    for violation in broken_rules(strategy, search.cluster.world_size, search.recipe):
        return Candidate(strategy, "", 0, 0.0, "invalid", f"{violation.rule.key}: {violation.rule.reason}")
    try:
        found = search.tried(strategy)
        return found if quick or found.verdict != "fits" else search.confirmed(found)
    except RecipeError as error:
        return Candidate(strategy, "", 0, 0.0, "invalid", error.what)


def _overrides(recipe: Recipe, asked: Recipe, values: Mapping[str, object]) -> tuple[str, ...]:
    """What a command line adds to the recipe for a try."""
    adapter: list[str] = []
    if asked.adapter is not None:
        before = recipe.adapter.model_dump() if recipe.adapter else {"quantize": "none"}
        after = asked.adapter.model_dump()
        shown = ("name", "rank", "quantize")
        adapter = [f"adapter.{key}={after[key]}" for key in shown if after[key] != before.get(key)]
    defaults = strategy_from({})
    free = {key: value for key, value in values.items() if key not in recipe.strategy}
    changed = [f"strategy.{key}={value}" for key, value in free.items() if value != defaults.values[key]]
    return (*adapter, *changed)


def _advised(footholds: list[Foothold]) -> Foothold | None:
    """The first that fits. Where everything fits on one device, the next if that fits too: with one micro-batch, for
    which it leaves room, it sends no more."""
    fitting = [foothold for foothold in footholds if foothold.fits]
    if len(fitting) > 1 and fitting[0].rung is WHOLE and fitting[1] is footholds[1]:
        return fitting[1]
    return fitting[0] if fitting else None


def _reasons(footholds: list[Foothold], advised: Foothold | None, cluster: Cluster) -> Iterator[str]:
    first, capacity = footholds[0], format_bytes(cluster.capacity_bytes)
    if first.rung is WHOLE and first.candidate.verdict != "invalid":
        least = "" if first.candidate.step_seconds else "at least "
        needed = (
            f"whole on one device it takes {least}{format_bytes(first.candidate.peak_bytes)} of {capacity}"
        )
        if first.fits:
            yield f"{needed}: it fits, so state is divided for throughput and not for room"
        else:
            yield f"{needed}: it does not fit, so state is divided for room, the weights last"
    if advised is None:
        yield "nothing fits: this takes more devices, shorter sequences, or less of the strategy pinned"
        return
    if advised.rung.adapter is not None:
        yield "training all weights does not fit, divided, recomputed and offloaded: train few"
    yield f"take {advised.rung.name}: {advised.rung.why}" + (
        f"; {' '.join(advised.overrides)}" if advised.overrides else ""
    )
