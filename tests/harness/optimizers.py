"""Optimizers of torch that look at whole matrices."""

from __future__ import annotations

import torch
from torch import nn

FACTORIES = {"Muon": "tests.harness.optimizers:muon_and_adamw", "Adafactor": "torch.optim:Adafactor"}
"""For ``optimizer.factory`` of a recipe."""


def muon_and_adamw(named: list[tuple[str, nn.Parameter]], lr: float = 1e-3) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks, AdamW for the others, as torch's documentation of Muon has it."""
    matrices = [p for name, p in named if p.ndim == 2 and "layers" in name]
    held = {id(p) for p in matrices}
    return [
        torch.optim.Muon(matrices, lr=lr),
        torch.optim.AdamW([p for _, p in named if id(p) not in held], lr=lr),
    ]
