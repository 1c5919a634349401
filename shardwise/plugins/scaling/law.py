"""Scaling laws: the loss of N parameters after D tokens, and the N and D that are best for C FLOPs.

A parametric law is L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, equation 2). An
allocation says only how C is divided: by a power of C that fits a table, or by a number of tokens per parameter. Its
loss is that of a parametric law. Both count all parameters, embeddings included, and C = 6 N D.

``files.py`` reads laws: published ones and the ones that ``shardwise fit`` writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

FLOPS_PER_PARAMETER = 6
"""Training FLOPs for each parameter and token: 2 forward, 4 backward (Kaplan et al. 2020, arXiv 2001.08361)."""

MOST_ORDERS = 2.0
"""Orders of magnitude outside of a law's data beyond which its prediction is marked."""


@dataclass(frozen=True)
class SizeAndTokens:
    """A model size, and the tokens to train it on."""

    parameters: float
    tokens: float

    @property
    def flops(self) -> float:
        """6 N D."""
        return FLOPS_PER_PARAMETER * self.parameters * self.tokens

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters


@dataclass(frozen=True)
class FittedRange:
    """The runs that a law was fitted to: lowest and highest value of each quantity."""

    parameters: tuple[float, float]
    tokens: tuple[float, float]
    flops: tuple[float, float]

    def orders_outside(self, point: SizeAndTokens) -> dict[str, float]:
        """Orders of magnitude from the range to a point, by quantity; those within the range are left out."""
        orders = {}
        for quantity in ("parameters", "tokens", "flops"):
            value = getattr(point, quantity)
            low, high = getattr(self, quantity)
            if not low <= value <= high:
                nearest = low if value < low else high
                orders[quantity] = abs(math.log10(value / nearest))
        return orders


class Law(Protocol):
    """What a budget and a report need of a law."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def fitted(self) -> FittedRange | None: ...

    def loss(self, parameters: float, tokens: float) -> float:
        """Predicted loss in nats per token, of the law's own data and tokenizer."""

    def optimum(self, flops: float) -> SizeAndTokens:
        """The best model size and number of tokens for C = 6 N D."""

    def parameters_for(self, tokens: float) -> float:
        """The model size for which ``tokens`` are compute-optimal."""

    def merit(self, parameters: float, tokens: float) -> float:
        """What a choice of N and D minimises where FLOPs are not 6 N D: the loss, or the distance to the rule."""


@dataclass(frozen=True)
class ParametricLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats per token.

    Attributes:
        intervals: 95 % intervals of coefficients, by name.
    """

    name: str
    source: str
    E: float
    A: float
    B: float
    alpha: float
    beta: float
    fitted: FittedRange | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def loss(self, parameters: float, tokens: float) -> float:
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    merit = loss

    @property
    def exponent(self) -> float:
        """a in N = G (C/6)^a; D has 1 - a (Hoffmann et al., equation 4)."""
        return self.beta / (self.alpha + self.beta)

    def optimum(self, flops: float) -> SizeAndTokens:
        """Closed form (Hoffmann et al., equation 4): G = (alpha A / beta B)^(1 / (alpha + beta))."""
        log_scale = self._log_gains / (self.alpha + self.beta)  # log G
        product = flops / FLOPS_PER_PARAMETER  # N D
        parameters = _bounded_exp(log_scale + self.exponent * math.log(product))
        return SizeAndTokens(parameters, product / parameters)

    def parameters_for(self, tokens: float) -> float:
        """Where a further parameter and a further token gain equally: alpha A N^-alpha = beta B D^-beta."""
        return _bounded_exp((self._log_gains + self.beta * math.log(tokens)) / self.alpha)

    @property
    def _log_gains(self) -> float:
        """Logarithm of alpha A / beta B."""
        return math.log(self.alpha) + math.log(self.A) - math.log(self.beta) - math.log(self.B)

    def tokens_for(self, parameters: float, loss: float) -> float:
        """Tokens after which N parameters reach ``loss``; infinity if they never do."""
        token_term = loss - self.E - self.A * parameters**-self.alpha  # B / D^beta
        if token_term <= 0:
            return math.inf
        return _bounded_exp((math.log(self.B) - math.log(token_term)) / self.beta)

    def flops_for(self, loss: float) -> float:
        """FLOPs with which the best model reaches ``loss``; infinity for the irreducible loss E and below."""
        # At the optimum B D^-beta is alpha / beta of A N^-alpha.
        parameter_term = (loss - self.E) / (1 + self.alpha / self.beta)
        if parameter_term <= 0:
            return math.inf
        parameters = _bounded_exp((math.log(self.A) - math.log(parameter_term)) / self.alpha)
        return SizeAndTokens(parameters, self.tokens_for(parameters, loss)).flops


@dataclass(frozen=True)
class PowerLaw:
    """N = scale × C^exponent and D = C / 6 N; the loss is another law's.

    Attributes:
        rows: the table that was fitted: parameters, FLOPs, tokens.
    """

    name: str
    source: str
    scale: float
    exponent: float
    losses: ParametricLaw
    fitted: FittedRange | None = None
    rows: tuple[tuple[float, float, float], ...] = ()

    def loss(self, parameters: float, tokens: float) -> float:
        return self.losses.loss(parameters, tokens)

    def optimum(self, flops: float) -> SizeAndTokens:
        parameters = self.scale * flops**self.exponent
        return SizeAndTokens(parameters, flops / (FLOPS_PER_PARAMETER * parameters))

    def parameters_for(self, tokens: float) -> float:
        # N = scale (6 N D)^a, solved for N.
        of_tokens = self.exponent * math.log(FLOPS_PER_PARAMETER * tokens)
        return _bounded_exp((math.log(self.scale) + of_tokens) / (1 - self.exponent))

    def merit(self, parameters: float, tokens: float) -> float:
        optimal = self.optimum(SizeAndTokens(parameters, tokens).flops).parameters
        return abs(math.log(parameters / optimal))


def _bounded_exp(logarithm: float) -> float:
    """The exponential, between 1e-130 and 1e130: small exponents of a law ask for sizes that no float holds."""
    return math.exp(min(max(logarithm, -300.0), 300.0))


def log_log_fit(x: list[float], y: list[float]) -> tuple[float, float]:
    """Scale and exponent of y = scale × x^exponent, by least squares on logarithms."""
    xs, ys = [math.log(value) for value in x], [math.log(value) for value in y]
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    covariance = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(xs, ys, strict=True))
    slope = covariance / math.fsum((a - mean_x) ** 2 for a in xs)
    return math.exp(mean_y - slope * mean_x), slope


def extrapolation(law: Law, point: SizeAndTokens) -> str | None:
    """A sentence if the law is used far outside of its data; None within two orders of magnitude of it."""
    outside = law.fitted.orders_outside(point) if law.fitted is not None else {}
    far = {quantity: orders for quantity, orders in outside.items() if orders > MOST_ORDERS}
    if not far:
        return None
    quantity, orders = max(far.items(), key=lambda pair: pair[1])
    word = {"flops": "FLOPs"}.get(quantity, quantity)
    return f"extrapolated: the {word} are {orders:.1f} orders of magnitude outside of the runs that {law.name} fits"
