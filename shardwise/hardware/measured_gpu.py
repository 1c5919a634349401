"""Speeds of the kernels of a GPU that ``shardwise doctor --calibrate`` measured on this machine.

They are stored by device (``DeviceProfile.calibrated_as``), in a file next to the CPU's. Plans for the device use them
in place of peaks, and its order of attention backends, for any number of devices: a GPU shares nothing with others
while its kernels run. A file of another version of torch, or one that cannot be read, is ignored without a message,
because a plan must not fail over optional speeds.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from shardwise.core.json_file import checked, text_of
from shardwise.hardware.device import DeviceProfile
from shardwise.hardware.measured import MeasuredSpeeds
from shardwise.hardware.this_machine import cache_folder, torch_version

TABLES_VERSION = 2
"""Of the tables. Those of version 1 took the launches of small kernels for their seconds."""


@dataclass(frozen=True)
class GpuCalibration:
    """The measured speeds of a device, with the version of torch and the day."""

    device: str
    torch: str
    day: str
    speeds: MeasuredSpeeds
    version: int = TABLES_VERSION


def gpu_file(device: str) -> Path:
    """The file of a device; a driver's name may have characters that a file name has not."""
    return cache_folder() / f"{re.sub(r'[^A-Za-z0-9.]+', '-', device)}.json"


def write_gpu(calibration: GpuCalibration) -> Path:
    """Write a calibration atomically. Raises OSError."""
    path = gpu_file(calibration.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text_of(calibration) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def with_measured(profile: DeviceProfile) -> DeviceProfile:
    """The profile with the speeds that were measured here; the same profile if there are none."""
    device = profile.calibrated_as
    try:
        calibration = checked(gpu_file(device).read_bytes(), GpuCalibration)
    except (OSError, ValidationError):
        return profile
    if (calibration.device, calibration.torch, calibration.version) != (
        device,
        torch_version(),
        TABLES_VERSION,
    ):
        return profile
    order = calibration.speeds.attention_order or profile.attention
    return replace(profile, measured=calibration.speeds, measured_on=calibration.day, attention=order)
