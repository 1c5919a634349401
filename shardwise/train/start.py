"""Where a run starts, before torch is loaded: in its own folder, or from another run (``checkpoint.start_from``).

A folder that has a checkpoint goes on as the run that it is, or has nothing left to do. What must not change is
compared with the folder's own recipe before that is written anew: settings such as the number of heads or an adapter's
alpha leave every tensor's shape as it was, and the run would go on, or be exported, as another model; with another
tokenizer it would be asked in tokens that it was not trained on. The data itself is not looked at: whether a source
that has moved holds what it held, the ranks find out once they have opened it.

The path is a checkpoint, or the folder that holds a run's; then the newest whole one is meant. That folder is
somebody else's, perhaps of a run that still trains: nothing in it is made, renamed or deleted, whatever is
found there. A run folder with a checkpoint of its own goes on from that, and ``start_from`` is not looked at:
the same command starts and resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.core.errors import CheckpointError, DataError, RecipeError, ShardwiseError
from shardwise.core.recipe import Recipe, load_recipe
from shardwise.core.sections import DataSpec
from shardwise.technique import SETTINGS
from shardwise.train import manifest as manifests
from shardwise.train.folder import RECIPE
from shardwise.train.manifest import Damaged, Manifest

_KEY, _CHECKPOINTS = "checkpoint.start_from", "checkpoints"


def check_start(recipe: Recipe, run_folder: Path) -> None:
    """Refuse, before anything is planned, another run than the folder's, and a ``start_from`` that is of no use.

    Reads the folder's recipe, one manifest and no tensors; what is wrong with those is found when they are loaded.
    Raises CheckpointError, DataError and RecipeError.
    """
    if manifests.committed(run_folder / _CHECKPOINTS):
        if (before := _recipe_of(run_folder)) is not None:
            _require_same_run(before, recipe, run_folder)
        return
    if recipe.checkpoint.start_from is None:
        return
    newest = candidates(Path(recipe.checkpoint.start_from))[0]
    try:
        manifest = manifests.read(newest)
    except Damaged:
        return
    require_steps_left(recipe, newest, manifest)


def finished(recipe: Recipe, run_folder: Path) -> str:
    """What to say of a run whose steps are all done, by its newest whole checkpoint; "" where there are some to do.

    Files count as whole by their sizes: who reads them looks at their bytes.
    Also "" where the folder has no recipe that can be read: then the run is prepared once more, and has one.
    """
    if _recipe_of(run_folder) is None:
        return ""
    for checkpoint in manifests.committed(run_folder / _CHECKPOINTS):
        try:
            manifest = manifests.read(checkpoint)
            if manifest.state.step < recipe.steps:
                return ""
        except Damaged:
            continue
        if not manifests.has_all_bytes(checkpoint, manifest):
            continue
        return f"nothing to do: {manifest.state.step} of {recipe.steps} steps are done"
    return ""


def _recipe_of(run_folder: Path) -> Recipe | None:
    """The folder's recipe, if one can be read there."""
    try:
        return load_recipe(run_folder / RECIPE, [], SETTINGS)
    except (OSError, ShardwiseError):
        return None


_OTHER_RUN = (CheckpointError, "the checkpoint is of another run", "")
_OTHER_ORDER = (CheckpointError, "the checkpoint is of another run", ": samples would repeat or be left out")
_OTHER_DATA = (DataError, "the data is not what the checkpoint was trained on", "")


def _require_same_run(before: Recipe, now: Recipe, folder: Path) -> None:
    """Raise where the run of ``before`` cannot go on as ``now``: CheckpointError, or DataError for its data."""
    was, says = before.data, now.data
    _require_same(_OTHER_RUN, folder, _model_of(before), _model_of(now))
    _require_same(_OTHER_ORDER, folder, _order_of(before), _order_of(now))
    if now.model.factory is not None:  # its dataset is its own: of tokens nothing is asked
        key = "data.held_out"
        _require_same(_OTHER_DATA, folder, {key: was.held_out}, {key: says.held_out})
        return
    _require_same(_OTHER_DATA, folder, _cut_of(was), _cut_of(says))
    if not _same_tokenizer(was.tokenizer, says.tokenizer):
        key = "data.tokenizer"
        _require_same(_OTHER_DATA, folder, {key: was.tokenizer}, {key: says.tokenizer})
    if (was.format, was.train_on) != (says.format, says.train_on):
        _require_same(_OTHER_DATA, folder, _found_in(says, was), _found_in(says, says))


def _require_same(
    error: tuple[type[ShardwiseError], str, str], folder: Path, was: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raise an error of this kind, with these words and consequence, for the first key that has another value."""
    kind, what, consequence = error
    for key in sorted(was.keys() | now.keys()):
        if was.get(key) != now.get(key):
            raise kind(
                what,
                where=str(folder),
                why=f"{key} was {was.get(key)}, now {now.get(key)}{consequence}",
                fix=f"set {key} back, or train into another folder",
            )


def _model_of(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says of the function that is trained, and by what; not where its weights lay."""
    found = {f"model.{key}": value for key, value in recipe.model.model_dump(exclude={"hf"}).items()}
    found["optimizer.name"] = recipe.optimizer.name
    if recipe.adapter is not None:
        said = {"name", "rank", "alpha", "targets", "rank_stabilized", "quantize"}
        found |= {f"adapter.{key}": value for key, value in recipe.adapter.model_dump(include=said).items()}
    return found


def _order_of(recipe: Recipe) -> dict[str, Any]:
    """What decides, with the data, which sample is read when."""
    return {"seed": recipe.seed, "batch_size": recipe.batch_size}


def _cut_of(spec: DataSpec) -> dict[str, Any]:
    """What decides how tokens become samples."""
    return {f"data.{key}": getattr(spec, key) for key in ("sequence_length", "held_out", "packing")}


def _same_tokenizer(before: str, now: str) -> bool:
    """Whether both cut text alike. One that is no longer there may have moved: then the tokens tell, later."""
    if before == now:
        return True
    from shardwise.train.data.tokenizer import open_tokenizer

    found = open_tokenizer(now)
    try:
        return open_tokenizer(before).fingerprint == found.fingerprint
    except DataError:
        return True


def _found_in(source: DataSpec, spec: DataSpec) -> dict[str, Any]:
    """What ``spec`` makes of the records of ``source``, also where it leaves that to be found."""
    from shardwise.train.data.formats import format_of
    from shardwise.train.data.sources import open_source

    # Without what plain text would be refused for: whether it is plain text is the question.
    asked = spec.model_copy(update={"packing": False, "train_on": None})
    name = format_of(asked, open_source(source.source, source.text_key))
    trained_on = spec.train_on or ("all" if name == "text" else "completion")
    return {"data.format": name, "data.train_on": trained_on}


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
