"""Where a run stands: its tokens per parameter, the loss to expect, and whether another size would do better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.core.units import format_count
from shardwise.plugins.scaling.law import Law, SizeAndTokens, extrapolation

NEAR_OPTIMUM = 0.002
"""Loss above the optimum, relative, below which a run counts as compute-optimal."""

NO_PREDICTION = 3.0
"""Orders of magnitude outside of a law's data beyond which a plan and a page give no loss."""
BYTES = 256
"""Largest vocabulary of bytes."""
LARGE = 7e7
"""Parameters of the smallest model of the published laws, all of which were fitted to text in subwords."""


@dataclass(frozen=True)
class RunStanding:
    """A run against the best model for the same FLOPs.

    Attributes:
        loss: that the law predicts for the run's end.
        best: the compute-optimal size and tokens for the run's 6 N D.
        best_loss: its loss.
        orders: orders of magnitude from the law's data to the run; 0 within it.
        warnings: sentences about the trust that the prediction deserves (``doubts``).
    """

    run: SizeAndTokens
    loss: float
    best: SizeAndTokens
    best_loss: float
    law: str
    orders: float
    warnings: tuple[str, ...]

    @property
    def penalty(self) -> float:
        """Loss that another size would save, in nats per token."""
        return self.loss - self.best_loss

    @property
    def verdict(self) -> str:
        """undertrained (a smaller model on more tokens does better), overtrained, or compute-optimal."""
        if self.penalty <= NEAR_OPTIMUM * self.best_loss:
            return "compute-optimal"
        return "undertrained" if self.run.parameters > self.best.parameters else "overtrained"

    def sentences(self) -> list[str]:
        """One or more sentences for a plan and a report."""
        ratio = f"{self.run.tokens_per_parameter:.3g} tokens per parameter"
        if self.orders > NO_PREDICTION:
            return [f"{ratio}; no prediction, because the law {self.law} is not of such runs", *self.warnings]
        first = f"{ratio}: {self.verdict} by the law {self.law}, which predicts a loss of {self.loss:.3f} at the end"
        if self.verdict != "compute-optimal":
            change = "smaller" if self.verdict == "undertrained" else "larger"
            first += (
                f"; in the same hours, at the same FLOPs per second, a {change} model of"
                f" {format_count(self.best.parameters)} parameters on {format_count(self.best.tokens)} tokens"
                f" reaches {self.best_loss:.3f}"
            )
        return [first, *self.warnings]


def standing(law: Law, parameters: float, tokens: float, vocab: int | None = None) -> RunStanding:
    """Where ``parameters`` after ``tokens`` of a vocabulary stand; both must be positive."""
    run = SizeAndTokens(parameters, tokens)
    best = law.optimum(run.flops)
    orders = 0.0
    if law.fitted is not None:
        orders = max(law.fitted.orders_outside(run).values(), default=0.0)
    loss = law.loss(parameters, tokens)
    best_loss = law.loss(best.parameters, best.tokens)
    return RunStanding(run, loss, best, best_loss, law.name, orders, tuple(doubts(law, run, vocab)))


def doubts(law: Law, point: SizeAndTokens, vocab: int | None = None) -> Iterator[str]:
    """Sentences about the trust that a law's loss deserves: extrapolation, and tokens that are bytes."""
    if far := extrapolation(law, point):
        yield far
    if vocab is not None and vocab <= BYTES and law.fitted is not None and law.fitted.parameters[0] >= LARGE:
        yield (
            f"{law.name} counts tokens of a vocabulary of tens of thousands, so its loss is not that of bytes:"
            " fit a law to your own runs (shardwise fit)"
        )
