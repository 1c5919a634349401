"""Measures and keeps the speeds of this machine for its plans, for `shardwise doctor --calibrate`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from shardwise.core.errors import ResourceError
from shardwise.hardware import this_machine as machine
from shardwise.hardware.cluster import device_profile
from shardwise.hardware.device import DeviceProfile
from shardwise.hardware.kinds import HOST
from shardwise.hardware.measured import NEW, Grid, MeasuredSpeeds
from shardwise.hardware.measured_gpu import GpuCalibration, write_gpu
from shardwise.plugins.doctor.checks import Diagnosis
from shardwise.plugins.doctor.inspection import Facts


def calibrated(diagnosis: Diagnosis, folder: Path) -> Iterator[Path]:
    """Measure the GPUs, or else the processor and the disk below ``folder``; yields each file once it is written.

    Where GPUs are, plans for the CPU are rare: ``CUDA_VISIBLE_DEVICES=""`` measures for them. Raises ResourceError.
    """
    if any(device.profile for device in diagnosis.facts.torch.devices):
        yield from calibrate_gpus(diagnosis.facts)
        return
    if diagnosis.facts.torch.error:  # nothing can be measured; ``calibrate`` raises with the reason
        yield calibrate(diagnosis)
        return
    speeds, disk = measured_speeds(folder)
    yield calibrate(diagnosis, speeds, disk)


def calibrate(
    diagnosis: Diagnosis, speeds: tuple[MeasuredSpeeds, ...] = (), disk: float | None = None
) -> Path:
    """Store the processor's measured speeds for later plans; returns the file. Raises ResourceError.

    Args:
        speeds: of one process, for several numbers of processes (``measured_speeds``).
        disk: bytes/s that files are written with.
    """
    cpu = next((speed for speed in diagnosis.speeds.devices if speed.device == HOST.name), None)
    if cpu is None or "fp32" not in cpu.flops:
        why = diagnosis.facts.torch.error or (cpu.problem if cpu else "")
        raise ResourceError("nothing was measured", where="doctor", why=why)
    link = diagnosis.speeds.link
    calibration = machine.Calibration(
        machine.cpu_model(),
        machine.usable_cores(),
        cpu.flops,
        cpu.memory_bandwidth,
        None if link is None else link[0],
        machine.torch_version(),
        _today(),
        disk,
        speeds,
    )
    return _written(calibration)


def _written(calibration: machine.Calibration) -> Path:
    try:
        return machine.write_calibration(calibration)
    except OSError as problem:
        path = str(machine.calibration_file())
        why = problem.strerror or str(problem)
        raise ResourceError("cannot write the calibration", where=path, why=why) from problem


def add_speeds(speeds: MeasuredSpeeds) -> Path:
    """Store the speeds of one process next to those that are known for other numbers; returns the file.

    Without a calibration of this machine while it was idle, its rates are those of the largest kernels.

    Raises:
        ResourceError: it cannot be written.
    """
    known = machine.read_calibration()
    others: list[MeasuredSpeeds] = []
    if known is not None:
        others = [other for other in known.speeds if other.processes != speeds.processes]
    if known is None or (known.speeds and all(other.busy for other in known.speeds)):
        largest_bytes, seconds = speeds.plain[NEW][-1]
        bandwidth = largest_bytes / seconds
        # Speeds are those of one process; a calibration has the rates of the whole machine.
        known = machine.Calibration(
            machine.cpu_model(),
            machine.usable_cores(),
            {dtype: speeds.processes * _fastest(grid) for dtype, grid in speeds.products.items()},
            speeds.processes * bandwidth,
            torch=machine.torch_version(),
            day=_today(),
        )
    return _written(replace(known, speeds=(*others, speeds)))


def _fastest(grid: Grid) -> float:
    """The most FLOP/s of a grid of products."""
    sizes = itertools.product(*grid.axes)
    return max(2.0 * math.prod(size) / spent for size, spent in zip(sizes, grid.seconds, strict=True))


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def calibrate_gpus(facts: Facts) -> Iterator[Path]:
    """Measure one GPU of each known kind and store its speeds for later plans. Raises ResourceError."""
    from shardwise.plugins.calibration.run import measure_gpu

    # In reverse, so that the first device of a kind is the one that stays in the dictionary.
    kinds = {device.profile: device.index for device in reversed(facts.torch.devices) if device.profile}
    for profile, index in kinds.items():
        try:
            known = device_profile(profile)
            assert known is not None, "the CPU is no GPU"
            yield store_gpu(known, measure_gpu(index))
        except (OSError, RuntimeError) as problem:
            where = f"gpu {index}"
            raise ResourceError("cannot calibrate this GPU", where=where, why=str(problem)) from problem


def store_gpu(profile: DeviceProfile, speeds: MeasuredSpeeds) -> Path:
    """Store a GPU's speeds for later plans; returns the file. Raises OSError."""
    return write_gpu(GpuCalibration(profile.calibrated_as, machine.torch_version(), _today(), speeds))


def measured_speeds(folder: Path) -> tuple[tuple[MeasuredSpeeds, ...], float | None]:
    """Measure what step times are made of, and the disk below ``folder``: about a minute.

    Raises ResourceError if a process that measures fails.
    """
    from shardwise.plugins.calibration.run import measure_cpu
    from shardwise.plugins.doctor import speed

    try:
        return measure_cpu(), speed.disk_bandwidth(folder)
    except RuntimeError as problem:
        fix = "run shardwise doctor --link, which tests processes and gloo alone"
        raise ResourceError(
            "cannot measure this machine", where="doctor --calibrate", why=str(problem), fix=fix
        ) from problem
