"""Which dim of a parameter the shards of ZeRO divide."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardwise.runtime.parallel.shard_slices import shard_dims


def test_stacked_experts_are_divided_by_rows_where_they_are_fewer_than_the_ranks() -> None:
    few, rows, narrow, plain = (
        nn.Parameter(torch.empty(shape)) for shape in ((2, 8, 64), (2, 6, 64), (2, 8, 63), (2, 8))
    )
    module = nn.ParameterList([few, rows, narrow, plain])
    of_four = shard_dims([module], 4)
    assert of_four(few) == Shard(1) and shard_dims(module, 2)(few) is None
    assert all(of_four(parameter) is None for parameter in (rows, narrow, plain))


def test_stacks_next_to_adapters_or_codes_are_divided_by_matrices() -> None:
    few = nn.Parameter(torch.empty(2, 8, 64), requires_grad=False)
    codes = nn.Parameter(torch.empty(2, 8, 64, dtype=torch.uint8), requires_grad=False)
    assert shard_dims(nn.ParameterList([few]), 4)(few) == Shard(1)
    for other in (nn.Parameter(torch.empty(2, 4, 64)), codes):
        assert shard_dims(nn.ParameterList([few, other]), 4)(few) is None
