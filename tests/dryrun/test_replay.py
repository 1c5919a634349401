"""Whole steps replayed to the caching allocator, and what their verdicts say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.core.errors import ResourceError
from shardwise.core.units import MiB
from shardwise.dryrun.replay import Replay, Trace
from shardwise.dryrun.run import DryRun
from shardwise.dryrun.tracker import Allocation, StorageOrigin
from shardwise.hardware.allocator_options import AllocatorOptions
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.hardware.kinds import DEVICE_KINDS
from shardwise.jobs.planning import refuse_unfit
from shardwise.model.open import blueprint_of
from shardwise.planner.predict import EXPANDABLE, predict
from shardwise.planner.search import plan_for
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.dry_runs import dry_run, remembered_dry_runs

__all__ = ["remembered_dry_runs"]

pytestmark = pytest.mark.usefixtures("remembered_dry_runs")

MODEL = {"layers": 4, "width": 512, "heads": 8, "kv_heads": 8, "ffn": 1536, "vocab": 8192, "context": 512}
DEFAULTS = AllocatorOptions()


def recipe(preset: str = "4xH100-80GB", batch_size: int = 8, **more: Any) -> Recipe:
    values = {
        "model": MODEL,
        "data": {"sequence_length": 512},
        "steps": 1,
        "batch_size": batch_size,
        "cluster": {"preset": preset},
    }
    return recipe_of({**values, **more}, SETTINGS)


def run(asked: Recipe, **settings: Any) -> DryRun:
    strategy = strategy_from({"precision": "bf16", "zero_stage": 3, **settings})
    return dry_run(asked, blueprint_of(asked), strategy, cluster_of(asked.cluster))


def life(size: int, born: int, died: int | None, stream: int = 0) -> Allocation:
    return Allocation(size * MiB, born, "forward", f"at {born}", True, "op", StorageOrigin(), stream, died)


def test_a_step_is_repeated_until_it_reserves_no_more() -> None:
    """State of 10 MiB; the step needs 30, then 20 and 40 at once: 10 + 30 + 40 in the first step (20 lie in 30).

    In the second the 30 are taken from free memory: the 30 themselves, since 40 would fit worse. 80 in both.
    """
    trace = Trace([life(10, 1, None), life(30, 3, 4), life(20, 5, 8), life(40, 6, 7)], start=2)
    assert trace.replayed(DEFAULTS) == Replay(80 * MiB, 70 * MiB, steps=2, retries=0)


def test_samples_are_made_anew_and_results_are_dropped_between_steps() -> None:
    """A sample of 30 is freed by the step, which leaves 20 behind: 30 + 20 + 40 do for every step."""
    trace = Trace([life(30, 1, 4), life(20, 3, None), life(40, 5, 6)], start=2)
    assert trace.replayed(DEFAULTS) == Replay(90 * MiB, 60 * MiB, steps=2, retries=0)


def test_a_failure_names_the_allocation_that_found_no_room() -> None:
    """Of 100 MiB 60 are held and 50 are asked at time 4."""
    trace = Trace([life(60, 1, None), life(50, 4, 5)], start=2)
    failure = trace.replayed(DEFAULTS, limit=100 * MiB).failure
    assert failure is not None and (failure.where, failure.size) == ("at 4", 50 * MiB)
    assert (failure.allocated, failure.reserved) == (60 * MiB, 60 * MiB)


def test_workspaces_are_blocks_of_the_allocator() -> None:
    trace = Trace([life(10, 1, None)], start=2, workspaces=(32 * MiB, 32 * MiB))
    assert trace.replayed(DEFAULTS).reserved == 74 * MiB


def test_the_tracker_learns_the_streams_of_fsdp() -> None:
    """Gathers are allocated on the copy-in stream, reductions on the reduce-scatter stream, all else on stream 0."""
    trace = run(recipe()).trace
    assert trace is not None
    streams = {stream: [a for a in trace.allocations if a.stream == stream] for stream in (0, 1, 2)}
    assert {a.stream for a in trace.allocations} == set(streams)
    gathered = [a for a in streams[1] if "communication" in a.origin.tags]
    assert gathered and all(a.phase in ("forward", "backward") for a in gathered)
    assert streams[2] and all(a.phase == "backward" for a in streams[2])
    # What the compute stream works with: copied-out weights are regrown there.
    assert all(a.stream == 0 for a in trace.allocations if a.operation == "resize")


def test_what_is_reserved_is_no_less_than_what_is_held() -> None:
    counted = run(recipe())
    replay, workspace = counted.replay, cluster_of(recipe().cluster).device.overhead.workspace_bytes
    assert replay is not None and replay.failure is None
    assert counted.peak.bytes + workspace <= replay.allocated <= replay.reserved
    # Rounding to 512 bytes, and up to 1 MiB that is not split off a block.
    assert replay.allocated <= 1.1 * (counted.peak.bytes + workspace)


def test_streams_cost_what_one_stream_would_not() -> None:
    trace = run(recipe()).trace
    assert trace is not None
    together = replace(trace, allocations=[replace(a, stream=0) for a in trace.allocations])
    assert together.replayed(DEFAULTS).reserved < trace.replayed(DEFAULTS).reserved


def test_expandable_segments_reserve_less() -> None:
    trace = run(recipe()).trace
    assert trace is not None
    expandable = trace.replayed(AllocatorOptions(expandable_segments=True))
    assert expandable.reserved < trace.replayed(DEFAULTS).reserved


def test_the_cpu_has_no_caching_allocator() -> None:
    asked = recipe(cluster={"device": "cpu", "devices_per_node": 4})
    counted = run(asked)
    assert counted.trace is None and counted.replay is None
    strategy = strategy_from({"zero_stage": 3})
    found = predict(asked, blueprint_of(asked), strategy, cluster_of(asked.cluster))
    assert found.peak.ledger.fragmentation == 0


# -- verdicts -----------------------------------------------------------------------------------------------


def limited(needed: int) -> tuple[Recipe, Cluster]:
    """The recipe, pinned, on devices where ``needed`` bytes may be used."""
    degrees = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "sequence_parallel", "replicate"), 1)
    states = {"precision": "bf16", "zero_stage": 3, "offload": "none"}
    activations = {"micro_batch_size": 2, "activation_checkpointing": "none", "loss": "logits"}
    pinned = {**degrees, **states, **activations}
    memory = needed / (1 - DEVICE_KINDS["cuda"].reserve) / 2**30
    cluster = {"preset": "4xH100-80GB", "memory_gib": memory}
    asked = recipe(cluster=cluster, strategy=pinned)
    return asked, cluster_of(asked.cluster)


def test_the_ledger_has_fragmentation_and_sums_to_what_is_reserved() -> None:
    asked, cluster = limited(80 * 2**30)
    found = predict(asked, blueprint_of(asked), strategy_from(dict(asked.strategy)), cluster)
    replay = found.run.replay
    assert replay is not None
    outside = cluster.device.overhead.outside_allocator(1)
    assert found.peak.ledger.fragmentation > 0
    assert found.peak.bytes - replay.reserved == outside
    assert sum(found.peak.ledger.as_dict().values()) == found.peak.bytes


def test_out_of_memory_by_fragmentation_is_said_in_words() -> None:
    """Room for the sum of all tensors and not a byte more."""
    strategy = strategy_from(dict(limited(80 * 2**30)[0].strategy))
    asked, cluster = limited(80 * 2**30)
    needed = predict(asked, blueprint_of(asked), strategy, cluster).sum_bytes
    asked, cluster = limited(needed + 2**20)
    plan = plan_for(asked, blueprint_of(asked), cluster, compare=False)
    assert not plan.fits
    assert plan.peak.bytes - plan.ledger.fragmentation <= plan.capacity_bytes - plan.reserve_bytes
    [chosen] = [c for c in plan.candidates if c.strategy == plan.strategy]
    assert chosen.verdict == "does not fit"
    assert chosen.reason.startswith("out of memory by fragmentation in the ")
    assert "find no room" in chosen.reason and chosen.reason in plan.reasons
    with pytest.raises(ResourceError, match="lost to fragmentation"):
        refuse_unfit(plan)


def test_expandable_segments_are_named_where_they_make_room() -> None:
    asked, cluster = limited(80 * 2**30)
    found = predict(asked, blueprint_of(asked), strategy_from(dict(asked.strategy)), cluster)
    trace, replay = found.run.trace, found.run.replay
    assert trace is not None and replay is not None
    failing = replace(found, limited=trace.replayed(DEFAULTS, limit=replay.allocated))
    assert failing.in_words().endswith("in use")
    helped = replace(failing, expanded=trace.replayed(EXPANDABLE))
    assert helped.in_words().endswith("with PYTORCH_ALLOC_CONF=expandable_segments:True it would fit")


def test_what_runs_only_by_emptying_the_cache_fits_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than is reserved without a limit, in steps of 2 MiB: some limit is just enough, at a price."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    asked, cluster = limited(80 * 2**30)
    found = predict(asked, blueprint_of(asked), strategy_from(dict(asked.strategy)), cluster)
    trace, replay = found.run.trace, found.run.replay
    assert trace is not None and replay is not None
    tight = [trace.replayed(DEFAULTS, limit) for limit in range(replay.reserved, replay.allocated, -2 * MiB)]
    assert tight[0] == replay and tight[-1].failure is not None
    enough = min((r.reserved for r in tight if r.failure is None and r.retries > 0), default=0)
    assert replay.allocated <= enough < replay.reserved
    outside = found.peak.bytes - replay.reserved
    asked, cluster = limited(outside + enough + 1024)
    plan = plan_for(asked, blueprint_of(asked), cluster, compare=False)
    assert plan.fits and plan.peak.bytes < found.peak.bytes
    assert any("empties its cache" in reason for reason in plan.reasons)
