"""The reference balances experts by the biases of their routers, from plain counts of chosen experts.

b_e <- b_e + rate sign(mean of n - n_e), n_e: tokens of expert e in the step (Wang et al. 2024, arXiv:2408.15664)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Batch
from shardwise.runtime.parallel.vocabulary import IGNORED


class PlainRouterBiases:
    """The biases of a native model's routers; nothing for other models."""

    def __init__(self, model: nn.Module) -> None:
        self._counts: dict[Any, Counter[int]] = {}
        self._filled: Tensor | None = None
        for module in model.modules():
            if getattr(module, "e_score_correction_bias", None) is not None and hasattr(
                module, "adjust_bias"
            ):
                self._counts[module] = Counter()
                module.register_forward_hook(self._see)

    def begin(self, batch: Batch) -> None:
        """The next forward pass is of this micro-batch: rows without a target only fill it up."""
        self._filled = (batch["labels"] != IGNORED).any(-1).flatten() if self._counts else None

    def _see(self, router: nn.Module, args: Any, result: tuple[Tensor, Tensor]) -> None:
        if self._filled is not None and torch.is_grad_enabled():
            rows = result[0].view(len(self._filled), -1)
            self._counts[router].update(rows[self._filled].flatten().tolist())

    @torch.no_grad()
    def step(self) -> None:
        """Move every bias by the counts of the step, which end here."""
        for router, counts in self._counts.items():
            bias: Any = router.get_buffer("e_score_correction_bias")
            rate: float = router.dimensions.router_bias_rate
            mean = sum(counts.values()) / len(bias)
            for expert in range(len(bias)):
                bias[expert] += rate * ((counts[expert] < mean) - (counts[expert] > mean))
        self.forget()

    def forget(self) -> None:
        """Count from now on."""
        for counts in self._counts.values():
            counts.clear()
