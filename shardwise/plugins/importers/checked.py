"""Recipes out of files of other trainers, checked as recipe files are. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import isfile
from pathlib import Path

from shardwise.core.errors import RecipeError
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.plugins.importers.convert import Imported, imported
from shardwise.plugins.importers.foreign import read_foreign
from shardwise.plugins.importers.formats import recognised
from shardwise.recipe.load import parse_recipe
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, refuse_broken, refuse_unsupported


def is_foreign(path: Path) -> bool:
    """Whether a file is one of another trainer's, read or not; a recipe, or a file with a fault, is not."""
    if path.suffix in (".json", ".toml"):
        return isfile(path)
    try:
        return isfile(path) and recognised(read_foreign(path)) is not None
    except RecipeError:
        return False


def read_imported(conversion: Imported) -> tuple[Recipe, Cluster]:
    """The checked recipe and its cluster. Raises RecipeError for a value or a combination that is refused."""
    recipe = parse_recipe(conversion.text(), SETTINGS, f"recipe of {conversion.path.name}")
    cluster = cluster_of(recipe.cluster)

    def where(key: str) -> str:
        return f"strategy.{key} of {conversion.path.name}"

    refuse_broken(recipe, cluster.world_size, where)
    refuse_unsupported(recipe.strategy, cluster.device, where)
    return recipe, cluster


def read_for_plan(
    path: Path, overrides: Sequence[str], model: str | None, world: str | None
) -> tuple[Recipe, str]:
    """The recipe that another trainer's file becomes, and a sentence for the user. Raises RecipeError.

    The plan measures what the file's pins cost, and says it first.
    """
    conversion = imported(path, model=model, world=world, overrides=list(overrides))
    return read_imported(conversion)[0], f"{conversion.sentence()}; shardwise from shows all"
