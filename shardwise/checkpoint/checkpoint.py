"""Save and restore checkpoints, on any number of ranks.

A checkpoint holds logical tensors in shards, so any world size and any ZeRO stage can load it. One rename commits it
(``commit.py``), its manifest describes it and holds hashes (``manifest.py``), and safetensors files store it
(``shards.py``). Loading verifies every file before any tensor reaches the model: the ranks divide the files among them,
agree on the result, and load the newest complete checkpoint. A damaged checkpoint costs a warning and the steps since
the one before it.

Hyperparameters are not saved with the optimizer. They follow from the recipe; a stored copy would override a recipe
that the user edited on purpose.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from shardwise.checkpoint import commit
from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.manifest import Damaged, Manifest
from shardwise.checkpoint.planners import LoadPlanner, SavePlanner
from shardwise.checkpoint.resume_checks import candidates, require_steps_left
from shardwise.checkpoint.shards import ShardReader, ShardWriter
from shardwise.core.errors import CheckpointError, DataError, ResourceError, ShardwiseError
from shardwise.core.paths import path_of
from shardwise.core.progress import Say
from shardwise.engine.run import Run
from shardwise.engine.run_state import OPTIMIZER, tensors_of
from shardwise.engine.train_state import TrainState
from shardwise.model.files.safetensors_reader import STORED_DTYPES
from shardwise.recipe.load import dump_recipe
from shardwise.technique import precision_of, strategy_from
from shardwise.trainer.faults.oom_record import is_oom

T = TypeVar("T")
Warn = Callable[[str], None]
TensorKind = tuple[str, tuple[int, ...]]
"""(safetensors dtype, shape) of a tensor."""


def to_stderr(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)


_MORE_ROOM = "leave the host more memory; checkpoints are as they were"


# ---- saving -----------------------------------------------------------------------------------------------


def save_checkpoint(run: Run, state: TrainState, folder: Path, keep: int, fingerprint: str = "") -> Path:
    """Save a run after ``state.step`` steps as ``folder``/step-N. Collective. Returns that path.

    Keeps the ``keep`` (at least 1) newest checkpoints up to this step, and all of them while the guard suspects a loss
    spike. Replaces a checkpoint of the same step. ``fingerprint`` identifies the data.

    Raises:
        ResourceError: a rank could not write; raised on every rank. Earlier checkpoints and the run are unchanged.
    """
    return save_tensors(tensors_of(run), SavePlanner(), folder, keep, description_of(run, state, fingerprint))


def save_tensors(
    tensors: dict[str, Tensor],
    planner: SavePlanner,
    folder: Path,
    keep: int,
    description: Manifest,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write and commit what ``planner`` plans for ``tensors``. Collective. Raises like ``save_checkpoint``."""
    writer = ShardWriter(folder, description, keep)
    try:
        with torch.no_grad():
            dcp_save(tensors, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        writer.abandon()
        raise _cause(error, "cannot save the checkpoint", folder) from error
    return folder / f"step-{description.state.step}"


def description_of(run: Run, state: TrainState, fingerprint: str) -> Manifest:
    return Manifest(
        state=state,
        world_size=_world_size(),
        files={},
        tensors={},
        order=_order_settings(run),
        data=fingerprint,
        recipe=xxhash.xxh3_128_hexdigest(dump_recipe(run.recipe).encode()),
        strategy=dict(run.strategy.values),
        versions={"torch": str(torch.__version__)},
    )


def _order_settings(run: Run) -> dict[str, int]:
    """Settings that, with the data, determine the order of samples."""
    return {"seed": run.recipe.seed, "batch_size": run.recipe.batch_size}


# ---- restoring --------------------------------------------------------------------------------------------


def restore(run: Run, folder: Path, fingerprint: str = "", warn: Warn = to_stderr) -> TrainState | None:
    """Load the newest complete checkpoint of ``folder`` into a run. Collective. Returns None if there is none.

    Call it at the start of a run that will save to ``folder``, under the run's lock. It creates the folder, checks that
    it is writable, and removes the remains of a crash (``commit.prepare``). Rank 0 calls ``warn`` with one line for
    each damaged checkpoint. If it raises, the weights are unchanged.

    Raises:
        CheckpointError: all checkpoints are damaged, or the newest complete one has another model or sample order.
        DataError: it was trained on other data (an empty ``fingerprint`` is not compared).
        ResourceError: the folder cannot be prepared.
    """
    on_rank_0(lambda: commit.prepare_folder(folder))
    newest = _newest_whole(on_rank_0(lambda: manifests.committed(folder)), _or_delete(folder), warn)
    if newest is None:
        return None
    checkpoint, manifest = newest
    on_rank_0(lambda: _set_damaged_aside(folder, checkpoint))
    _warn_of_range(run, manifest, warn)
    return _load_checkpoint(run, checkpoint, manifest, fingerprint)


def start(run: Run, source: Path, fingerprint: str = "", warn: Warn = to_stderr) -> TrainState:
    """Load the checkpoint ``source`` (see ``resume_checks.py``) into a new run. Collective.

    Like ``restore``, but ``source`` belongs to another run: it is only read. Its step must be before the last step of
    this run. Raises CheckpointError, DataError or RecipeError; the weights are then unchanged.
    """
    fix = "start from another checkpoint, or bring back a copy"
    newest = _newest_whole(on_rank_0(lambda: candidates(source)), fix, warn)
    assert newest is not None, "there are candidates"
    checkpoint, manifest = newest
    require_steps_left(run.recipe, checkpoint, manifest)
    _warn_of_range(run, manifest, warn)
    state = _load_checkpoint(run, checkpoint, manifest, fingerprint)
    return replace(state, best=None)  # its checkpoint is in the folder of the other run


def restore_or_start(run: Run, folder: Path, fingerprint: str, say: Say, warn: Warn) -> TrainState | None:
    """Load the run's newest checkpoint, or else the one of ``checkpoint.start_from``. Collective. None without any.

    Raises like ``restore`` and ``start``.
    """
    state = restore(run, folder, fingerprint, warn)
    source = run.recipe.checkpoint.start_from
    if state is None and source is not None:
        state = start(run, path_of(source), fingerprint, warn)
        say(f"started from {source} after {state.step} of {run.recipe.steps} steps")
    elif state is not None and state.step < run.recipe.steps:
        say(f"resumed after {state.step} of {run.recipe.steps} steps")
    return state


def restore_before(
    run: Run, folder: Path, step: int, fingerprint: str = "", warn: Warn = to_stderr
) -> TrainState | None:
    """Load the newest complete checkpoint of ``folder`` of at most ``step`` steps. Collective. None if there is none.

    For a rewind: later checkpoints belong to the abandoned branch and are deleted after the load. Raises like
    ``restore``.
    """
    earlier = on_rank_0(
        lambda: [p for p in manifests.committed(folder) if (manifests.step_of(p) or 0) <= step]
    )
    newest = _newest_whole(earlier, _or_delete(folder), warn)
    if newest is None:
        return None
    state = _load_checkpoint(run, *newest, fingerprint)
    on_rank_0(lambda: commit.retire_after(folder, manifests.step_of(newest[0]) or 0))
    return state


def has_before(folder: Path, step: int) -> bool:
    """Whether a checkpoint of at most ``step`` steps exists, complete or not; equal on every rank."""
    return on_rank_0(
        lambda: any((manifests.step_of(path) or 0) <= step for path in manifests.committed(folder))
    )


def _load_checkpoint(run: Run, checkpoint: Path, manifest: Manifest, fingerprint: str) -> TrainState:
    """Load a verified checkpoint, after checking that its model and sample order are those of the run."""
    _require_same_samples(run, manifest, fingerprint, checkpoint)
    tensors = tensors_of(run)
    with torch.no_grad():
        _require_same_tensors(_of_all_places(run, tensors), manifest, checkpoint)
        try:
            dcp_load(tensors, storage_reader=ShardReader(checkpoint, manifest), planner=LoadPlanner())
        except CheckpointException as error:
            raise _cause(error, "cannot load the checkpoint", checkpoint) from error
        run.optimizer.loaded()
    return manifest.state


def _warn_of_range(run: Run, manifest: Manifest, warn: Warn) -> None:
    """Warn before an fp16 run loads a bf16 checkpoint: bf16 weights can exceed the range of fp16."""
    before = precision_of(strategy_from(manifest.strategy))
    if run.options.dtypes.loss_scaled and before in ("bf16", "fp8") and _rank() == 0:
        warn(f"the checkpoint was trained in {before}; its activations may exceed the range of fp16")


def latest(folder: Path, warn: Warn = to_stderr) -> Path | None:
    """The newest complete checkpoint of ``folder``, for one process; None if there is none.

    Reads and verifies every file. Raises CheckpointError if all checkpoints are damaged.
    """
    newest = _newest_whole(manifests.committed(folder), _or_delete(folder), warn)
    return newest[0] if newest else None


def _or_delete(folder: Path) -> str:
    return f"bring back a copy, or delete {folder} to start over"


def _newest_whole(checkpoints: list[Path], fix: str, warn: Warn) -> tuple[Path, Manifest] | None:
    """The first complete checkpoint of ``checkpoints``; the same result, or the same error, on every rank."""
    damage: list[Damaged] = []
    for checkpoint in checkpoints:
        try:
            return checkpoint, verified(checkpoint)
        except Damaged as fault:
            damage.append(fault)
            if len(damage) < len(checkpoints) and _rank() == 0:
                path = fault.path.relative_to(checkpoint.parent)
                next_best = checkpoints[len(damage)].name
                warn(f"checkpoint {path} is damaged, {fault.reason}; going back to {next_best}")
    if damage:
        raise CheckpointError(
            "all checkpoints are damaged" if len(damage) > 1 else "the checkpoint is damaged",
            where=str(damage[0].path),
            why=damage[0].reason,
            fix=fix,
        )
    return None


def _set_damaged_aside(folder: Path, whole: Path) -> None:
    """Rename the damaged checkpoints newer than ``whole``, so that they do not count for ``keep``."""
    checkpoints = manifests.committed(folder)
    for damaged in checkpoints[: checkpoints.index(whole)]:
        damaged.rename(damaged.with_name(f"damaged-{damaged.name}-{time.time_ns()}"))


def verified(checkpoint: Path) -> Manifest:
    """Verify a checkpoint: rank 0 reads the manifest, the ranks divide the files. Raises Damaged on every rank."""
    manifest = on_rank_0(lambda: manifests.read_manifest(checkpoint))
    verdict = None
    for name in sorted(manifest.files)[_rank() :: _world_size()]:
        try:
            manifests.verify_file(checkpoint, name, manifest.files[name])
        except Damaged as damage:
            verdict = damage
    for fault in _from_all(verdict):
        if fault is not None:
            raise fault
    return manifest


def _require_same_samples(run: Run, manifest: Manifest, fingerprint: str, checkpoint: Path) -> None:
    for key, value in _order_settings(run).items():
        if manifest.order.get(key) != value:
            raise CheckpointError(
                "the checkpoint is of another run",
                where=str(checkpoint),
                why=f"{key} was {manifest.order.get(key)}, now {value}: samples would repeat or be skipped",
                fix=f"set {key} back, or train into another folder",
            )
    if fingerprint and manifest.data and fingerprint != manifest.data:
        raise DataError(
            "the checkpoint was trained on other data",
            where=str(checkpoint),
            why=f"its fingerprint was {manifest.data[:16]} and is now {fingerprint[:16]}",
            fix="restore the data, or train into another folder",
        )


def _of_all_places(run: Run, tensors: dict[str, Tensor]) -> dict[str, TensorKind]:
    """(dtype, shape) of every tensor of the run, by name, also of blocks that other ranks hold."""
    mine = {name: (STORED_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    pipeline = run.options.place
    if pipeline is None:
        return mine
    every = [mine] * pipeline.ranks
    dist.all_gather_object(every, mine, group=pipeline.group)
    return {name: kind for kinds in every for name, kind in kinds.items()}


def _require_same_tensors(expected: dict[str, TensorKind], manifest: Manifest, checkpoint: Path) -> None:
    saved = {name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()}
    different = {name for name in saved.keys() | expected.keys() if saved.get(name) != expected.get(name)}
    if different:
        name = min(different, key=lambda name: (name.startswith(OPTIMIZER), name))
        raise CheckpointError(
            "the checkpoint is of another model",
            where=str(checkpoint),
            why=f"{name} is {_kind_text(saved.get(name))} in it and {_kind_text(expected.get(name))} in this run",
            fix="use the recipe it was trained with, or train into another folder",
        )


def _kind_text(tensor: TensorKind | None) -> str:
    return f"{tensor[0]}{list(tensor[1])}" if tensor else "absent"


# ---- among ranks ------------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def on_rank_0(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0; return its result, or raise its error, on every rank."""
    box: list[tuple[T | None, Exception | None]] = [(None, None)]
    if _rank() == 0:
        try:
            box = [(action(), None)]
        except (Damaged, ShardwiseError) as error:
            box = [(None, error)]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    value, failure = box[0]
    if failure is not None:
        raise failure
    return cast("T", value)


def _from_all(value: T) -> list[T]:
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _cause(error: CheckpointException, what: str, where: Path) -> BaseException:
    """The error of the lowest failed rank, as a ShardwiseError."""
    rank, (cause, _) = min(error.failures.items())
    if is_oom(cause):
        why = f"memory ran out on rank {rank}: {type(cause).__name__}"
        return ResourceError(what, where=str(where), why=why, fix=_MORE_ROOM)
    if isinstance(cause, ShardwiseError) or not isinstance(cause, Exception):
        return cause
    return CheckpointError(what, where=str(where), why=f"rank {rank}: {type(cause).__name__}: {cause}")
