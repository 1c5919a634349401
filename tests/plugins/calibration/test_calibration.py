"""The calibration: what it measures on this machine, without trusting any of its seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.core.cost import Collective, Kernel
from shardwise.core.json_file import checked, text_of
from shardwise.hardware.measured import IN_PLACE, NEW, Grid, MeasuredSpeeds
from shardwise.plugins.calibration import kernels, run
from shardwise.plugins.calibration.collectives import collective_curves
from shardwise.plugins.calibration.rank import SETTINGS_OF_AXIS, Task
from shardwise.plugins.calibration.steps import (
    TimedStep,
    around_collectives,
    host_seconds,
    ratios,
    timed_step,
)
from shardwise.technique import AXES as MESH_AXES
from tests.harness.pool import Pool

CPU = torch.device("cpu")
TINY = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 256}
PLAIN = {NEW: ((1e3, 1e-6), (1e6, 1e-4)), IN_PLACE: ((1e3, 1e-6), (1e6, 1e-4))}


def test_products_that_would_take_too_long_grow_with_their_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.SIZES, "cpu", ((1, 8), (8,), (8, 64)))
    monkeypatch.setattr(kernels, "seconds_of", lambda calls, device: 5e-4)
    assert kernels.products("fp32", CPU, budget=1.0).seconds == (5e-4,) * 4
    assert kernels.products("fp32", CPU, budget=0.0).seconds == (5e-4, 4e-3, 4e-3, 32e-3)
    monkeypatch.setattr(kernels, "SLOWEST", 3e-3)
    assert kernels.products("fp32", CPU, budget=1.0).seconds == (5e-4, 4e-3, 4e-3, 32e-3)


def test_a_step_is_timed_by_phase_kernel_and_collective(pool: Pool) -> None:
    [found] = pool.run(1, timed_step, TINY, 8, 2, {}, CPU, 1)
    assert {"forward", "backward", "clip", "optimizer"} <= found.phases.keys()
    operations = {kernel.operation: kernel for kernel in found.own_kernels()}
    assert operations["aten::mm"].flops and operations["aten::_fused_adamw_"].phase == "optimizer"
    curves = ratios([found], PLAIN)
    assert "aten::_fused_adamw_ fp32" in curves and not any(name.startswith("aten::mm ") for name in curves)
    assert all(ratio > 0 for curve in curves.values() for _, ratio in curve)


def test_collectives_of_every_kind_are_timed(pool: Pool) -> None:
    curves = pool.run(2, collective_curves, (4, 4096))[0]
    assert {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast"} == curves.keys()
    for curve in curves.values():
        assert [size for size, _ in curve] == [8, 4096]


def timed(phase: float, spent: float) -> TimedStep:
    """Ten kernels of 1000 bytes forward, in a phase of this length, twice under the clock."""
    kernel = Kernel("forward", "aten::exp", "fp32", 0, 0, 1000)
    return TimedStep({"forward": phase}, [((kernel,), spent)] * 20)


def test_what_kernels_leave_of_a_phase_is_the_host_s() -> None:
    speeds = MeasuredSpeeds(1, 1, {}, {}, PLAIN)
    assert host_seconds(timed(1e-3, 0.0), speeds)["forward"] == pytest.approx(1e-4 - 1e-6)
    assert host_seconds(timed(1e-6, 0.0), speeds)["forward"] == 0.0


def test_an_interrupted_call_does_not_change_a_ratio() -> None:
    step = timed(1e-3, 3e-6)
    step.kernels[0] = (step.kernels[0][0], 1.0)
    assert ratios([step], PLAIN)["aten::exp fp32"][0][1] == pytest.approx(3.0)


@pytest.mark.parametrize(("around", "waiting"), [(1e-4, 0.25), (0.0, 1.0), (3e-4, 0.0)])
def test_two_steps_tell_the_host_from_the_bytes(around: float, waiting: float) -> None:
    """Two collectives of 1 ms in one step, four of 50 ms in the other, and one of another axis in both."""
    speeds = MeasuredSpeeds(2, 1, {}, {}, PLAIN, collectives={"all_gather": ((1e3, 1e-3), (1e6, 50e-3))})
    other = Collective("all_gather", "replicate", 2, 1, 250, 1000)

    def step(calls: int, size: int, spent: float) -> TimedStep:
        own = Collective("all_gather", "shard", 2, 1, size // 4, size)
        seconds = 1e-3 + calls * (around + waiting * spent)
        return TimedStep({"forward": seconds}, collectives=[other, *[own] * calls])

    found = around_collectives(step(2, 1000, 1e-3), step(4, 10**6, 50e-3), speeds, "shard")
    assert found == pytest.approx((around, waiting))
    assert around_collectives(step(0, 1000, 0.0), step(0, 1000, 0.0), speeds, "shard") == (0.0, 1.0)


def test_axes_are_those_of_the_mesh() -> None:
    assert SETTINGS_OF_AXIS.keys() <= {axis.name for axis in MESH_AXES}


def test_what_a_rank_is_told_and_finds_goes_through_files() -> None:
    grid = Grid(((1, 2), (1,), (1,)), (1e-6, 2e-6))
    task = Task("cpu", ("fp32",), MeasuredSpeeds(2, 1, {"fp32": grid}, {}, PLAIN))
    assert checked(text_of(task), Task) == task


def test_the_first_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "_RANK", "shardwise.no_such_module")
    with pytest.raises(RuntimeError, match="no_such_module"):
        run.measure_cpu()
