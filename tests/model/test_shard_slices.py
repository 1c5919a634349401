"""Offsets of a rank's shard, compared with DTensor, for every placement that techniques make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise.runtime.parallel.shard_slices import (
    canonical_name,
    local_part,
    local_slices,
    share,
    shared_names,
)

VALUES = torch.arange(7 * 10.0).reshape(7, 10)


def _linear() -> nn.Linear:
    linear = nn.Linear(10, 7)
    with torch.no_grad():
        linear.weight.copy_(VALUES)
    return linear


def test_plain_tensor_is_held_whole() -> None:
    assert local_slices(VALUES) == (slice(0, 7), slice(0, 10))
    assert local_part(VALUES).data_ptr() == VALUES.data_ptr()
    assert local_slices(torch.tensor(1.0)) == ()


@pytest.mark.parametrize("placements", [(Shard(0),), (Shard(1),), (Replicate(),)])
@pytest.mark.parametrize("ranks", [1, 3, 4, 9])
def test_slices_are_what_dtensor_holds(rank_of: Any, placements: tuple[Any, ...], ranks: int) -> None:
    for rank in range(ranks):
        with rank_of(rank, {"data": ranks}) as mesh:
            tensor = distribute_tensor(VALUES, mesh, placements, src_data_rank=None)
            assert torch.equal(VALUES[local_slices(tensor)], local_part(tensor))


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_fsdp_over_tensor_parallel(rank_of: Any, style: Any) -> None:
    """FSDP2 shards what tensor parallelism left: a strided shard where both cut rows, uneven ones too."""
    seen = torch.zeros_like(VALUES)
    for rank in range(12):
        with rank_of(rank, {"data": 4, "tensor": 3}) as mesh:
            model = nn.Sequential(_linear())
            parallelize_module(model, mesh["tensor"], {"0": style()}, src_data_rank=None)
            fully_shard(model, mesh=mesh["data"])
            weight = model[0].weight
            assert isinstance(weight, DTensor)
            assert torch.equal(VALUES[local_slices(weight)], local_part(weight))
            seen[local_slices(weight)] += 1
    assert torch.equal(seen, torch.ones_like(seen)), "every element is held once"


def test_hybrid_sharding(rank_of: Any) -> None:
    for rank in range(6):
        with rank_of(rank, {"replicate": 2, "shard": 3}) as mesh:
            linear = _linear()
            fully_shard(linear, mesh=mesh)
            assert torch.equal(VALUES[local_slices(linear.weight)], local_part(linear.weight))


def test_partial_sums_are_refused(rank_of: Any) -> None:
    with rank_of(0, {"data": 2}) as mesh:
        tensor = DTensor.from_local(VALUES, mesh, [Partial()])
        with pytest.raises(RuntimeError, match="partial"):
            local_slices(tensor)


def test_canonical_names() -> None:
    assert (
        canonical_name("layers.1._checkpoint_wrapped_module.mlp._orig_mod.up.weight")
        == "layers.1.mlp.up.weight"
    )
    assert canonical_name("_orig_mod.embed.weight") == "embed.weight"
    assert canonical_name("my_orig_mod.weight") == "my_orig_mod.weight"


def test_sharing_is_restored_after_to_empty() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight
    aliases = shared_names(model)
    assert aliases == {"head.weight": "embed.weight"}
    model.to_empty(device="cpu")
    assert model["head"].weight is not model["embed"].weight, "else share() is not needed"
    share(model, aliases)
    assert model["head"].weight is model["embed"].weight
    share(nn.ModuleDict({"head": model["head"]}), aliases)  # a pipeline stage has no embedding
