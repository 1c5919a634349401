"""The search for a budget, with a planner whose seconds, FLOPs and memory are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwise.core.errors import RecipeError, ResourceError
from shardwise.core.plan import Plan, StepEstimate
from shardwise.plugins.scaling.budget import BudgetChoice, BudgetSearch, Limit, six_nd
from shardwise.plugins.scaling.family import family_sizes, sized
from shardwise.plugins.scaling.files import read_law
from shardwise.plugins.scaling.law import ParametricLaw
from shardwise.plugins.scaling.repetition import DataConstrained
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.presets import PRESETS

FAMILY = family_sizes(PRESETS["llama-3-8b"])
TOKENS = 2**22
RATE = 4e17
"""FLOPs per second of a cluster: about a thousand H100."""


class Planner:
    """Plans with 6 N (1 + attention) FLOPs, a utilisation that grows with the size, and a largest size that fits."""

    def __init__(self, template: Plan, largest: float = math.inf) -> None:
        self.template, self.largest = template, largest
        self.asked: list[int] = []

    def flops_per_token(self, size: Dimensions) -> float:
        return 6 * size.parameters * (1 + 500 / size.width)

    def seconds_per_token(self, size: Dimensions) -> float:
        utilisation = 0.5 * size.width / (size.width + 2000)
        return self.flops_per_token(size) / (RATE * utilisation)

    def __call__(self, size: Dimensions, tokens: float) -> Plan:
        self.asked.append(size.parameters)
        step = StepEstimate(
            seconds=TOKENS * self.seconds_per_token(size),
            tokens=TOKENS,
            flops=0,
            traffic_bytes={},
            mfu=0.5,
            split={},
            model_flops=round(TOKENS * self.flops_per_token(size)),
        )
        capacity = self.template.capacity_bytes
        peak = replace(self.template.peak, bytes=capacity * (2 if size.parameters > self.largest else 1))
        return replace(self.template, step=step, peak=peak, parameters=size.parameters)


def search(
    planner: Planner, limit: Limit, law: str = "besiroglu", unique: float | None = None
) -> BudgetSearch:
    judged = read_law(law)
    return BudgetSearch(
        FAMILY, limit, DataConstrained(judged, unique) if unique else judged, planner, 0.4 * RATE
    )


def brute_force(cost: Callable[[Dimensions], float], amount: float, law: str = "besiroglu") -> Dimensions:
    """The best size, with every size planned."""
    return min(FAMILY, key=lambda size: read_law(law).merit(size.parameters, amount / cost(size)))


@pytest.mark.parametrize("law", ["besiroglu", "twenty", "hoffmann-1"])
@pytest.mark.parametrize("kind", ["flops", "seconds"])
def test_the_choice_is_that_of_planning_every_size(kind: str, law: str, plan: Plan) -> None:
    planner = Planner(plan)
    amount = 1e22 if kind == "flops" else 1e22 / RATE
    cost = planner.flops_per_token if kind == "flops" else planner.seconds_per_token
    found = search(planner, Limit(kind, amount), law).best()  # type: ignore[arg-type]
    wanted = brute_force(cost, amount, law)
    assert found.best.parameters == pytest.approx(wanted.parameters, rel=0.3)
    # Utilisation follows the width, which is not monotonic in the size: neighbours differ by 5 % of the tokens.
    lost = read_law(law).merit(found.best.parameters, found.best.tokens)
    lost -= read_law(law).merit(wanted.parameters, amount / cost(wanted))
    assert lost <= (0.001 * found.best.loss if law == "besiroglu" else 0.15)
    assert len(planner.asked) <= 5, "a plan takes seconds"
    assert found.best.planned and getattr(found.best, kind) == pytest.approx(amount, rel=1e-6)


class Uneven(Planner):
    """Less utilisation up to the width 2,560, as 64 H100 have with another strategy."""

    def seconds_per_token(self, size: Dimensions) -> float:
        return self.flops_per_token(size) / (RATE * (0.28 if size.width <= 2560 else 0.4))


@pytest.mark.parametrize("amount", [1e21, 3e21, 1e22])
def test_a_jump_of_the_utilisation_is_not_extrapolated(amount: float, plan: Plan) -> None:
    """Two sizes on both sides of the jump would promise ever faster training to ever larger models."""
    planner = Uneven(plan)
    found = search(planner, Limit("seconds", amount / RATE)).best()
    wanted = brute_force(planner.seconds_per_token, amount / RATE)
    lowest = read_law("besiroglu").loss(wanted.parameters, amount / RATE / planner.seconds_per_token(wanted))
    assert found.best.loss == pytest.approx(lowest, rel=0.005)
    assert max(planner.asked) < 4 * found.best.parameters
    assert len(planner.asked) <= 7


def test_the_flops_of_the_dry_run_stand_next_to_6nd(plan: Plan) -> None:
    planner = Planner(plan)
    found = search(planner, Limit("flops", 1e22)).best()
    size = found.best.dimensions
    assert found.best.flops / six_nd(found.best) == pytest.approx(1 + 500 / size.width)


def test_tokens_choose_the_size_for_which_they_are_optimal(plan: Plan) -> None:
    planner = Planner(plan)
    found = search(planner, Limit("tokens", 1.4e12), "twenty").best()
    assert found.best.tokens == 1.4e12
    assert found.best.parameters == pytest.approx(70e9, rel=0.1)
    assert len(planner.asked) == 1


def test_neighbours_lose(plan: Plan) -> None:
    found = search(Planner(plan), Limit("flops", 1e22)).best()
    smaller = [each for each in found.neighbours if each.parameters < found.best.parameters]
    larger = [each for each in found.neighbours if each.parameters > found.best.parameters]
    assert len(smaller) == len(larger) == 2
    assert smaller[0].parameters == pytest.approx(found.best.parameters / 2, rel=0.15)
    assert larger[-1].parameters == pytest.approx(found.best.parameters * 2, rel=0.15)
    assert smaller[0].loss > smaller[1].loss > found.best.loss - 1e-4
    assert larger[1].loss > larger[0].loss > found.best.loss - 1e-4


@pytest.mark.parametrize("largest", [4e9, 1e9])
def test_a_size_that_does_not_fit_is_not_chosen(largest: float, plan: Plan) -> None:
    planner = Planner(plan, largest)
    found = search(planner, Limit("flops", 1e23)).best()
    wanted = max(size.parameters for size in FAMILY if size.parameters <= largest)
    assert found.best.parameters == wanted
    assert found.refused is not None and found.refused[0].parameters > largest
    assert all(each.parameters <= largest for each in found.neighbours)
    assert len(planner.asked) <= 9


def test_a_cluster_for_no_size_is_refused(plan: Plan) -> None:
    with pytest.raises(ResourceError, match="no size of the family fits"):
        search(Planner(plan, largest=1), Limit("flops", 1e20)).best()


def served(planner: Planner, tokens: float) -> BudgetChoice:
    return search(planner, Limit("flops", 1e22)).best(served=tokens)


def test_serving_moves_the_choice_to_a_smaller_model_of_the_same_loss(plan: Plan) -> None:
    planner = Planner(plan)
    found = served(planner, 1e12)
    assert found.fresh is not None
    assert found.best.parameters < found.fresh.parameters
    assert found.best.loss == pytest.approx(found.fresh.loss, rel=1e-9)
    assert found.best.seconds > found.fresh.seconds

    def all_flops(parameters: int, tokens: float) -> float:
        (size,) = (size for size in FAMILY if size.parameters == parameters)
        return planner.flops_per_token(size) * (tokens + 1e12 / 3)

    assert all_flops(found.best.parameters, found.best.tokens) < all_flops(
        found.fresh.parameters, found.fresh.tokens
    )


class SixN(Planner):
    """Plans with 6 N FLOPs, as the laws count."""

    def flops_per_token(self, size: Dimensions) -> float:
        return 6 * size.parameters


def test_sardanas_example_of_a_served_model(plan: Plan) -> None:
    """Sardana et al. 2024, figure 1: for two trillion served tokens, 7 instead of 13 billion parameters save 17 %
    of all FLOPs, 1.7e22. Their coefficients are Hoffmann's, with alpha 0.336 and beta 0.283."""
    law = ParametricLaw("hoffmann", "", E=1.69, A=406.4, B=410.7, alpha=0.336, beta=0.283)
    ratio = law.beta * law.B / (law.alpha * law.A)
    tokens = (13e9**law.alpha * ratio) ** (1 / law.beta)
    depths = [sized(PRESETS["llama-3-8b"], 4096, layers) for layers in range(10, 80)]
    found = BudgetSearch(depths, Limit("flops", 6 * 13e9 * tokens), law, SixN(plan), RATE).best(served=2e12)
    assert found.fresh is not None
    assert found.fresh.parameters == pytest.approx(13e9, rel=0.02)
    assert found.best.parameters == pytest.approx(7e9, rel=0.02)
    before, after = (
        6 * each.parameters * each.tokens + 2 * each.parameters * 2e12 for each in (found.fresh, found.best)
    )
    assert before - after == pytest.approx(1.7e22, rel=0.02)
    assert 1 - after / before == pytest.approx(0.17, abs=0.01)  # depths are 1.7 % apart


def test_repeated_data_moves_the_choice_to_a_smaller_model(plan: Plan) -> None:
    fresh = search(Planner(plan), Limit("flops", 1e22)).best().best
    scarce = search(Planner(plan), Limit("flops", 1e22), unique=fresh.tokens / 10).best().best
    assert scarce.parameters < fresh.parameters
    assert scarce.loss > fresh.loss
    with pytest.raises(RecipeError, match="exclude each other"):
        search(Planner(plan), Limit("flops", 1e22), unique=1e9).best(served=1e12)
