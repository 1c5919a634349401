"""Stopping on request: a signal to any rank makes all ranks save after the same step and exit 75.

Each rank's wish is reduced over all ranks with every step and read one step late, like the step's results, so
that nobody waits for it. A second signal changes nothing: the save is on its way.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.train.launch import STOPPING


class StopRequest:
    """Listens for signals from the moment it is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked = False
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def agreed(self) -> Tensor:
        """1 on all ranks when any has been asked to stop, else 0; a collective, not waited for."""
        wish = torch.full((), float(self._asked), device=self._device)  # torch.tensor waits for the device
        dist.all_reduce(wish, op=dist.ReduceOp.MAX)
        return wish
