"""Model state by the ZeRO paper's arithmetic.

Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1 and table 1: in 16-bit training with Adam a parameter takes 16
bytes, 2 for the weight, 2 for the gradient and 12 for the fp32 weight and two moments. A stage divides some of them by
the number of ranks. The table has 54 cells: three sizes of models, three stages, 1 to 1,024 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.core.ledger import Ledger

RANKS = (1, 4, 16, 64, 256, 1024)
PAPER_MODELS = (7.5e9, 128e9, 1e12)
"""Parameters of the models in the paper's table."""

PAPER_BYTES: dict[int, tuple[int, int]] = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}
"""By ZeRO stage: bytes per parameter that every rank holds, and bytes that are divided by the number of ranks."""


def paper_bytes(stage: int, ranks: int) -> float:
    """Bytes of model state per parameter and rank by the paper."""
    whole, divided = PAPER_BYTES[stage]
    return whole + divided / ranks


@dataclass(frozen=True)
class CountedState:
    """Model state of one rank as a dry run counts it.

    Attributes:
        update: weights, master weights, gradients and optimizer state before the update.
        most: the most of them at any time, with the weights that are all-gathered.
        activations: saved for the backward pass at their peak.
        total: the peak of everything.
    """

    stage: int
    ranks: int
    update: Ledger
    most: int
    activations: int
    total: int


def state_bytes(ledger: Ledger) -> int:
    """Weights, gradients and optimizer state."""
    return ledger.parameters + ledger.master_weights + ledger.gradients + ledger.optimizer_state
