"""The page of an exploration: one file without requests, or served while its points are predicted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from shardwise.core.atomic_file import write_whole
from shardwise.core.units import format_count
from shardwise.plugins.explorer.exploration import Exploration, asked_in
from shardwise.report.template import policy, rendered, script, template_text

CODE = script("explorer.js", __package__)


def write_page(exploration: Exploration, path: Path) -> None:
    """Write the page as it is now. Raises ResourceError."""
    write_whole(path, page_of(exploration).encode())


def page_of(exploration: Exploration, live: bool = False) -> str:
    """The page as HTML.

    Args:
        live: whether it is served, and asks its server for points.
    """
    values = {
        "name": exploration.name,
        "facts": list(_plan_facts(exploration)),
        "data": exploration.data(),
        "live": live,
        "own_style": Markup(template_text("explorer.css", __package__)),
    }
    return rendered("explorer.html", values, live, __package__, CODE)


def _plan_facts(exploration: Exploration) -> Iterator[str]:
    plan = exploration.plan
    recipe = exploration.workloads.recipe
    yield plan.parameters_in_words
    yield plan.cluster
    if recipe.steps:
        yield f"{recipe.steps:,} steps, {format_count(recipe.steps * plan.step.tokens)} {plan.step.unit} in all"


class ExplorationPage:
    """The page that a server shows (plugins/live/server.py)."""

    policy = policy(live=True, code=CODE)

    def __init__(self, exploration: Exploration) -> None:
        self._exploration = exploration

    def page(self) -> str:
        """The page as HTML."""
        return page_of(self._exploration, live=True)

    def now(self, query: str) -> str | None:
        """Points since those that the page has, as JSON; None if there are none. The query may ask for a point."""
        points, texts, choice = asked_in(query)
        if choice is not None:
            self._exploration.ask(choice)
        news = self._exploration.since(points, texts)
        return json.dumps(news, separators=(",", ":")) if news["points"] or self._exploration.done else None
