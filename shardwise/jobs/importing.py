"""Recipes out of files of other trainers, checked as recipe files are. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from shardwise.core.errors import RecipeError
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.importers.convert import Imported
from shardwise.importers.foreign import read_foreign
from shardwise.importers.formats import recognised
from shardwise.recipe.load import parse_recipe
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, refuse_broken, refuse_unsupported


def is_foreign(path: Path) -> bool:
    """Whether a file is one of another trainer's, read or not; a recipe, or a file with a fault, is not."""
    if path.suffix in (".json", ".toml"):
        return path.is_file()
    try:
        return path.is_file() and recognised(read_foreign(path)) is not None
    except RecipeError:
        return False


def read_imported(found: Imported) -> tuple[Recipe, Cluster]:
    """The checked recipe and its cluster. Raises RecipeError for a value or a combination that is refused."""
    recipe = parse_recipe(found.text(), SETTINGS, f"recipe of {found.path.name}")
    cluster = cluster_of(recipe.cluster)

    def where(key: str) -> str:
        return f"strategy.{key} of {found.path.name}"

    refuse_broken(recipe, cluster.world_size, where)
    refuse_unsupported(recipe.strategy, cluster.device, where)
    return recipe, cluster
