"""Host memory in the dry run: counted separately from the device's, with every copy between the two."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.core.cost import Kernel, StepCost, Transfer
from shardwise.core.ledger import Ledger
from shardwise.dryrun.reading import peaks
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.dryrun.tracker import Tracker
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.timing import offload_phases
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import ClusterSpec
from shardwise.runtime.offload.host import host_empty_like, separate_host_memory
from shardwise.technique import strategy_from

TINY = {"model": {"preset": "tiny"}, "data": {"sequence_length": 64}, "steps": 10, "batch_size": 2}


def _dry(cluster: Cluster, snapshot_every: int | None) -> DryRun:
    recipe = recipe_of({**TINY, "guard": {"snapshot_every": snapshot_every}})
    return dry_run(recipe, blueprint_of(recipe), strategy_from({"micro_batch_size": 2}), cluster)


def test_snapshots_are_in_the_host_memory_of_a_device_that_has_its_own() -> None:
    cluster = cluster_of(ClusterSpec(device="h100"))
    without, with_snapshots = _dry(cluster, None), _dry(cluster, 5)
    assert without.host == Ledger()
    assert with_snapshots.peak.ledger == without.peak.ledger
    with torch.device("meta"):
        sizes = [4 * p.numel() for p in blueprint_of(recipe_of(TINY)).build().parameters()]
    # Two copies of weights and two moments in fp32, each of as many bytes as the pinned allocator takes.
    state = 2 * 3 * sum(1 << (size - 1).bit_length() for size in sizes)
    assert state > 2 * 3 * sum(sizes) and state < with_snapshots.host.overhead < 1.01 * state


def test_snapshots_are_in_the_memory_of_a_cpu() -> None:
    cluster = cluster_of(ClusterSpec())
    without, with_snapshots = _dry(cluster, None), _dry(cluster, 5)
    assert with_snapshots.host == Ledger()
    assert with_snapshots.peak.bytes - without.peak.bytes > 2 * 3 * 4 * without.parameters


@pytest.mark.parametrize("apart", [True, False])
def test_copies_between_memories_are_transfers_and_kernels_of_the_host_are_its_own(apart: bool) -> None:
    tracker = Tracker({}, lambda *_: 0, lambda *_: 0, lambda: "")
    with FakeTensorMode(), tracker.watching(), separate_host_memory(apart):
        tracker.counting_costs = True
        device = torch.ones(1000)
        host = host_empty_like(device)
        host.copy_(device)
        host.mul_(2)
        device.copy_(host)
        del host
    transfers = {(t.way, t.bytes): calls for t, calls in tracker.tally.transfers.items()}
    assert transfers == ({("to_host", 4000): 1, ("to_device", 4000): 1} if apart else {})
    assert [k.on_host for k in tracker.tally.kernels if k.operation.startswith("aten::mul_")] == [apart]
    assert max(peak.bytes for peak in peaks(tracker).values()) == (4000 if apart else 8000)
    assert max(peak.bytes for peak in peaks(tracker, on_host=True).values()) == (4096 if apart else 0)


def test_an_operation_on_two_memories_is_refused_as_a_device_refuses_it() -> None:
    tracker = Tracker({}, lambda *_: 0, lambda *_: 0, lambda: "")
    with FakeTensorMode(), tracker.watching(), separate_host_memory(True):
        device = torch.ones(10)
        host = host_empty_like(device)
        tracker.counting_costs = True
        with pytest.raises(AssertionError, match=r"aten::add.*mixes host and device memory"):
            device + host


def test_what_runs_beside_the_device_is_hidden_by_what_it_computes() -> None:
    cluster = cluster_of(ClusterSpec(device="h100"))
    to_host = Transfer("forward", "to_host", 10, 10**9)
    busy = Kernel("forward", "aten::mm", "bf16", 1, 10**15, 10**6)
    [alone] = offload_phases(StepCost((), (), (to_host,)), cluster)
    [hidden] = offload_phases(StepCost((busy,), (), (to_host,)), cluster)
    assert alone.exposed == pytest.approx(10 * 10**9 / (63e9 * 0.8))
    assert 0 < hidden.device == pytest.approx(1e15 / (989e12 * cluster.device.efficiency.matmul))
    assert hidden.exposed == 0
    [updates] = offload_phases(StepCost((Kernel("optimizer", "a", "fp32", 2, 0, 10**9, True),), ()), cluster)
    assert updates.exposed == pytest.approx(2 * 1e9 / (614.4e9 / 8 * 0.9))
