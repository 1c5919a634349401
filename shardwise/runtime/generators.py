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
    """Leave the generators, also torch's of the current device of this kind, as they were."""
    python = random.getstate()
    numpy = np.random.get_state()
    host = torch.get_rng_state()
    own = None if device is None or kind_of(device).is_host else torch.get_device_module(device)
    on_device = None if own is None else own.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        if own is not None:
            own.set_rng_state(on_device)
