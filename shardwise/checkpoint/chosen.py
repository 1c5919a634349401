"""Which checkpoint of a run to read."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.checkpoint import latest, verified
from shardwise.checkpoint.manifest import Damaged
from shardwise.checkpoint.run_folder import CHECKPOINTS, RECIPE, load_run_recipe
from shardwise.core.errors import CheckpointError
from shardwise.core.paths import no_folder
from shardwise.core.run_files import Which
from shardwise.recipe.sections import Recipe


def recipe_in(folder: Path) -> Recipe:
    """The recipe of the run in ``folder``. Raises CheckpointError if it is none of a run."""
    if not (folder / RECIPE).is_file():
        why = f"no {RECIPE} in it" if folder.is_dir() else no_folder(folder)
        raise CheckpointError("not the folder of a run", where=str(folder), why=why)
    return load_run_recipe(folder)


def chosen_checkpoint(folder: Path, which: Which = "latest") -> Path:
    """The latest or the best checkpoint of the run in ``folder``, verified.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    newest = latest(folder / CHECKPOINTS)
    if newest is None:
        fix = "train first: shardwise train --out DIR"
        raise CheckpointError("no checkpoint", where=str(folder), fix=fix)
    if which == "latest":
        return newest
    best = manifests.read_manifest(newest).state.best
    if best is None:
        raise CheckpointError(
            "the run has no best checkpoint",
            where=str(folder),
            why="checkpoint.best is not set, or was finite in no evaluation",
            fix="take the latest, or train with checkpoint.best: held_out_loss",
        )
    path = newest.with_name(f"step-{best.step}")
    try:
        verified(path)
    except (Damaged, OSError) as damage:
        raise CheckpointError(
            "the best checkpoint cannot be read", where=str(path), why=str(damage)
        ) from None
    return path
