"""Stopping on request: a signal to any rank makes all ranks save after the same step and exit with 75.

Each step all-reduces a few flags: this one, and what callbacks ask for (trainer/hooks.py). The host reads them one step
late, like the step's results, so it does not wait. A second signal is the launcher's business (``stops.py``).
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

    def agreed(self, *others: bool) -> Tensor:
        """[1 + n] flags, 1 on all ranks if any rank was asked to stop, and if any has each of the n ``others``.

        Collective; does not wait for the device.
        """
        flags = torch.zeros(1 + len(others), device=self._device)  # torch.tensor waits for the device
        for index, asked in enumerate((self._asked, *others)):
            if asked:
                flags[index].fill_(1.0)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return flags
