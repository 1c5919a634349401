"""``shardwise train`` as one of many ranks that torchrun or srun has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shardwise.cli.prepare import FINISHED
from shardwise.core.errors import ResourceError
from shardwise.train.folder import PAGE, PLAN, claim
from shardwise.train.launch import signal_name
from shardwise.train.shortage import written_at


def train_as_rank(
    recipe: Path, overrides: list[str], out: Path, exact_memory: bool, rank: int, device: str
) -> int:
    """Rank 0 plans, everybody trains, rank 0 reports. Returns this rank's exit code.

    The folder must be shared between nodes: the other ranks read the plan from it.
    """
    from shardwise.train.worker import attempt, run_rank

    if rank != 0:
        code = attempt(lambda: run_rank("train", out, exact_memory, device, lambda: 0))
        return 0 if code == FINISHED else code

    def elsewhere(module: str, *flags: str, capture: bool = True) -> subprocess.CompletedProcess[str]:
        # A process of its own: planning must leave no trace in the memory that is measured.
        verb = [sys.executable, "-m", module, *flags, str(recipe), str(out), *overrides]
        return subprocess.run(verb, check=False, text=True, stdout=subprocess.PIPE if capture else None)

    def plan_elsewhere() -> int:
        code = elsewhere("shardwise.cli.prepare", capture=False).returncode
        return code if code >= 0 else _told_of_killing(-code)

    with claim(out):

        def reword(code: int, line: str) -> str:
            """With the nearest plan that fits, where memory ran out for good."""
            if code != ResourceError.exit_code or written_at(out) == before:
                return line
            return elsewhere("shardwise.cli.shortage").stdout.strip() or line

        before = written_at(out)
        code = attempt(lambda: run_rank("train", out, exact_memory, device, plan_elsewhere), reword)
        if code == 0 or (code == FINISHED and not (out / PAGE).exists()):
            if written_at(out) != before:
                _warn_unless_planned(elsewhere("shardwise.cli.shortage", "--catch-up").returncode, out)
            from shardwise.report.run import write_report
            from shardwise.serve.report import record_sample

            record_sample(out)
            write_report(out)
        return 0 if code == FINISHED else code


def _told_of_killing(number: int) -> int:
    """Say what a planner that was killed could not; the exit code."""
    error = ResourceError(
        "planning was killed",
        where="in a process of rank 0's",
        why=f"by {signal_name(number)}",
        fix="free memory on that machine, and run the same command again",
    )
    print(error.line(), file=sys.stderr, flush=True)
    return error.exit_code


def _warn_unless_planned(code: int, out: Path) -> None:
    """On standard output, as every warning of a run: it has trained to its end."""
    if code != 0:
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        why = f"what the run went on with could not be planned ({how})"
        print(f"warning: {out / PLAN} and the report speak of the first micro-batch: {why}", flush=True)
