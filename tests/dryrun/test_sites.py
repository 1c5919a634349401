"""Allocation sites at the peak, and the planned step in PyTorch's memory viewer, against the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from torch.cuda import _memory_viz

from shardwise.core.memory_snapshot import snapshot_bytes
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.dryrun.sites import WORKSPACE
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import strategy_from
from tests.harness.memory_viewer import viewed


def ran(device: str, **settings: Any) -> DryRun:
    model = {"layers": 3, "width": 32, "heads": 2, "ffn": 48, "vocab": 257}
    values = {"model": model, "data": {"sequence_length": 16}, "steps": 2, "batch_size": 4}
    recipe = recipe_of({**values, "cluster": {"device": device, "devices_per_node": 2}})
    strategy = strategy_from({"zero_stage": 3, **settings})
    return dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster), with_snapshot=True)


@pytest.mark.parametrize("device", ["cpu", "H100-80GB"])
def test_sites_are_the_ledger_by_module_and_operation(device: str) -> None:
    run = ran(device)
    counted: dict[str, int] = {}
    for site in run.sites:
        counted[site.row] = counted.get(site.row, 0) + site.bytes
    expected = {row: size for row, size in run.peak.ledger.as_dict().items() if size}
    assert counted == expected, "the listed sites add up to every row at the peak"
    assert [site.bytes for site in run.sites] == sorted((site.bytes for site in run.sites), reverse=True)
    gates = [s for s in run.sites if s.module == "layers.*.mlp.gate_proj" and s.row == "activations"]
    assert [(s.operation, s.tensors, s.bytes) for s in gates] == [("aten::mm", 3, 3 * 16 * 48 * 4)]


@pytest.mark.parametrize("device", ["cpu", "H100-80GB"])
def test_the_memory_viewer_shows_the_planned_peak(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    run = ran(device)
    assert run.snapshot is not None
    snapshot, levels = viewed(snapshot_bytes(run.snapshot))
    allocated = sum(site.bytes for site in run.sites if site.operation != WORKSPACE)
    assert allocated <= max(levels) <= run.peak.ledger.total
    assert (device == "cpu") == (allocated < run.peak.ledger.total), (
        "gloo has workspaces, which are no allocations"
    )
    assert levels[0] == 0, "the build is in the trace too"
    # PyTorch's own reader checks that blocks, gaps and segments add up.
    assert "total_reserved" in _memory_viz.segsum(snapshot)
    assert f"{len(snapshot['device_traces'][0])} entries" in _memory_viz.trace(snapshot)
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)
    frames = {frame["filename"] for entry in snapshot["device_traces"][0] for frame in entry["frames"]}
    assert {"layers.2.mlp.gate_proj", "forward phase", "backward phase"} <= frames


def test_expandable_segments_are_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    run = ran("H100-80GB")
    assert run.snapshot is not None
    snapshot, _ = viewed(snapshot_bytes(run.snapshot))
    assert all(segment["is_expandable"] for segment in snapshot["segments"])
    assert _memory_viz.segsum(snapshot)
