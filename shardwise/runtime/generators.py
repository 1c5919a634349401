"""The generators of random numbers that a user's code may draw from: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from shardwise.hardware.kinds import kind_of


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Leave the generators, also torch's of a device, as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [] if device is None or kind_of(device).is_host else [device]
    try:
        with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
