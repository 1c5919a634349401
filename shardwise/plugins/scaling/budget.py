"""From a budget to a model: the size of a family, and the tokens, with the lowest predicted loss.

The budget is FLOPs, hours of a cluster, or tokens. FLOPs and seconds of a token are those of a planned step, so
attention counts, embeddings do not, and a size pays for its own strategy. A plan takes seconds, so few sizes are
planned, and the others are interpolated as multiples of 6 N. The size that is best by these figures is planned next,
until the best one has been planned. A size that does not fit bounds the search from above.

For a model that serves T tokens, prompts included, the FLOPs of training and serving are least at the loss of the
training budget, 6 N D + 2 N T (Sardana et al. 2024, Beyond Chinchilla-Optimal, arXiv 2401.00448, equation 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.core.errors import RecipeError, ResourceError
from shardwise.core.plan import Plan
from shardwise.plugins.scaling.law import FLOPS_PER_PARAMETER, Law, ParametricLaw, PowerLaw, SizeAndTokens
from shardwise.plugins.scaling.repetition import DataConstrained
from shardwise.recipe.dimensions import Dimensions

_NEIGHBOUR_FACTOR = 2.0
"""Neighbours are about this much smaller and larger, and its square root."""
_PROBED = 3.0
"""Sizes are planned on both sides of the choice, this much smaller and larger: another strategy may be faster there."""

Planned = Callable[[Dimensions, float], Plan]
"""Plans the recipe with the model of this size, trained on about so many tokens."""


@dataclass(frozen=True)
class Limit:
    """The budget: FLOPs of the model, as planned; seconds of the cluster; or tokens."""

    kind: Literal["flops", "seconds", "tokens"]
    amount: float


@dataclass(frozen=True)
class SizeInBudget:
    """A size, and what the budget gives it.

    Attributes:
        tokens: that the budget pays for.
        flops: model FLOPs of the training, as a planned step counts them.
        seconds: of the training.
        planned: whether the planner was asked for this size; interpolated otherwise.
    """

    dimensions: Dimensions
    tokens: float
    flops: float
    seconds: float
    loss: float
    planned: bool

    @property
    def parameters(self) -> int:
        return self.dimensions.parameters


@dataclass(frozen=True)
class BudgetChoice:
    """The chosen size with its plan, and smaller and larger sizes in the same budget.

    Attributes:
        limit: hours, FLOPs or tokens, of which the sizes have the same.
        refused: the smallest size that does not fit, and why; None if memory does not limit the search.
        fresh: the choice without serving or repeated data; None where neither was asked for.
    """

    limit: str
    best: SizeInBudget
    plan: Plan
    neighbours: tuple[SizeInBudget, ...]
    tried: tuple[SizeInBudget, ...]
    refused: tuple[Dimensions, str] | None
    fresh: SizeInBudget | None = None


class BudgetSearch:
    """The search over a family for one budget and one law."""

    def __init__(
        self, family: Sequence[Dimensions], limit: Limit, law: Law, planned: Planned, rate: float
    ) -> None:
        """Args:
        rate: FLOPs per second that the cluster is assumed to reach until a size has been planned.
        """
        self._family = family
        self._limit = limit
        self._law = law
        self._planner = planned
        self._rate = rate
        self._plans: dict[int, Plan] = {}  # by index in the family, of sizes that fit
        self._too_large = len(family)  # the smallest index known not to fit
        self._refusal: str | None = None

    def best(self, served: float = 0.0) -> BudgetChoice:
        """The size with the lowest loss; for served tokens, the cheapest size with that loss.

        Raises:
            ResourceError: no size of the family fits.
        """
        chosen = self._settled(self._best_index)
        if not served:
            return self._result(chosen, self._tokens, None)
        at_first = self._in_budget(chosen, self._tokens(chosen))
        law = _require_parametric(self._law)
        target = law.loss(at_first.parameters, at_first.tokens)

        def tokens(index: int) -> float:
            return law.tokens_for(self._family[index].parameters, target)

        def cost(index: int) -> float:
            """FLOPs of training and serving; the forward pass is a third of those of training."""
            return self._flops_per_token(index) * (tokens(index) + served / 3)

        # A model larger than the best for training alone costs more to train and to serve.
        serving = self._settled(lambda: min(range(chosen + 1), key=cost))
        return self._result(serving, tokens, at_first)

    def _settled(self, choose: Callable[[], int]) -> int:
        """The choice, once the planner has confirmed it: each plan moves the figures, and so may move the choice."""
        while True:
            index = choose()
            if index in self._plans:
                unplanned = self._unplanned_next_to(index)
                if unplanned is None:
                    return index
                index = unplanned
            largest = max(self._plans, default=-1)
            # Between the largest size that fits and the smallest that does not, nothing is known: bisect.
            if self._refusal is not None and index > largest:
                index = (largest + self._too_large) // 2
            self._ask(index)

    def _unplanned_next_to(self, index: int) -> int | None:
        """A smaller or a larger size to plan, so that the figures around the choice are not extrapolated."""
        if self._limit.kind == "tokens":
            return None
        size = self._family[index].parameters
        smallest, largest = min(self._plans), max(self._plans)
        if self._family[smallest].parameters * _NEIGHBOUR_FACTOR > size:
            below = min(self._nearest(size / _PROBED), index - 1)
            if 0 <= below < smallest:
                return below
        if self._family[largest].parameters < size * _NEIGHBOUR_FACTOR:
            above = min(max(self._nearest(size * _PROBED), index + 1), self._too_large - 1)
            if above > largest:
                return above
        return None

    def _nearest(self, parameters: float) -> int:
        """The index of the size nearest to a number of parameters."""
        return min(
            range(len(self._family)),
            key=lambda index: abs(math.log(self._family[index].parameters / parameters)),
        )

    def _ask(self, index: int) -> None:
        try:
            plan = self._planner(self._family[index], self._tokens(index))
        except RecipeError as error:
            self._refuse(index, error.what)
            return
        if plan.fits:
            self._plans[index] = plan
        else:
            self._refuse(index, f"{plan.line} does not fit")

    def _refuse(self, index: int, why: str) -> None:
        self._too_large = index
        self._refusal = why
        if index == 0:
            raise ResourceError("no size of the family fits", where="shardwise budget", why=why)

    def _best_index(self) -> int:
        indices = range(self._too_large)
        if self._limit.kind == "tokens":
            optimum = math.log(self._law.parameters_for(self._limit.amount))
            return min(indices, key=lambda index: abs(math.log(self._family[index].parameters) - optimum))
        return min(
            indices, key=lambda index: self._law.merit(self._family[index].parameters, self._tokens(index))
        )

    def _tokens(self, index: int) -> float:
        """Tokens that the budget pays for."""
        if self._limit.kind == "tokens":
            return self._limit.amount
        if self._limit.kind == "flops":
            return self._limit.amount / self._flops_per_token(index)
        return self._limit.amount / self._seconds_per_token(index)

    def _flops_per_token(self, index: int) -> float:
        """Model FLOPs; 6 N where no size has been planned."""
        return self._scaled(index, lambda plan: plan.step.model_flops / plan.step.tokens, 1.0)

    def _seconds_per_token(self, index: int) -> float:
        return self._scaled(index, lambda plan: plan.step.seconds / plan.step.tokens, 1 / self._rate)

    def _scaled(self, index: int, figure: Callable[[Plan], float], otherwise: float) -> float:
        """A figure of a token: 6 N times a factor, on logarithms interpolated between planned sizes.

        Outside of them the factor is that of the nearest planned size: a trend would go on to any size.
        """
        known = sorted(self._plans)
        base = FLOPS_PER_PARAMETER * self._family[index].parameters
        if not known:
            return base * otherwise

        def at(planned_index: int) -> tuple[float, float]:
            size = self._family[planned_index].parameters
            return math.log(size), math.log(figure(self._plans[planned_index]) / (FLOPS_PER_PARAMETER * size))

        x = math.log(self._family[index].parameters)
        below = max((planned_index for planned_index in known if planned_index <= index), default=known[0])
        above = min((planned_index for planned_index in known if planned_index >= index), default=known[-1])
        (x0, y0), (x1, y1) = at(below), at(above)
        share = 0.0 if x0 == x1 else (x - x0) / (x1 - x0)
        return base * math.exp(y0 + share * (y1 - y0))

    def _in_budget(self, index: int, tokens: float) -> SizeInBudget:
        dimensions = self._family[index]
        return SizeInBudget(
            dimensions,
            tokens,
            tokens * self._flops_per_token(index),
            tokens * self._seconds_per_token(index),
            self._law.loss(dimensions.parameters, tokens),
            index in self._plans,
        )

    def _result(
        self, chosen: int, tokens: Callable[[int], float], fresh: SizeInBudget | None
    ) -> BudgetChoice:
        size = self._family[chosen].parameters
        near = {
            self._nearest(factor * size)
            for factor in (
                1 / _NEIGHBOUR_FACTOR,
                _NEIGHBOUR_FACTOR**-0.5,
                _NEIGHBOUR_FACTOR**0.5,
                _NEIGHBOUR_FACTOR,
            )
        }
        refused = None
        if self._refusal is not None:
            refused = self._family[self._too_large], self._refusal
        usable = sorted(index for index in near - {chosen} if index < self._too_large)
        # With serving, a smaller size may never reach the loss: its tokens are infinite, and it is left out below.
        words = {"seconds": "hours", "flops": "FLOPs", "tokens": "tokens"}
        return BudgetChoice(
            words[self._limit.kind],
            self._in_budget(chosen, tokens(chosen)),
            self._plans[chosen],
            tuple(self._in_budget(index, tokens(index)) for index in usable if math.isfinite(tokens(index))),
            tuple(self._in_budget(index, tokens(index)) for index in sorted(self._plans)),
            refused,
            fresh,
        )


def _require_parametric(law: Law) -> ParametricLaw:
    """The law of the loss. Raises RecipeError where repeated tokens change it."""
    if isinstance(law, DataConstrained):
        why = "the loss that serving must keep is of fresh tokens"
        raise RecipeError(
            "--serve-tokens and --unique-tokens exclude each other", where="command line", why=why
        )
    if isinstance(law, PowerLaw):
        return law.losses
    assert isinstance(law, ParametricLaw)
    return law


def six_nd(size: SizeInBudget) -> float:
    """6 N D, the estimate of the laws, next to which ``flops`` stands."""
    return SizeAndTokens(size.parameters, size.tokens).flops
