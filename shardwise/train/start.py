"""Where a run starts, before torch is loaded: in its own folder, or from another run (``checkpoint.start_from``).

A folder that has a checkpoint goes on as the run that it is. What must not change is compared with the folder's own
recipe before that is written anew: settings such as the number of heads or an adapter's alpha leave every tensor's
shape as it was, and the run would go on, or be exported, as another model.

The path is a checkpoint, or the folder that holds a run's; then the newest whole one is meant. That folder is
somebody else's, perhaps of a run that still trains: nothing in it is made, renamed or deleted, whatever is
found there. A run folder with a checkpoint of its own goes on from that, and ``start_from`` is not looked at:
the same command starts and resumes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.core.errors import CheckpointError, RecipeError, ShardwiseError
from shardwise.core.recipe import Recipe, load_recipe
from shardwise.technique import SETTINGS
from shardwise.train import manifest as manifests
from shardwise.train.folder import RECIPE
from shardwise.train.manifest import Damaged, Manifest

_KEY = "checkpoint.start_from"


def check_start(recipe: Recipe, run_folder: Path) -> None:
    """Refuse, before anything is planned, another model than the folder's, and a ``start_from`` that is of no use.

    Reads the folder's recipe, one manifest and no tensors; what is wrong with those is found when they are loaded.
    Raises CheckpointError and RecipeError.
    """
    if manifests.committed(run_folder / "checkpoints"):
        _require_same_model(recipe, run_folder / RECIPE)
        return
    if recipe.checkpoint.start_from is None:
        return
    newest = candidates(Path(recipe.checkpoint.start_from))[0]
    try:
        manifest = manifests.read(newest)
    except Damaged:
        return
    require_steps_left(recipe, newest, manifest)


def _require_same_model(recipe: Recipe, path: Path) -> None:
    """Raise CheckpointError where the model is not that of the recipe at ``path``, if one can be read there."""
    try:
        before = load_recipe(path, [], SETTINGS)
    except (OSError, ShardwiseError):
        return
    was, now = _model_of(before), _model_of(recipe)
    for key in sorted(was.keys() | now.keys()):
        if was.get(key) != now.get(key):
            raise CheckpointError(
                "the checkpoint is of another run",
                where=str(path.parent),
                why=f"{key} was {was.get(key)}, now {now.get(key)}",
                fix=f"set {key} back, or train into another folder",
            )


def _model_of(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says of the function that is trained; not where its weights lay."""
    found = {f"model.{key}": value for key, value in recipe.model.model_dump(exclude={"hf"}).items()}
    if recipe.adapter is not None:
        kept = recipe.adapter.model_dump(include={"name", "rank", "alpha", "targets", "rank_stabilized"})
        found |= {f"adapter.{key}": value for key, value in kept.items()}
    return found


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
