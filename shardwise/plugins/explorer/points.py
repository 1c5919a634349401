"""What a plan says of a point: a recipe that pins every strategy setting, on one cluster.

Its figures are those of ``plan_for`` of that recipe, which then has one strategy to predict in full. All devices of a
group share its dry runs (dryrun/sharing.py): the second costs milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.core.collector import frozen
from shardwise.core.errors import RecipeError
from shardwise.core.errors import one_line as printable
from shardwise.core.ledger import Ledger
from shardwise.core.plan import PlannedPeak, StepEstimate
from shardwise.core.strategy import Strategy
from shardwise.dryrun.sharing import sharing_dry_runs
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.model.blueprint import Blueprint
from shardwise.planner.predictor import Predictor
from shardwise.planner.verdicts import UNKNOWN
from shardwise.plugins.explorer.controls import Workload, Workloads
from shardwise.plugins.explorer.grid import PointGroup
from shardwise.recipe.load import dump_recipe
from shardwise.recipe.sections import Recipe
from shardwise.technique import broken_rules, layout_of, refuse_unsupported, strategy_line

REFUSED = "refused"
"""Verdict on a point that cannot run: it breaks a rule."""


@dataclass(frozen=True)
class PointFigures:
    """Predicted figures of a point."""

    peak: PlannedPeak
    ledger: Ledger
    step: StepEstimate
    host_bytes: int


@dataclass(frozen=True)
class PlannedPoint:
    """One point.

    Attributes:
        verdict: fits | tight | does not fit | refused | could not be predicted.
        why: it is refused, does not fit, or is tight.
        recipe: as YAML; "" of a refused point.
        line: the strategy in one line.
        capacity_bytes, reserve_bytes: of the device; 0 of a refused point.
        figures: None where nothing was predicted.
    """

    workload: Workload
    strategy: Strategy
    verdict: str
    why: str
    recipe: str = ""
    line: str = ""
    capacity_bytes: int = 0
    reserve_bytes: int = 0
    figures: PointFigures | None = None


def pinned_recipe(workloads: Workloads, workload: Workload, strategy: Strategy) -> Recipe:
    """The recipe of a point. Raises RecipeError."""
    recipe = workloads.recipe_of(workload)
    return recipe.model_copy(update={"strategy": dict(strategy.values)})


def planned_points(workloads: Workloads, devices: Sequence[str], group: PointGroup) -> list[PlannedPoint]:
    """The points of a group, one for each device."""
    with frozen(), sharing_dry_runs():
        return list(_points(workloads, devices, group))


def _points(workloads: Workloads, devices: Sequence[str], group: PointGroup) -> Iterator[PlannedPoint]:
    possible: list[tuple[Workload, Recipe, Cluster]] = []
    for device in devices:
        workload = replace(group.workload, device=device)
        try:
            recipe = pinned_recipe(workloads, workload, group.strategy)
            cluster = cluster_of(recipe.cluster)
            _refuse(recipe, cluster, group.strategy)
        except RecipeError as error:
            yield PlannedPoint(workload, group.strategy, REFUSED, _why_refused(error))
        else:
            possible.append((workload, recipe, cluster))
    if not possible:
        return
    blueprint = workloads.blueprint_of(possible[0][0])
    largest = max(possible, key=lambda candidate: candidate[2].capacity_bytes)
    hopeless = not Predictor(largest[1], blueprint, largest[2]).may_fit(group.strategy)
    for workload, recipe, cluster in possible:
        yield _point(workload, recipe, cluster, blueprint, group.strategy, hopeless)


def _refuse(recipe: Recipe, cluster: Cluster, strategy: Strategy) -> None:
    """Raise RecipeError where a strategy cannot run."""
    for violation in broken_rules(strategy, cluster.world_size, recipe):
        key = violation.rule.key
        raise RecipeError(f"{key} cannot be {strategy.values[key]}", why=violation.rule.reason)
    refuse_unsupported(strategy.values, cluster.device, lambda key: key)


def _why_refused(error: RecipeError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what


def _point(
    workload: Workload,
    recipe: Recipe,
    cluster: Cluster,
    blueprint: Blueprint,
    strategy: Strategy,
    hopeless: bool,
) -> PlannedPoint:
    """One point; of a ``hopeless`` one, only why it does not fit."""
    predictor = Predictor(recipe, blueprint, cluster)
    figures = None
    try:
        if not hopeless:
            prediction = predictor.confirm(strategy)
            peak = prediction.peak
            planned = PlannedPeak(peak.bytes, prediction.rank, peak.phase, peak.where)
            figures = PointFigures(planned, peak.ledger, prediction.step, prediction.host.total)
        else:
            predictor.may_fit(strategy)
    except RecipeError as error:  # the model refuses, or a package is missing
        return PlannedPoint(workload, strategy, REFUSED, _why_refused(error))
    except Exception as error:  # of the model or a kernel, in a strategy that no plan has chosen
        return PlannedPoint(workload, strategy, UNKNOWN, printable(f"{type(error).__name__}: {error}"))
    candidate = predictor.candidates[strategy]
    return PlannedPoint(
        workload,
        strategy,
        candidate.verdict,
        candidate.reason,
        dump_recipe(recipe),
        strategy_line(strategy, layout_of(strategy, cluster.world_size), recipe.batch_size),
        cluster.capacity_bytes,
        predictor.verdicts.reserve_bytes,
        figures,
    )
