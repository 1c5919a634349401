"""A block of code that seeds and draws leaves the generators as they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from shardwise.engine.seeding import seed_step
from shardwise.runtime.generators import generators_kept


def draws(device: str) -> list[float]:
    return [
        random.random(),
        float(np.random.random()),
        float(torch.rand(())),
        float(torch.rand((), device=device)),
    ]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
    ],
)
def test_draws_go_on_after_a_block_that_seeds(device: str) -> None:
    with generators_kept(torch.device(device)):
        seed_step(3, 1, 0)
        unbroken = [draws(device) for _ in range(2)]
        seed_step(3, 1, 0)
        first = draws(device)
        with pytest.raises(ValueError), generators_kept(torch.device(device)):
            seed_step(9, 0, 0)
            draws(device)
            raise ValueError
        assert [first, draws(device)] == unbroken


def test_pythons_generator_is_the_same_on_all_ranks_and_the_others_are_not() -> None:
    with generators_kept():
        ranks = []
        for rank in range(2):
            seed_step(0, 5, rank)
            ranks.append(draws("cpu"))
    python, numpy, host, _ = zip(*ranks, strict=True)
    assert python[0] == python[1] and numpy[0] != numpy[1] and host[0] != host[1]
