"""Measured speeds of this machine, stored for its plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.core.cost import Kernel
from shardwise.core.errors import ResourceError
from shardwise.hardware import this_machine as machine
from shardwise.hardware.cluster import cluster_of
from shardwise.hardware.measured import IN_PLACE, NEW, Grid, MeasuredSpeeds
from shardwise.hardware.profiles import PROFILES
from shardwise.planner.explain import seconds_from
from shardwise.planner.kernel_time import kernel_seconds
from shardwise.plugins.calibration import run
from shardwise.plugins.calibration.store import add_speeds, calibrate, calibrated
from shardwise.plugins.doctor.checks import DeviceSpeed, Diagnosis, Speeds
from shardwise.plugins.doctor.inspection import Device, inspect
from shardwise.recipe.sections import ClusterSpec

H100 = Device(
    0, "NVIDIA H100 80GB HBM3", PROFILES["H100-80GB"].memory_bytes, 84_000_000_000, "9.0", "H100-80GB"
)
FACTS = inspect(Path())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


def test_calibration_reaches_the_plan(tmp_path: Path) -> None:
    measured = DeviceSpeed("cpu", {"fp32": 3e11, "bf16": 6e11}, (), 4e10)
    path = calibrate(Diagnosis(FACTS, Speeds((measured,), (8e8, 1e-4)), ()))
    assert path == tmp_path / "cache" / "cpu.json"
    device = cluster_of(ClusterSpec(device="cpu", devices_per_node=2)).device
    assert device.flops["fp32"] == 1.5e11 and device.link_bandwidth == 8e8


def test_one_gpu_of_each_kind_is_measured_for_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A large product on an H100 is near its peak; these tables are a thousand times slower, and have no fp8."""
    measured, torch = list[int](), replace(FACTS.torch, devices=(H100, replace(H100, index=1)))
    tables = MeasuredSpeeds(
        1,
        8,
        {"fp32": Grid(((1, 2), (1, 2), (1, 2)), (1.0,) * 8)},
        {},
        {NEW: ((1e3, 1.0),), IN_PLACE: ((1e3, 1.0),)},
    )
    monkeypatch.setattr(run, "measure_gpu", lambda index: (measured.append(index), tables)[1])
    # The CPU of a machine with GPUs is not measured.
    [path] = calibrated(Diagnosis(replace(FACTS, torch=torch), Speeds(()), ()), tmp_path)
    assert path == tmp_path / "cache" / "H100-80GB.json" and measured == [0]
    cluster = cluster_of(ClusterSpec(preset="8xH100-80GB"))
    assert (
        cluster.device.measured == tables
        and cluster_of(ClusterSpec(preset="8xA100-80GB")).device.measured is None
    )
    product = Kernel("forward", "aten::mm", "fp32", 1, 2 * 2**3, 48, shape=(1, 2, 2, 2))
    assert kernel_seconds(product, cluster.device) == pytest.approx(1.0)
    assert kernel_seconds(replace(product, dtype="fp8"), cluster.device) < 1e-4
    assert (
        kernel_seconds(Kernel("optimizer", "aten::add_", "fp32", 1, 0, 1000, on_host=True), cluster.device)
        < 1e-4
    )
    assert "a H100-80GB of this machine" in seconds_from(cluster)


def test_calibration_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    diagnosis = Diagnosis(FACTS, Speeds((DeviceSpeed("cpu", {"fp32": 1e11}, (), 1e10),)), ())
    with pytest.raises(ResourceError, match="cannot write the calibration"):
        calibrate(diagnosis)


def test_nothing_is_stored_where_nothing_was_measured() -> None:
    with pytest.raises(ResourceError, match="nothing was measured"):
        calibrate(Diagnosis(FACTS, Speeds(), ()))
    failed = DeviceSpeed("cpu", {}, (), 1e10, problem="no kernel image is available")
    with pytest.raises(ResourceError, match="no kernel image is available"):
        calibrate(Diagnosis(FACTS, Speeds((failed,)), ()))


def speeds(processes: int) -> MeasuredSpeeds:
    """Products of 2 GFLOP/s at most, and 4 GB/s of new memory."""
    grid = Grid(((1, 10), (10,), (10,)), (1e-6, 1e-6))
    curve = ((1e3, 1e-6), (4e6, 1e-3))
    return MeasuredSpeeds(processes, 1, {"fp32": grid}, {}, {NEW: curve, IN_PLACE: curve})


def test_first_speeds_give_the_rates_and_later_ones_keep_them() -> None:
    add_speeds(speeds(2))
    found = machine.read_calibration()
    assert found is not None and found.flops == {"fp32": pytest.approx(4e9)}
    assert found.memory_bandwidth == pytest.approx(8e9) and found.speeds == (speeds(2),)
    calibrate(Diagnosis(FACTS, Speeds((DeviceSpeed("cpu", {"fp32": 3e11}, (), 4e10),)), ()), (speeds(2),))
    add_speeds(speeds(4))
    found = machine.read_calibration()
    assert found is not None and found.flops == {"fp32": 3e11} and found.speeds == (speeds(2), speeds(4))
