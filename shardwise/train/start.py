"""Which checkpoint of another run a new one starts from (``checkpoint.start_from``), before torch is loaded.

The path is a checkpoint, or the folder that holds a run's; then the newest whole one is meant. That folder is
somebody else's, perhaps of a run that still trains: nothing in it is made, renamed or deleted, whatever is
found there. A run folder with a checkpoint of its own goes on from that, and ``start_from`` is not looked at:
the same command starts and resumes.
"""

from __future__ import annotations

from pathlib import Path

from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.core.recipe import Recipe
from shardwise.train import manifest as manifests
from shardwise.train.manifest import Damaged, Manifest

_KEY = "checkpoint.start_from"


def check_start(recipe: Recipe, run_folder: Path) -> None:
    """Refuse, before anything is planned, a ``start_from`` that names nothing or leaves no step to do.

    Reads one manifest and no tensors; what is wrong with those is found when they are loaded.
    """
    if recipe.checkpoint.start_from is None or manifests.committed(run_folder / "checkpoints"):
        return
    newest = candidates(Path(recipe.checkpoint.start_from))[0]
    try:
        manifest = manifests.read(newest)
    except Damaged:
        return
    require_steps_left(recipe, newest, manifest)


def candidates(source: Path) -> list[Path]:
    """The checkpoints that ``source`` may mean, newest first. Raises CheckpointError when there are none."""
    if found := manifests.committed(source):
        return found
    if (source / manifests.NAME).exists():
        return [source]
    raise CheckpointError(
        "there is no checkpoint to start from",
        where=f"{_KEY}: {source}",
        why="no manifest.json is there, nor in a step-N below"
        if source.is_dir()
        else "there is no such folder",
        fix="name a step-N folder, or the checkpoints folder of a run",
    )


def require_steps_left(recipe: Recipe, checkpoint: Path, manifest: Manifest) -> None:
    """Raises RecipeError when the checkpoint is of the last step or beyond."""
    if manifest.state.step >= recipe.steps:
        raise RecipeError(
            "nothing is left to train",
            where=f"{_KEY}: {checkpoint}",
            why=f"it is of step {manifest.state.step}, and steps is {recipe.steps}",
            fix="raise steps, or start from an earlier checkpoint",
        )
