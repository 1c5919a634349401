"""``python -m shardwise.cli.prepare RECIPE DIR [k=v ...]``: plan and write the run's folder, without training."""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise.cli.common import read, refuse_unfit
from shardwise.cli.shortage import plan_remembering
from shardwise.core.errors import ShardwiseError
from shardwise.core.scaling import sentences
from shardwise.train.data import check_data
from shardwise.train.folder import prepare
from shardwise.train.start import check_start


def main(recipe_file: str, folder: str, *overrides: str) -> int:
    """Returns the exit code; the error's line goes to stderr."""
    try:
        recipe, cluster = read(Path(recipe_file), list(overrides))
        found = check_data(recipe)
        check_start(recipe, Path(folder))
        plan, reasons = plan_remembering(recipe, cluster, Path(folder))
        refuse_unfit(plan)
        prepare(Path(folder), recipe, plan)
    except ShardwiseError as error:
        print(error.line(), file=sys.stderr)
        return error.exit_code
    print("\n".join([f"{plan.line}  →  {folder}", *found, *reasons, *sentences(recipe)]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
