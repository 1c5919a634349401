"""What ``train`` does about runs that ran out of memory: ``python -m shardwise.cli.shortage RECIPE DIR [k=v ...]``.

Workers never plan, so what a shortage means for plans is settled here, before and after training. A folder that
remembers one is planned with the micro-batch that survived; a run that met one is planned again when it has ended, so
that its plan and its report speak of what ran; one that had nothing left to halve is told the nearest plan that fits.
As a module it prints the latter, or with --catch-up puts the folder right, for ranks that torchrun or srun started:
planning takes memory and leaves traces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from shardwise.cli.common import make_plan, read
from shardwise.cli.failure import guarded
from shardwise.core.cluster import Cluster
from shardwise.core.errors import ResourceError
from shardwise.core.plan import Plan
from shardwise.core.recipe import Recipe
from shardwise.core.strategy import Strategy
from shardwise.train.folder import correct, read_job
from shardwise.train.shortage import remembered, written_at


def plan_remembering(
    recipe: Recipe, cluster: Cluster, folder: Path, plan: Plan | None = None
) -> tuple[Plan, list[str]]:
    """``plan``, or the recipe's; and what to say where the folder has a reason for a smaller micro-batch.

    Raises as planning does.
    """
    plan = plan or make_plan(recipe, cluster)
    known = remembered(folder)
    if known is None or not known.speaks_of(plan.strategy, plan.world_size):
        return plan, []
    return make_plan(_pinned(recipe, plan.strategy, known.smallest), cluster), [known.sentence()]


def catch_up(recipe: Recipe, cluster: Cluster, folder: Path) -> None:
    """Where a run went on with a smaller micro-batch than its folder's plan says, put the plan right."""
    plan, known = read_job(folder)[1], remembered(folder)
    if known is not None and known.speaks_of(plan.strategy, plan.world_size):
        correct(folder, make_plan(_pinned(recipe, plan.strategy, known.smallest), cluster))


def _pinned(recipe: Recipe, strategy: Strategy, size: int) -> Recipe:
    return recipe.model_copy(update={"strategy": {**strategy.values, "micro_batch_size": size}})


def advising(recipe: Recipe, cluster: Cluster, folder: Path) -> Callable[[int, str], str]:
    """For ``launch``: the line of a failed run, with the nearest plan that fits where memory ran out for good."""
    before = written_at(folder)

    def reword(code: int, line: str) -> str:
        new = code == ResourceError.exit_code and written_at(folder) != before
        return (advice(recipe, cluster, folder) or line) if new else line

    return reword


def advice(recipe: Recipe, cluster: Cluster, folder: Path) -> str:
    """The error's line; "" when the folder remembers nothing that ended a run."""
    from shardwise.model.blueprint import blueprint_of
    from shardwise.plan.nearest import nearest_in_words
    from shardwise.train.survival import exhausted

    short = remembered(folder)
    if short is None or not short.exhausted:
        return ""
    strategy = Strategy(short.strategy)
    fix = nearest_in_words(recipe, blueprint_of(recipe), cluster, strategy, short.held_bytes)
    return exhausted(short, fix).line()


def main(recipe_file: str, folder: str, *overrides: str) -> int:
    """Prints the line, or puts the folder right; returns the exit code, and the line of an error goes to stderr."""
    if recipe_file == "--catch-up":
        recipe_file, folder, *rest = (folder, *overrides)
        return guarded(lambda: _caught_up(Path(recipe_file), Path(folder), rest))
    return guarded(lambda: _advised(Path(recipe_file), Path(folder), list(overrides)))


def _caught_up(recipe_file: Path, folder: Path, overrides: list[str]) -> int:
    catch_up(*read(recipe_file, overrides), folder)
    return 0


def _advised(recipe_file: Path, folder: Path, overrides: list[str]) -> int:
    print(advice(*read(recipe_file, overrides), folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
