"""``shardwise train`` as one of many ranks that torchrun or srun has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shardwise.core.errors import ResourceError
from shardwise.train.folder import claim
from shardwise.train.shortage import written_at


def train_as_rank(
    recipe: Path, overrides: list[str], out: Path, exact_memory: bool, rank: int, device: str
) -> int:
    """Rank 0 plans, everybody trains, rank 0 reports. Returns this rank's exit code.

    The folder must be shared between nodes: the other ranks read the plan from it.
    """
    from shardwise.train.worker import attempt, run_rank

    if rank != 0:
        return attempt(lambda: run_rank("train", out, exact_memory, device, lambda: 0))

    def elsewhere(module: str, *flags: str, capture: bool = True) -> subprocess.CompletedProcess[str]:
        # A process of its own: planning must leave no trace in the memory that is measured.
        verb = [sys.executable, "-m", module, *flags, str(recipe), str(out), *overrides]
        return subprocess.run(verb, check=False, text=True, stdout=subprocess.PIPE if capture else None)

    def plan_elsewhere() -> int:
        return elsewhere("shardwise.cli.prepare", capture=False).returncode

    with claim(out):

        def reword(code: int, line: str) -> str:
            """With the nearest plan that fits, where memory ran out for good."""
            if code != ResourceError.exit_code or written_at(out) == before:
                return line
            return elsewhere("shardwise.cli.shortage").stdout.strip() or line

        before = written_at(out)
        code = attempt(lambda: run_rank("train", out, exact_memory, device, plan_elsewhere), reword)
        if code == 0:
            if written_at(out) != before:
                elsewhere("shardwise.cli.shortage", "--catch-up")
            from shardwise.report.run import write_report
            from shardwise.serve.report import record_sample

            record_sample(out)
            write_report(out)
        return code
