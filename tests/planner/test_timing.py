"""Step time of hand-made costs: what overlaps, what does not, and what a pipeline's messages cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.core.cost import Collective, Kernel, StepCost
from shardwise.core.pipeline.schedule import step_time as schedule_seconds
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.hardware.measured import IN_PLACE, NEW, MeasuredSpeeds
from shardwise.planner.timing import StepTime, predicted_step_time
from shardwise.recipe.load import recipe_of
from shardwise.technique import mesh_layout

LAYOUT = mesh_layout({"shard": 8})


def cluster(preset: str = "8xH100-80GB") -> Cluster:
    values = {"model": {"preset": "tiny"}, "steps": 1, "batch_size": 1, "cluster": {"preset": preset}}
    return cluster_of(recipe_of(values).cluster)


def work(phase: str, gigabytes: float = 1.0, calls: int = 10) -> Kernel:
    return Kernel(phase, "aten::add", "bf16", calls, 0, int(gigabytes * 1e9))


def gather(calls: int, megabytes: float, axis: str = "shard", passes: int = 1) -> Collective:
    size = int(megabytes * 1e6)
    return Collective("all_gather", axis, 8, calls, size // 2, size, "forward", passes)


def timed(*collectives: Collective, micro_batches: int = 1, calls: int = 10) -> StepTime:
    cost = StepCost((work("forward", calls=calls),), collectives, (), micro_batches)
    return predicted_step_time(cost, LAYOUT, cluster())


def test_collectives_of_one_rank_and_of_nothing_are_free() -> None:
    alone = timed()
    assert timed(replace(gather(4, 100), degree=1)).seconds == pytest.approx(
        alone.seconds, abs=4.1 * cluster().device.launch.collective
    )
    assert alone.split["exposed communication"] == 0


def test_time_rises_with_bytes_sent_and_computed() -> None:
    sent = [timed(gather(10, size)).seconds for size in (1, 10, 100, 1000)]
    computed = [timed(gather(10, 10), calls=calls).seconds for calls in (1, 10, 100)]
    assert sent == sorted(sent) and computed == sorted(computed)


def test_what_hides_behind_work_costs_its_first_call_and_the_interference() -> None:
    alone, hidden = timed(), timed(gather(10, 10))
    blocking = timed(gather(10, 10, axis="tensor"))
    assert alone.seconds < hidden.seconds < blocking.seconds
    one = blocking.split["exposed communication"] / 10
    lost = cluster().device.interference
    assert hidden.split["exposed communication"] == pytest.approx(one + lost * 9 * one)


def test_a_reduction_once_a_step_hides_behind_one_micro_batch_only() -> None:
    """Sixteen micro-batches of work hide sixteen times as much if the collective is called in each of them."""
    once, every = gather(16, 2000), gather(16, 2000, passes=16)
    exposed = [timed(c, micro_batches=16).split["exposed communication"] for c in (once, every)]
    assert exposed[0] > 0.3 * timed(replace(once, axis="tensor")).split["exposed communication"]
    assert timed(once, micro_batches=1).split["exposed communication"] < exposed[0]


def test_many_small_kernels_wait_for_the_host() -> None:
    cost = StepCost((Kernel("forward", "aten::add", "bf16", 1000, 0, 1000),), ())
    time = predicted_step_time(cost, LAYOUT, cluster())
    assert time.seconds == pytest.approx(1000 * cluster().device.launch.kernel)
    assert time.split["waiting for the host"] > 0


def test_a_calibrated_host_launches_in_the_seconds_that_were_measured() -> None:
    """By phase, for each counted kernel, ahead of the device; phases that were not measured are assumed."""
    tables = MeasuredSpeeds(
        1,
        8,
        {},
        {},
        {NEW: ((1e3, 1e-6),), IN_PLACE: ((1e3, 1e-6),)},
        host={"forward": 5e-5, "optimizer": 2e-5},
    )
    here = cluster()
    here = replace(here, device=replace(here.device, measured=tables))
    kernels = (
        Kernel("forward", "aten::add", "bf16", 1000, 0, 1000),
        Kernel("backward", "aten::add", "bf16", 1000, 0, 1000),
        Kernel("optimizer", "aten::_fused_adamw_", "fp32", 100, 0, 1000),
    )
    time = predicted_step_time(StepCost(kernels, ()), LAYOUT, here)
    launches = 1000 * 5e-5 + 1000 * here.device.launch.kernel + 100 * 2e-5
    assert time.seconds == pytest.approx(launches)
    assert time.split["memory-bound"] == pytest.approx(2100 * 1e-6)


def test_messages_between_stages_belong_to_the_schedule() -> None:
    layout = mesh_layout({"pipeline": 2, "shard": 8})
    message = Collective("send", "pipeline", 2, 8, 10**7, 2 * 10**7, "forward", 4)
    time = predicted_step_time(
        StepCost((work("forward"),), (message,), (), 4), layout, cluster("16xH100-80GB")
    )
    assert time.split["exposed communication"] == 0
    assert time.sending == pytest.approx(2e7 / (50e9 * cluster().device.efficiency.network), rel=0.2)
    around = replace(message, axis="sequence", degree=8)
    assert predicted_step_time(StepCost((), (around,), (), 4), LAYOUT, cluster()).seconds > 0
    # Two micro-batches are in flight, and each waits for a message there and one back.
    steps = [schedule_seconds("1f1b", 2, 1, 8, lambda a: 1.0, sending) for sending in (0.0, 0.25)]
    assert steps[1] == steps[0] + 8 / 2 * 2 * 0.25
