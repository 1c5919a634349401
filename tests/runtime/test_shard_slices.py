"""Which dim of a parameter the shards of ZeRO divide."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardwise.runtime.parallel.shard_slices import shard_dim


def test_stacked_experts_are_divided_by_rows_where_they_are_fewer_than_the_ranks() -> None:
    few, rows, plain = (nn.Parameter(torch.empty(shape)) for shape in ((2, 8, 3), (2, 6, 3), (2, 8)))
    assert shard_dim(4)(few) == Shard(1) and shard_dim(2)(few) is None
    assert shard_dim(4)(rows) is None and shard_dim(4)(plain) is None
