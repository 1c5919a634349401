"""Repeated data: tokens of later epochs, and parameters beyond what unique data supports, are worth less.

Muennighoff et al. 2023, Scaling Data-Constrained Language Models, arXiv 2305.16264, equations 5, 6 and 17:

    D' = U_D + U_D R_D* (1 - exp(-R_D / R_D*))    R_D = D / U_D - 1, the repetitions
    N' = U_N + U_N R_N* (1 - exp(-R_N / R_N*))    R_N = N / U_N - 1, where U_N is compute-optimal for U_D

The loss is a law's at N' and D'. The half-lives were fitted to runs of 7 million to 9 billion parameters and up to 500
epochs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.plugins.scaling.law import FLOPS_PER_PARAMETER, FittedRange, Law, SizeAndTokens
from shardwise.plugins.scaling.search import minimum

TOKEN_DECAY = 15.387756
"""R_D*, appendix A."""
PARAMETER_DECAY = 5.309743
"""R_N*, appendix A."""


def effective(amount: float, unique: float, decay: float) -> float:
    """How many unique tokens (or parameters) ``amount`` are worth, of which ``unique`` are unique."""
    if amount <= unique:
        return amount
    return unique * (1 + decay * -math.expm1(-(amount / unique - 1) / decay))


@dataclass(frozen=True)
class DataConstrained:
    """A law on ``unique`` tokens, which are repeated where more are trained on."""

    law: Law
    unique: float

    @property
    def name(self) -> str:
        return self.law.name

    @property
    def source(self) -> str:
        return f"{self.law.source}; repetition: Muennighoff et al. 2023, arXiv:2305.16264"

    @property
    def fitted(self) -> FittedRange | None:
        return self.law.fitted

    def worth(self, parameters: float, tokens: float) -> SizeAndTokens:
        """N' and D'."""
        supported = self.law.parameters_for(min(tokens, self.unique))
        return SizeAndTokens(
            effective(parameters, supported, PARAMETER_DECAY), effective(tokens, self.unique, TOKEN_DECAY)
        )

    def loss(self, parameters: float, tokens: float) -> float:
        worth = self.worth(parameters, tokens)
        return self.law.loss(worth.parameters, worth.tokens)

    merit = loss

    def parameters_for(self, tokens: float) -> float:
        return self.law.parameters_for(effective(tokens, self.unique, TOKEN_DECAY))

    def optimum(self, flops: float) -> SizeAndTokens:
        """The least loss on the line 6 N D = C; there is no closed form."""
        free = self.law.optimum(flops)
        if free.tokens <= self.unique:
            return free

        def on_line(log_parameters: float) -> SizeAndTokens:
            parameters = math.exp(log_parameters)
            return SizeAndTokens(parameters, flops / (FLOPS_PER_PARAMETER * parameters))

        def loss(log_parameters: float) -> float:
            point = on_line(log_parameters)
            return self.loss(point.parameters, point.tokens)

        # Beyond three orders of magnitude from the optimum for fresh tokens nothing is left to gain.
        centre = math.log(free.parameters)
        return on_line(minimum(loss, centre - 7.0, centre + 7.0))
