"""``shardwise schema``: the JSON Schema of recipes."""

from __future__ import annotations

import json

import typer

from shardwise.recipe.json_schema import recipe_schema
from shardwise.technique import SETTINGS


def command() -> None:
    """Print the JSON Schema of recipes, for editors."""
    typer.echo(json.dumps(recipe_schema(SETTINGS), indent=2))
