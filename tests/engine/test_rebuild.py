"""A run whose step broke off: what it held comes back bitwise; what its device does afterwards changes nothing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from pool import Pool
from small_run import batch, equal, make_run, train, whole
from torch.distributed.fsdp import FSDPModule

from shardwise.engine.persistent import parameters_of
from shardwise.engine.rebuild import rebuild, strip
from shardwise.engine.step import forward_backward, step
from shardwise.technique import MICRO_BATCH_SIZE


def broken_off(stage: int) -> list[str]:
    """What is wrong after a forward pass that raised in its midst, with parameters gathered."""
    run = make_run(stage, settings={"precision": "bf16"})
    parameters = parameters_of(run)
    train(run, range(2))
    before, expected = whole(run), train(run, range(2, 3))
    run_again = make_run(stage, settings={"precision": "bf16"})
    again = parameters_of(run_again)
    train(run_again, range(2))
    mine = {key: value[run_again.data_rank :: run_again.data_degree] for key, value in batch(2).items()}
    forward_backward(run_again, [mine])  # gradients that must not come back
    for module in run_again.model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    del module
    model = weakref.ref(run_again.model)
    kept = strip(run_again, again)
    again.clear()
    gc.collect()
    wrong = [] if model() is None else ["the model is still there"]
    rebuild(run_again, run_again.strategy.with_values(micro_batch_size=3), kept)
    wrong += ["not emptied"] if kept else []
    wrong += [] if equal(whole(run_again), before) else ["not what it was"]
    wrong += [] if train(run_again, range(2, 3)) == expected else ["it trains otherwise"]
    wrong += [] if run_again.strategy[MICRO_BATCH_SIZE] == 3 and len(parameters) else ["another strategy"]
    return wrong


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_all_of_a_run_comes_back(pool: Pool, stage: int) -> None:
    assert pool.run(2, broken_off, stage) == [[], []]


def voided() -> bool:
    run = make_run(3, loss_scale={"initial": 16.0}, settings={"precision": "fp16"})
    train(run, range(1))
    before = whole(run)
    run.void.fill_(1)
    skipped = step(run, [batch(1)], 1e-2).skipped
    after = whole(run)
    scaling = {"optimizer/loss_scale", "optimizer/clean_steps", "optimizer/overflows_left"}
    same = all(torch.equal(after[name], before[name]) for name in before.keys() - scaling)
    return same and float(skipped) == 1


def test_a_void_update_changes_neither_weights_nor_moments(pool: Pool) -> None:
    """The loss scale takes it for an overflow; it is sent again by the rank that ran out (train/survival.py)."""
    assert pool.run(1, voided) == [True]
