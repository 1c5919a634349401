"""The closed-form estimate: the textbook's formulas, in this file only. It proposes; the dry run disposes.

Reproduces the ZeRO paper's table. Never shown as a
prediction: closed forms miss by 5 to 30 % on whole runs (planner note 1).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of each kind of model state.

    The paper's 16-bit training with Adam: 2 for weights, 2 for gradients, 12 for fp32 weights and two moments
    (Rajbhandari et al. 2020, section 3.1).
    """

    weights: int = 2
    gradients: int = 2
    optimizer: int = 12


MIXED_16_BIT = StateBytes()

SHARDED: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("optimizer",),
    2: ("optimizer", "gradients"),
    3: ("optimizer", "gradients", "weights"),
}
"""What each ZeRO stage divides over the data-parallel ranks (section 5)."""


def model_state_bytes(parameters: float, stage: int, ranks: int, state: StateBytes = MIXED_16_BIT) -> float:
    """Bytes of model state per rank: stage 1 is (4 + 12/N)Ψ, stage 2 (2 + 14/N)Ψ, stage 3 16Ψ/N."""
    kept = divided = 0
    for kind in ("weights", "gradients", "optimizer"):
        size = getattr(state, kind)
        if kind in SHARDED[stage]:
            divided += size
        else:
            kept += size
    return parameters * (kept + divided / ranks)
