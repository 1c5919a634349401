"""Where a run stands: its tokens per parameter, the loss to expect, and whether another size would do better."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.core.units import format_count
from shardwise.scaling.law import Law, SizeAndTokens, extrapolation

NEAR = 0.002
"""Loss above the optimum, relative, below which a run counts as compute-optimal."""


@dataclass(frozen=True)
class RunStanding:
    """A run against the best model for the same FLOPs.

    Attributes:
        loss: that the law predicts for the run's end.
        best: the compute-optimal size and tokens for the run's 6 N D.
        best_loss: its loss.
        warning: the law is used far outside of its data; None otherwise.
    """

    run: SizeAndTokens
    loss: float
    best: SizeAndTokens
    best_loss: float
    law: str
    warning: str | None

    @property
    def penalty(self) -> float:
        """Loss that another size would save, in nats per token."""
        return self.loss - self.best_loss

    @property
    def verdict(self) -> str:
        """undertrained (a smaller model on more tokens does better), overtrained, or compute-optimal."""
        if self.penalty <= NEAR * self.best_loss:
            return "compute-optimal"
        return "undertrained" if self.run.parameters > self.best.parameters else "overtrained"

    def sentences(self) -> list[str]:
        """One or two lines for a plan and a report."""
        ratio = f"{self.run.tokens_per_parameter:.3g} tokens per parameter"
        first = f"{ratio}: {self.verdict} by the law {self.law}, which predicts a loss of {self.loss:.3f}"
        if self.verdict != "compute-optimal":
            change = "smaller" if self.verdict == "undertrained" else "larger"
            first += (
                f"; in the same FLOPs a {change} model of {format_count(self.best.parameters)} parameters on"
                f" {format_count(self.best.tokens)} tokens reaches {self.best_loss:.3f}"
            )
        return [first, self.warning] if self.warning else [first]


def standing(law: Law, parameters: float, tokens: float) -> RunStanding:
    """Where ``parameters`` after ``tokens`` stand; both must be positive."""
    run = SizeAndTokens(parameters, tokens)
    best = law.optimum(run.flops)
    losses = law.loss(parameters, tokens), law.loss(best.parameters, best.tokens)
    return RunStanding(run, losses[0], best, losses[1], law.name, extrapolation(law, run))
