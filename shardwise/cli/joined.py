"""``shardwise train`` as one of many ranks that torchrun or srun has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shardwise.train.folder import claim


def train_as_rank(
    recipe: Path, overrides: list[str], out: Path, exact_memory: bool, rank: int, device: str
) -> int:
    """Rank 0 plans, everybody trains, rank 0 reports. Returns this rank's exit code.

    The folder must be shared between nodes: the other ranks read the plan from it.
    """
    from shardwise.train.worker import attempt, run_rank

    if rank != 0:
        return attempt(lambda: run_rank("train", out, exact_memory, device, lambda: 0))

    def plan_elsewhere() -> int:
        # A process of its own: planning must leave no trace in the memory that is measured.
        verb = [sys.executable, "-m", "shardwise.cli.prepare", str(recipe), str(out), *overrides]
        return subprocess.run(verb, check=False).returncode

    with claim(out):
        code = attempt(lambda: run_rank("train", out, exact_memory, device, plan_elsewhere))
        if code == 0:
            from shardwise.report.run import write_report
            from shardwise.train.sample import record_sample

            record_sample(out)
            write_report(out)
        return code
