"""Stopping on request: a signal to any rank makes all ranks save after the same step and exit with 75.

Each step all-reduces a flag. The host reads the flag one step late, like the step's results, so it does not wait. A
second signal is the launcher's business (``stops.py``).
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.launch.stops import stop_signals


class StopRequest:
    """Handles the stop signals from its construction on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked = False
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def agreed(self) -> Tensor:
        """1 on all ranks if any rank was asked to stop, else 0. Collective; does not wait for the device."""
        flag = torch.full((), float(self._asked), device=self._device)  # torch.tensor waits for the device
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag
