"""``shardwise plan A --vs B``: the recipes to compare. Overrides may follow ``--vs`` as they follow a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from shardwise.recipe.installed import recipe_file
from shardwise.recipe.sections import Recipe

OPTION = "--vs"
_SEPARATOR = "\n"
_OVERRIDE = re.compile(r"[\w.]+=")


class PlanCommand(TyperCommand):
    """A command line whose ``--vs`` takes the overrides that follow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, joined_options(args))


def joined_options(arguments: Sequence[str]) -> list[str]:
    """The arguments with each ``--vs`` and what belongs to it as two."""
    result: list[str] = []
    for argument in arguments:
        if result[-2:-1] == [OPTION] and _OVERRIDE.match(argument):
            result[-1] += f"{_SEPARATOR}{argument}"
        else:
            result.append(argument)
    return result


def recipes(
    recipe: Path,
    overrides: Sequence[str],
    versus: Sequence[str],
    read: Callable[[Path, Sequence[str]], Recipe],
) -> Iterator[tuple[str, Callable[[], Recipe]]]:
    """The first recipe and those to compare it with, each with its name and what reads it: the first one with more
    overrides, or another with its own."""
    yield str(recipe), partial(read, recipe, overrides)
    for value in versus:
        first, *more = value.split(_SEPARATOR)
        if _OVERRIDE.match(first):
            yield " ".join((first, *more)), partial(read, recipe, [*overrides, first, *more])
        else:
            yield " ".join((first, *more)), partial(read, recipe_file(first), more)
