"""``python -m shardwise.cli.prepare RECIPE DIR [k=v ...]``: plan and write the run's folder, without training."""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise.cli.common import read, refuse_unfit
from shardwise.cli.failure import guarded
from shardwise.cli.output import keep_writing
from shardwise.cli.shortage import plan_remembering
from shardwise.core.scaling import sentences
from shardwise.train.data import check_data
from shardwise.train.folder import prepare
from shardwise.train.start import check_start, finished

FINISHED = 100
"""The exit code where all steps are done: the folder is left as it is, and nobody is to train. Not of the contract."""


def main(recipe_file: str, folder: str, *overrides: str) -> int:
    """Returns the exit code; the error's line goes to stderr."""
    return guarded(lambda: _prepared(Path(recipe_file), Path(folder), list(overrides)))


def _prepared(recipe_file: Path, folder: Path, overrides: list[str]) -> int:
    recipe, cluster = read(recipe_file, overrides)
    found = check_data(recipe)
    check_start(recipe, folder)
    if done := finished(recipe, folder):
        print(done, flush=True)
        return FINISHED
    plan, reasons = plan_remembering(recipe, cluster, folder)
    refuse_unfit(plan)
    prepare(folder, recipe, plan)
    print("\n".join([f"{plan.line}  →  {folder}", *found, *reasons, *sentences(recipe)]), flush=True)
    return 0


if __name__ == "__main__":
    keep_writing()
    sys.exit(main(*sys.argv[1:]))
