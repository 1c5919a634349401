"""Checkpoints saved in the background: the state of their step, complete at any moment, and planned."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.checkpoint import shards
from shardwise.checkpoint.checkpoint import latest, restore
from shardwise.checkpoint.saver import Saver
from shardwise.core.errors import RecipeError, ResourceError
from shardwise.dryrun.run import dry_run
from shardwise.engine.train_state import TrainState
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, refuse_broken, strategy_from
from tests.harness.pool import LostRank, Pool
from tests.harness.tiny_run import MODEL, equal, make_run, names, train, unexpected, whole

BACKGROUND = {"checkpoint": {"background": True}}


def saved_while_training(folder: Path, stage: int) -> bool:
    """Whether the checkpoint of step 1 holds step 1, though steps 2 and 3 run before a byte of it is written."""
    run, trained = make_run(stage, **BACKGROUND), threading.Event()
    write = shards.write_shard

    def late(*args: Any) -> Any:
        assert trained.wait(60)
        return write(*args)

    shards.write_shard = late
    try:
        saver = Saver(run, folder, "data-1")
        train(run, range(1))
        wanted = whole(run)
        saver.save(TrainState(1, 10))
        train(run, range(1, 3))
        assert latest(folder / "checkpoints") is None and not equal(whole(run), wanted)
        trained.set()
        saver.wait()
    finally:
        shards.write_shard = write
    assert restore(run, folder / "checkpoints", "data-1", unexpected) == TrainState(1, 10)
    return equal(whole(run), wanted)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 3)])
def test_a_background_checkpoint_holds_its_own_step(
    world_size: int, stage: int, pool: Pool, tmp_path: Path
) -> None:
    assert all(pool.run(world_size, saved_while_training, tmp_path, stage))


def failed_save(folder: Path) -> str:
    """Rank 1 cannot write: every rank hears of it, and the next save succeeds."""
    run = make_run(3, **BACKGROUND)
    saver, write = Saver(run, folder, ""), shards.write_shard
    saver.save(TrainState(1, 0))
    saver.wait()

    def full_disk(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        shards.write_shard = full_disk
    saver.save(TrainState(2, 0))
    try:
        saver.wait()
    except ResourceError as error:
        found = str(error)
    shards.write_shard = write
    saver.save(TrainState(3, 0))
    saver.wait()
    return found


def test_a_save_that_fails_raises_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, failed_save, tmp_path)
    assert first == second and "No space left on device" in first
    assert names(tmp_path / "checkpoints") == ["step-1", "step-3"]


def killed_in_a_save(folder: Path) -> None:
    run = make_run(0, **BACKGROUND)
    saver = Saver(run, folder, "")
    saver.save(TrainState(1, 0))
    saver.wait()
    shards.write_shard = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
    saver.save(TrainState(2, 0))
    saver.wait()


def test_a_kill_in_the_background_leaves_the_checkpoint_before(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(LostRank):
        pool.run(1, killed_in_a_save, tmp_path)
    assert latest(tmp_path / "checkpoints", unexpected) == tmp_path / "checkpoints/step-1"


def test_the_copy_is_planned() -> None:
    """On the CPU host memory is device memory: weights and both moments of this rank, once more."""
    values = {"model": MODEL, "steps": 1, "batch_size": 4, "data": {"sequence_length": 8}}

    def overhead(**sections: Any) -> int:
        recipe = recipe_of(values | sections, SETTINGS)
        strategy = strategy_from({"zero_stage": 0, "micro_batch_size": 4})
        run = dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))
        parameters.append(run.parameters)
        return run.peak.ledger.overhead

    parameters: list[int] = []
    more = overhead(**BACKGROUND) - overhead()
    assert more == pytest.approx(12 * parameters[0], rel=0.02)


def test_state_on_disk_is_not_copied() -> None:
    values = {"model": MODEL, "steps": 1, "batch_size": 4, "strategy": {"offload": "nvme:/tmp"}} | BACKGROUND
    with pytest.raises(RecipeError, match=r"checkpoint\.background to false"):
        refuse_broken(recipe_of(values, SETTINGS), 1, str)
