"""Checks of the start of a run, before torch is loaded: resume, or start from another run (``checkpoint.start_from``).

A folder with a checkpoint is resumed, or is finished. Settings that must not change are compared with the folder's
recipe before the recipe is overwritten. The number of heads or an adapter's alpha, for example, change no tensor's
shape, so without this check the run would continue, or be exported, as another model. With another tokenizer the model
would get tokens that it was not trained on. The content of the data is not read here; the ranks compare it when they
open it.

``start_from`` is a checkpoint, or the folder that holds a run's checkpoints; then the newest complete one is used. That
folder belongs to another run, which may still train, so nothing in it is created, renamed or deleted. A run folder with
a checkpoint of its own resumes from it and ignores ``start_from``: the same command starts and resumes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.ignored_settings import require_same_start
from shardwise.checkpoint.manifest import Damaged, Manifest
from shardwise.checkpoint.run_folder import ADAPTER, CHECKPOINTS, RECIPE, REPORT, SAVED_AS, load_run_recipe
from shardwise.core.errors import CheckpointError, DataError, RecipeError, ShardwiseError
from shardwise.core.file_hash import hash_of
from shardwise.core.paths import path_of
from shardwise.core.user_objects import without_folder
from shardwise.recipe.sections import AdapterSpec, DataSpec, Recipe

_START_FROM = "checkpoint.start_from"
_LARGEST_HEADER = 100_000_000
"""Bytes of the header of a safetensors file, as the format limits it."""


def check_start(recipe: Recipe, run_folder: Path) -> None:
    """Refuse a recipe that is not the folder's run, and an unusable ``start_from``, before planning.

    Reads the folder's recipe and one manifest, but no tensors; these are checked when they are loaded. Raises
    CheckpointError, DataError and RecipeError.
    """
    if manifests.committed(run_folder / CHECKPOINTS):
        if (run_folder / RECIPE).exists():
            before = recipe_of_run(run_folder)
            _require_same_run(before, recipe, run_folder)
            require_same_start(before, recipe, run_folder)
        return
    if recipe.checkpoint.start_from is None:
        return
    newest = candidates(path_of(recipe.checkpoint.start_from))[0]
    try:
        manifest = manifests.read_manifest(newest)
    except Damaged:
        return
    require_steps_left(recipe, newest, manifest)


def finished(recipe: Recipe, run_folder: Path) -> str:
    """A sentence about a finished run, by its newest complete checkpoint; "" if there is something left to do.

    Only file sizes are checked here; loading verifies the bytes. Also "" if the folder's recipe is missing: then the
    run is prepared again and gets a recipe. Also "" if a file that follows the last checkpoint is missing or older.
    """
    if not (run_folder / RECIPE).exists():
        return ""
    for checkpoint in manifests.committed(run_folder / CHECKPOINTS):
        try:
            manifest = manifests.read_manifest(checkpoint)
            if manifest.state.step < recipe.steps:
                return ""
        except Damaged:
            continue
        if not manifests.has_all_bytes(checkpoint, manifest):
            continue
        if left_to_write(recipe, run_folder, checkpoint):
            return ""
        return f"nothing to do: {manifest.state.step} of {recipe.steps} steps are done"
    return ""


def left_to_write(recipe: Recipe, run_folder: Path, checkpoint: Path) -> list[str]:
    """What a finished run writes after its last checkpoint and lacks, or has of another checkpoint.

    A run that is killed in between has done all its steps, but an old adapter or none, and no report.
    """
    left = []
    if recipe.adapter is not None and _saved_as(run_folder / ADAPTER) != hash_of(
        checkpoint / manifests.MANIFEST
    ):
        left.append(ADAPTER)
    if not (run_folder / REPORT).exists():
        left.append(REPORT)
    return left


def _saved_as(adapter: Path) -> str | None:
    """The hash of the adapter's checkpoint, from the header of its file; None if there is none."""
    try:
        with (adapter / "adapter_model.safetensors").open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _LARGEST_HEADER)))
        (adapter / "adapter_config.json").stat()
        return str(header["__metadata__"][SAVED_AS])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def recipe_of_run(run_folder: Path) -> Recipe:
    """The folder's recipe. Raises CheckpointError if it cannot be read: then nothing says which run this is."""
    try:
        return load_run_recipe(run_folder)
    except ShardwiseError as error:
        raise CheckpointError(
            "the recipe of the run in this folder cannot be read",
            where=error.where or str(run_folder / RECIPE),
            why=f"{error.what}: {error.why}" if error.why else error.what,
            fix="bring back a copy, or train into another folder",
        ) from error


_MAY_CHANGE = {"dropout", "learning_rate_ratio", "start_from"}
"""Keys of an adapter that change neither its tensors nor its function."""
_OTHER_RUN = (CheckpointError, "the checkpoint is of another run", "")
_OTHER_ORDER = (CheckpointError, "the checkpoint is of another run", ": samples would repeat or be skipped")
_OTHER_DATA = (DataError, "the checkpoint was trained on other data", "")


