"""What libraries allocate at their first calls is there before memory is measured."""

from __future__ import annotations

import psutil
import torch
import torch.nn.functional as F

from shardwise.recipe.sections import OptimizerSpec
from shardwise.technique import layout_of, strategy_from
from shardwise.trainer.warm_up import _tiny, warm_kernels
from tests.harness.pool import Pool

MiB = 2**20


def kept_by_products() -> int:
    """Bytes that stay allocated after the layers of a small model, with two threads."""
    torch.set_num_threads(2)
    warm_kernels(torch.device("cpu"), strategy_from({}))
    before = psutil.Process().memory_info().rss
    for inputs, outputs in ((128, 128), (128, 256), (256, 128), (128, 257)):
        x, weight = (torch.ones(rows, inputs, requires_grad=True) for rows in (1024, outputs))
        F.linear(x, weight).sum().backward()
        del x, weight
    return psutil.Process().memory_info().rss - before


def test_products_of_small_layers_keep_nothing(pool: Pool) -> None:
    """MKL has other buffers for them than for large ones, in each thread: 1.1 MiB here with AVX-512, 9 in a run."""
    assert pool.run(1, kept_by_products)[0] < 0.75 * MiB


def test_the_first_exchange_of_tokens_is_warmed_up() -> None:
    """Else its group and buffers count as the run's (tests/test_planned_memory.py measures them)."""
    for degree, experts in ((1, None), (4, 4)):
        layout = layout_of(strategy_from({"tensor_parallel": 2, "expert_parallel": degree}), 8)
        assert _tiny(layout, 2, OptimizerSpec()).model.experts == experts
