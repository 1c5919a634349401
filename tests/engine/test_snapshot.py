"""Snapshots: a snapshot is restored bitwise, from before the fault, into the same buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.engine.snapshot import Snapshots, snapshots_of
from tests.harness.pool import Pool
from tests.harness.tiny_run import equal, make_run, train, whole

EVERY = {"guard": {"snapshot_every": 1}}


def taken_and_restored(stage: int) -> list[str]:
    """Differences after a rewind of one step and of two."""
    run = make_run(stage, settings={"precision": "bf16"}, **EVERY)
    snapshots: Snapshots[int] | None = snapshots_of(run)
    assert snapshots is not None
    snapshots.begin(0)
    places = [tensor.data_ptr() for tensor in snapshots.buffers]
    seen: list[dict[str, Tensor]] = [whole(run)]
    losses: list[str] = []
    for index in range(4):
        losses += train(run, range(index, index + 1))
        seen.append(whole(run))
        snapshots.take(index + 1)
    wrong = []
    for limit, expected in ((9, 4), (3, 3)):
        if snapshots.restore(lambda step, limit=limit: step <= limit) != expected:
            wrong.append(f"not from step {expected}")
        if not equal(whole(run), seen[expected]):
            wrong.append(f"not as after step {expected}")
    if train(run, range(3, 4)) != losses[3:]:
        wrong.append("training goes on otherwise")
    if snapshots.newest(lambda step: step <= 2) is not None or snapshots.newest(lambda step: step > 3):
        wrong.append("a copy that is of no use is kept")
    if places != [tensor.data_ptr() for tensor in snapshots.buffers]:
        wrong.append("memory was allocated again")
    return wrong


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_taken_comes_back(stage: int, pool: Pool) -> None:
    assert pool.run(2, taken_and_restored, stage) == [[], []]


def first_snapshot() -> bool:
    run = make_run(**EVERY)
    snapshots: Snapshots[int] | None = snapshots_of(run)
    assert snapshots is not None and snapshots.newest(lambda step: True) is None
    before = whole(run)
    snapshots.begin(0)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(torch.nan)
    train(run, range(1))
    snapshots.restore(lambda step: True)
    return equal(whole(run), before)


def test_there_is_something_to_go_back_to_from_the_first_step_on(pool: Pool) -> None:
    assert pool.run(1, first_snapshot) == [True]


def test_none_are_taken_unless_asked_for(pool: Pool) -> None:
    assert pool.run(1, no_snapshots) == [True]


def no_snapshots() -> bool:
    return snapshots_of(make_run()) is None
