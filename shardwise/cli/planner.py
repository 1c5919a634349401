"""``python -m shardwise.cli.planner STEP RECIPE DIR [k=v ...]``: planning in a process of its own.

Ranks that torchrun or srun started run these steps in another process, because planning would show up in the memory
that a rank measures. The steps are ``prepare`` (plan and write the run's folder) and ``advise`` (print the error line
of a run that ran out of memory with a micro-batch of 1).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from shardwise.cli.failure import guarded
from shardwise.cli.terminal_output import keep_writing
from shardwise.core.paths import path_of
from shardwise.hardware.cluster import Cluster
from shardwise.jobs.planning import advised_error
from shardwise.jobs.request import read_request
from shardwise.jobs.training import prepare_training
from shardwise.recipe.sections import Recipe

FINISHED = 100
"""The exit code of ``prepare`` when all steps are done and no rank should train. It is internal."""


def main(step: str, recipe_file: str, folder: str, *overrides: str) -> int:
    """Do one step and return the exit code; an error is one line on standard error."""
    action = PLANNING_STEPS[step]
    return guarded(lambda: action(*read_request(path_of(recipe_file), overrides), path_of(folder)))


def _prepare(recipe: Recipe, cluster: Cluster, folder: Path) -> int:
    planned = prepare_training(recipe, cluster, folder, None, lambda line: print(line, flush=True))
    return FINISHED if planned is None else 0


def _advise(recipe: Recipe, cluster: Cluster, folder: Path) -> int:
    print(advised_error(recipe, cluster, folder).line())
    return 0


PLANNING_STEPS: Mapping[str, Callable[[Recipe, Cluster, Path], int]] = {
    "prepare": _prepare,
    "advise": _advise,
}

if __name__ == "__main__":
    keep_writing()
    step, recipe_file, folder, *overrides = sys.argv[1:]
    # The command that started the ranks, for starts.jsonl.
    sys.argv = ["shardwise", "train", recipe_file, *overrides, "--out", folder]
    sys.exit(main(step, recipe_file, folder, *overrides))
