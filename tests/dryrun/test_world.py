"""The fake world: a rank has the process groups that a real one would have."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.dryrun.world import fake_world


@pytest.mark.parametrize("rank", [0, 13])
def test_groups_of_a_mesh_are_those_with_this_rank(rank: int) -> None:
    with fake_world(rank, 24):
        mesh = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("a", "b", "c"))
        found = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in ("a", "b", "c")]
        joined = dist.get_process_group_ranks(mesh["b", "c"]._flatten("bc").get_group())
    a, b, c = rank // 12, rank // 4 % 3, rank % 4
    assert found == [
        [12 * i + 4 * b + c for i in range(2)],
        [12 * a + 4 * i + c for i in range(3)],
        [12 * a + 4 * b + i for i in range(4)],
    ]
    assert joined == [12 * a + i for i in range(12)]


def test_after_a_fake_world_meshes_have_all_groups_again() -> None:
    name = "_init_one_process_group"  # not in every release
    before = getattr(dist.device_mesh.DeviceMesh, name, None)
    with fake_world(0, 4):
        pass
    assert getattr(dist.device_mesh.DeviceMesh, name, None) is before
