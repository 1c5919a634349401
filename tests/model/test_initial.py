"""Seeded values: the same for every sharding, right in distribution, made where they are held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard, empty

from shardwise.model import initial
from shardwise.model.initial import TILE, fill_normal, seed_of
from shardwise.runtime.parallel.shard_slices import local_part, local_slices

SHAPE = (TILE[0] * 3 + 5, TILE[1] + 7)  # tiles are cut on both dims


def _whole(shape: tuple[int, int] = SHAPE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.full(shape, float("nan"), dtype=dtype)
    fill_normal(tensor, 0.02, 1, "weight")
    return tensor


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_values_do_not_depend_on_the_sharding(rank_of: Any, dim: int, ranks: int) -> None:
    expected = _whole()
    for rank in range(ranks):
        with rank_of(rank, {"data": ranks}) as mesh:
            tensor = empty(SHAPE, device_mesh=mesh, placements=[Shard(dim)])
            fill_normal(tensor, 0.02, 1, "weight")
            assert torch.equal(local_part(tensor), expected[local_slices(tensor)])


def test_distribution() -> None:
    values = _whole((512, 4096)).double()
    assert abs(values.mean().item()) < 1e-4
    assert abs(values.std().item() / 0.02 - 1) < 3e-3
    assert abs((values / 0.02).pow(4).mean().item() - 3) < 0.03, "kurtosis of a normal"
    rows = values[: TILE[0]].flatten(), values[TILE[0] : 2 * TILE[0]].flatten()
    assert abs(torch.corrcoef(torch.stack(rows))[0, 1].item()) < 0.02, "tiles are independent"


def test_every_precision_starts_from_the_same_numbers() -> None:
    reference = _whole()
    assert torch.equal(_whole(dtype=torch.float64), reference.double())
    assert torch.equal(_whole(dtype=torch.bfloat16), reference.bfloat16())


def test_seed_and_name_matter() -> None:
    tensor = torch.empty(4, 4)
    drawn = []
    for seed, name in ((1, "a"), (2, "a"), (1, "b")):
        fill_normal(tensor, 1.0, seed, name)
        drawn.append(tensor.clone())
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert seed_of(1, "a", 2) == seed_of(1, "a", 2) < 2**32


def test_a_rank_draws_about_its_own_slice(rank_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[object] = []

    def watched(*parts: object) -> int:
        drawn.append(parts)
        return seed_of(*parts)

    monkeypatch.setattr(initial, "seed_of", watched)
    shape = (TILE[0] * 64, TILE[1])
    with rank_of(5, {"data": 16}) as mesh:
        fill_normal(empty(shape, device_mesh=mesh, placements=[Shard(0)]), 0.02, 1, "weight")
    assert len(drawn) == 4, "64 tiles over 16 ranks"


def test_the_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    _whole()
    assert torch.equal(before, torch.get_rng_state())


def test_values_are_those_of_this_version() -> None:
    """A change of the grid or of the seeds would make old runs unrepeatable: it must not happen unseen."""
    tensor = torch.empty(2, 3)
    fill_normal(tensor, 1.0, 0, "embed_tokens.weight")
    generator = torch.Generator().manual_seed(seed_of(0, "embed_tokens.weight", 0, 0))
    tile = torch.empty(32, 3).normal_(generator=generator)
    assert torch.equal(tensor, tile[:2])
    assert seed_of(0, "embed_tokens.weight", 0, 0) == 1100304500
