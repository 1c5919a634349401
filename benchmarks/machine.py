"""The machine a figure was measured on, for the head of every results file, and when it is done."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import Any

import torch

from shardwise.core.units import format_bytes
from shardwise.hardware.this_machine import cpu_model, physical_memory, usable_cores


def described() -> dict[str, Any]:
    """Processor, memory, accelerators, versions and the day."""
    accelerators = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": cpu_model(),
        "cores": usable_cores(),
        "memory": format_bytes(physical_memory()),
        "accelerators": accelerators,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "day": datetime.now(UTC).date().isoformat(),
    }


def synchronise(device: torch.device) -> None:
    """Until the device has done what it was given: a clock is read before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize()
