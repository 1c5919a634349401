"""Inference-aware optimum: the least FLOPs of training and serving together, at the loss of a training budget.

Sardana et al. 2024, Beyond Chinchilla-Optimal, arXiv 2401.00448, equation 3: minimise 6 N D + 2 N T over N and D, where
L(N, D) is fixed and T tokens are served, prompts included. A model that serves much is smaller, and is trained longer.
"""

from __future__ import annotations

import math

from shardwise.scaling.law import ParametricLaw, SizeAndTokens
from shardwise.scaling.search import minimum

SERVING_FLOPS = 2
"""FLOPs for each parameter and served token: the forward pass."""


def serving_optimum(law: ParametricLaw, flops: float, served: float) -> SizeAndTokens:
    """N and D with the loss that ``flops`` of training reach, where ``served`` tokens are served afterwards.

    Its own training takes more than ``flops``; training and serving together take least.
    """
    trained = law.optimum(flops)
    target = law.loss(trained.parameters, trained.tokens)

    def total(log_parameters: float) -> float:
        parameters = math.exp(log_parameters)
        tokens = law.tokens_for(parameters, target)
        return SizeAndTokens(parameters, tokens).flops + SERVING_FLOPS * parameters * served

    # Below this size no number of tokens reaches the loss.
    least = (law.A / (target - law.E)) ** (1 / law.alpha)
    parameters = math.exp(minimum(total, math.log(least * (1 + 1e-9)), math.log(trained.parameters)))
    return SizeAndTokens(parameters, law.tokens_for(parameters, target))
