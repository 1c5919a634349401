"""Planning a recipe, refusing a plan that does not fit, and planning again after out of memory (OOM).

Workers never plan. A folder that records an OOM is planned with a smaller micro-batch (``plan_remembering``), and so is
a run that starts again after an OOM (``plan_after_oom``). The error of a run that cannot halve its micro-batch names
the nearest plan that fits (``advised_error``).

torch is loaded by the functions that plan, and not by importing this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint.manifest import committed
from shardwise.core.collector import paused
from shardwise.core.errors import ResourceError
from shardwise.core.memory_snapshot import snapshot_bytes
from shardwise.core.plan import Plan
from shardwise.core.progress import Progress, silent
from shardwise.core.strategy import Strategy
from shardwise.core.units import format_bytes
from shardwise.hardware.allocator_options import VARIABLES, options_in
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.profiles import kind_named
from shardwise.jobs.plan_cache import cached_plan
from shardwise.recipe.sections import Recipe
from shardwise.trainer.faults.oom_record import read_record

if TYPE_CHECKING:
    from shardwise.core.fit_advice import FitAdvice


def make_plan(
    recipe: Recipe,
    cluster: Cluster,
    *,
    compare: bool = False,
    progress: Progress = silent,
    answered: Callable[[Plan], None] = lambda plan: None,
) -> Plan:
    """Plan a recipe; loads torch, unless the same was planned before.

    Args:
        compare: also estimate the neighbours of the chosen strategy, which takes a third of the time.
        progress: called with a line now and then.
        answered: called with a new plan before its neighbours are estimated.

    Raises:
        RecipeError: the pinned strategy breaks a rule.
    """

    def make() -> Plan:
        with paused():
            from shardwise.model.open import blueprint_of
            from shardwise.planner.search import plan_for

        model = blueprint_of(recipe)
        return plan_for(recipe, model, cluster, compare=compare, progress=progress, answered=answered)

    return cached_plan(recipe, cluster, compare, make)


def planned_snapshot(recipe: Recipe, cluster: Cluster, plan: Plan) -> bytes:
    """The planned step of the rank that needs most memory, for PyTorch's memory viewer: one more dry run."""
    from shardwise.dryrun.run import dry_run
    from shardwise.model.open import blueprint_of

    run = dry_run(
        recipe, blueprint_of(recipe), plan.strategy, cluster, rank=plan.peak.rank, with_snapshot=True
    )
    assert run.snapshot is not None
    return snapshot_bytes(run.snapshot)


def refuse_unfit(plan: Plan, remedies: FitAdvice | None = None) -> None:
    """Raise ResourceError when the plan needs more memory than there is; the error names the remedy."""
    if not plan.fits:
        raise ResourceError(
            "does not fit",
            where=plan.line,
            why=" and ".join(_too_much(plan)),
            fix=_allocator_hint(plan) + _way_out(remedies),
        )


def _too_much(plan: Plan) -> Iterator[str]:
    """A phrase for each memory that is too small: the device's, the host's."""
    if plan.peak.bytes > plan.capacity_bytes - plan.reserve_bytes:
        reserve = f" with a reserve of {format_bytes(plan.reserve_bytes)}" if plan.reserve_bytes else ""
        lost = format_bytes(plan.ledger.fragmentation)
        yield (
            f"rank {plan.peak.rank} needs {format_bytes(plan.peak.bytes)} of"
            f" {format_bytes(plan.capacity_bytes)}{reserve}, most in the {plan.peak.phase} phase"
            + (f", {lost} of it lost to fragmentation" if _only_fragmentation(plan) else "")
        )
    if plan.host.bytes > plan.host.capacity_bytes:
        yield (
            f"a rank needs {format_bytes(plan.host.bytes)} of {format_bytes(plan.host.capacity_bytes)} of host memory"
        )


def _only_fragmentation(plan: Plan) -> bool:
    """Whether only fragmentation makes the plan too large for the device."""
    room = plan.capacity_bytes - plan.reserve_bytes
    return plan.peak.bytes - plan.ledger.fragmentation <= room < plan.peak.bytes


def _allocator_hint(plan: Plan) -> str:
    """Suggest expandable segments when only fragmentation makes the plan too large; else ""."""
    if not _only_fragmentation(plan) or options_in(kind_named(plan.device).name).expandable_segments:
        return ""
    return f"set {VARIABLES[0]}=expandable_segments:True, or "


def _way_out(remedies: FitAdvice | None) -> str:
    """What to do so that the recipe fits."""
    if remedies is None:
        return "see what fits: shardwise plan RECIPE --explain"
    if remedies.advised is None:
        return "add devices, shorten data.sequence_length, or unpin strategy settings"
    return remedies.advised.in_words


# ---- runs that ran out of memory --------------------------------------------------------------------------


def plan_remembering(
    recipe: Recipe, cluster: Cluster, folder: Path, plan: Plan | None = None, progress: Progress = silent
) -> tuple[Plan, list[str]]:
    """The plan, with the smaller micro-batch that the folder's ``oom.json`` asks for.

    Args:
        plan: the plan to adapt; None makes the recipe's.

    Returns:
        The plan, and the sentences that say why its micro-batch is smaller.
    """
    plan = plan or make_plan(recipe, cluster, progress=progress)
    record = read_record(folder)
    if record is None or not record.applies_to(plan.strategy, plan.world_size):
        return plan, []
    return _with_micro_batch(recipe, cluster, plan.strategy, record.smallest), [record.reason()]


def plan_after_oom(recipe: Recipe, cluster: Cluster, folder: Path, plan: Plan) -> tuple[Plan, str]:
    """The plan with which to start again after an OOM of ``plan``, and the sentence that says so.

    Raises:
        ResourceError: the micro-batch was 1 already; the error names the nearest plan that fits.
    """
    record = read_record(folder)
    if record is None or not record.applies_to(plan.strategy, plan.world_size):
        raise advised_error(recipe, cluster, folder)
    plan = _with_micro_batch(recipe, cluster, plan.strategy, record.smallest)
    saved = committed(folder / "checkpoints")
    return plan, (
        f"out of memory on rank {record.rank} in step {record.step}: micro_batch_size is now {record.smallest},"
        f" accumulated {plan.micro_batches} times; going on from {saved[0].name if saved else 'the start'}"
    )


def _with_micro_batch(recipe: Recipe, cluster: Cluster, strategy: Strategy, size: int) -> Plan:
    pinned = {**strategy.values, "micro_batch_size": size}
    return make_plan(recipe.model_copy(update={"strategy": pinned}), cluster)


def advised_error(recipe: Recipe, cluster: Cluster, folder: Path) -> ResourceError:
    """The error of a run that ran out of memory with a micro-batch of 1; it names the nearest plan that fits."""
    from shardwise.model.open import blueprint_of
    from shardwise.planner.oom_advice import nearest_in_words

    record = read_record(folder)
    if record is None:
        return ResourceError("out of memory", where=str(folder), why="its oom.json cannot be read")
    strategy = Strategy(record.strategy)
    allocated_bytes = record.allocated_bytes
    return record.final_error(
        nearest_in_words(recipe, blueprint_of(recipe), cluster, strategy, allocated_bytes)
    )
