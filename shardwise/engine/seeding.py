"""Seeds of a step: the same on every restart, whatever ran before."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_step(seed: int, index: int, rank: int) -> None:
    """Seed every generator from (seed, step, rank), so a checkpoint stores no generator state.

    Dropout draws from torch's, and optimizers of libraries from those of Python and NumPy, too. Python's has no rank: a
    model that draws which layers run, as layer drop does, must run the same ones on all ranks.
    """
    # Distinct for up to 1,000,003 steps of a seed and 65,537 ranks.
    step = (seed * 1_000_003 + index) * 65_537
    value = (step + rank) % 2**63
    torch.manual_seed(value)
    random.seed(step % 2**63)
    np.random.seed(value % 2**32)  # NumPy takes 32 bits