def _require_same_run(before: Recipe, now: Recipe, folder: Path) -> None:
    """Raise CheckpointError, or DataError for data, if the run of ``before`` cannot resume as ``now``."""
    was, says = before.data, now.data
    _require_equal_values(_OTHER_RUN, folder, _model_of(before), _model_of(now))
    _require_equal_values(_OTHER_ORDER, folder, _order_of(before), _order_of(now))
    if now.model.factory is not None:  # a factory has its own dataset, without tokens
        key = "data.held_out"
        _require_equal_values(_OTHER_DATA, folder, {key: was.held_out}, {key: says.held_out})
        return
    _require_equal_values(_OTHER_DATA, folder, _cut_of(was), _cut_of(says))
    if not _same_tokenizer(was.tokenizer, says.tokenizer):
        key = "data.tokenizer"
        _require_equal_values(_OTHER_DATA, folder, {key: was.tokenizer}, {key: says.tokenizer})
    if was.begin != says.begin and _adds_begin(says, now.samples):
        _require_equal_values(_OTHER_DATA, folder, {"data.begin": was.begin}, {"data.begin": says.begin})
    if (was.format, was.train_on) != (says.format, says.train_on):
        _require_equal_values(
            _OTHER_DATA, folder, _found_in(says, was, now.samples), _found_in(says, says, now.samples)
        )


def _require_equal_values(
    error: tuple[type[ShardwiseError], str, str], folder: Path, was: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raise an error of ``kind`` for the first key with another value."""
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
    """The recipe's settings that define the trained function and its optimizer, without the path of its weights."""
    settings = {
        f"model.{key}": value for key, value in recipe.model.model_dump(exclude={"hf", "dropout"}).items()
    }
    settings["optimizer.name"] = recipe.optimizer.name
    settings["optimizer.factory"] = without_folder(recipe.optimizer.factory)
    settings["model.factory"] = without_folder(recipe.model.factory)
    if recipe.adapter is not None:
        said = set(AdapterSpec.model_fields) - _MAY_CHANGE
        settings |= {
            f"adapter.{key}": value for key, value in recipe.adapter.model_dump(include=said).items()
        }
    return settings


def _order_of(recipe: Recipe) -> dict[str, Any]:
    """Settings that, with the data, determine the order of samples."""
    return {"seed": recipe.seed, "batch_size": recipe.batch_size}


def _cut_of(spec: DataSpec) -> dict[str, Any]:
    """Settings that determine how tokens become samples, and from which source or window each comes."""
    keys = ("sequence_length", "completion_length", "held_out", "packing", "too_long", "stream_window")
    weights = [part.weight for part in spec.mixture or ()]
    shares = {f"data.mixture.{i}.weight": f"{w / sum(weights):.4g} of all" for i, w in enumerate(weights)}
    return shares | {f"data.{key}": getattr(spec, key) for key in keys}


def _same_tokenizer(before: str, now: str) -> bool:
    """Whether two tokenizers are equal. A missing one may have moved; then the tokens are compared later."""
    if before == now:
        return True
    from shardwise.data.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(now)
    try:
        return open_tokenizer(before).fingerprint == tokenizer.fingerprint
    except DataError:
        return True


def _adds_begin(spec: DataSpec, kind: str) -> bool:
    """Whether `data.begin` decides about a token: the tokenizer has one, and no chat template writes it."""
    from shardwise.data.tokenizer import open_tokenizer

    has_one = open_tokenizer(spec.tokenizer).begin is not None
    return has_one and _found_in(spec, spec, kind)["data.format"] not in ("messages", "sharegpt")


def _found_in(source: DataSpec, spec: DataSpec, kind: str) -> dict[str, Any]:
    """The settings of ``spec`` for the records of ``source``, with the format detected for a kind of samples."""
    from shardwise.data.formats import format_of
    from shardwise.data.sources import open_source

    # Without the setting that plain text refuses, because the format is not known yet.
    asked = spec.model_copy(update={"train_on": None})
    name = format_of(asked, open_source(source.source, source.text_key), kind)
    trained_on = spec.train_on or ("all" if name == "text" else "completion")
    return {"data.format": name, "data.train_on": trained_on}


def candidates(source: Path) -> list[Path]:
    """The checkpoints in ``source``, newest first. Raises CheckpointError if there are none."""
    if checkpoints := manifests.committed(source):
        return checkpoints
    if (source / manifests.MANIFEST).exists():
        return [source]
    raise CheckpointError(
        "no checkpoint to start from",
        where=f"{_START_FROM}: {source}",
        why="it has no manifest.json, and no step-N below it has one"
        if source.is_dir()
        else "the folder does not exist",
        fix="name a step-N folder, or the checkpoints folder of a run",
    )


def require_steps_left(recipe: Recipe, checkpoint: Path, manifest: Manifest) -> None:
    """Raise RecipeError if the checkpoint's step is the run's last step or later."""
    if manifest.state.step >= recipe.steps:
        raise RecipeError(
            "nothing is left to train",
            where=f"{_START_FROM}: {checkpoint}",
            why=f"its step is {manifest.state.step}, and steps is {recipe.steps}",
            fix="raise steps, or start from an earlier checkpoint",
        )
