"""``shardwise train`` as one of many ranks that torchrun or srun has started."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shardwise.checkpoint.run_folder import claim, lacks_page
from shardwise.cli.planner import FINISHED
from shardwise.core import heartbeat
from shardwise.core.attempts import Attempts
from shardwise.core.errors import OutOfMemory, Preempted, ResourceError
from shardwise.jobs.training import finish
from shardwise.launch.failure import rank_failure
from shardwise.launch.ranks import dying_with_parent
from shardwise.launch.verdict import signal_name
from shardwise.trainer.faults.oom_record import read_record, written_at


def train_as_rank(
    recipe: Path, overrides: list[str], out: Path, exact_memory: bool, rank: int, device: str
) -> int:
    """Rank 0 plans, all ranks train, rank 0 reports.

    Args:
        out: the folder of the run, shared between nodes: the other ranks read the plan from it.
        rank: the global rank of this process.
        device: cpu or cuda.

    Returns:
        This rank's exit code. After an OOM it is 75 on all ranks if the same command goes on with a smaller
        micro-batch; then torchrun or srun may start it again.
    """
    # While it waits for its peers in C++, no handler of Python's runs. The ranks handle the signal once they train.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if rank != 0:
        return _exit_code(_train_as_rank(out, rank, exact_memory, device, lambda: 0), out)

    def elsewhere(step: str, *, capture: bool) -> subprocess.CompletedProcess[str]:
        # In another process, because planning would show up in the measured memory.
        verb = [sys.executable, "-m", "shardwise.cli.planner", step, str(recipe), str(out), *overrides]
        # It dies with this rank: left behind, it would write into a folder that the next start has claimed.
        stdout, dying = subprocess.PIPE if capture else None, dying_with_parent()
        return subprocess.run(verb, check=False, text=True, stdout=stdout, preexec_fn=dying)

    attempts = Attempts(out)

    def plan_elsewhere() -> int:
        code = elsewhere("prepare", capture=False).returncode
        if code == 0:
            attempts.began()
        return code if code >= 0 else _report_killed(-code)

    with claim(out):
        code = _train_as_rank(out, rank, exact_memory, device, plan_elsewhere)
        attempts.ended("" if code == 0 else heartbeat.own.read().line or "another rank ran out of memory")
        if code == 0 or (code == FINISHED and lacks_page(out)):
            finish(out)
        exit_code = _exit_code(code, out)
        if code == OutOfMemory.exit_code and exit_code == ResourceError.exit_code:
            print(elsewhere("advise", capture=True).stdout.strip(), file=sys.stderr, flush=True)
        return exit_code


def _train_as_rank(out: Path, rank: int, exact_memory: bool, device: str, prepare: Callable[[], int]) -> int:
    """This rank's exit code: that of OutOfMemory also when the OOM of another rank broke this rank's collectives."""
    from shardwise.launch.alarm import leave_it_to_the_alarm
    from shardwise.launch.first_failure import tell, told
    from shardwise.worker import attempt, report, run_rank

    before: int | None = None

    def prepared() -> int:
        # Not earlier: NFS caches for half a minute that a folder is absent, and rank 0 may not have made it yet.
        nonlocal before
        before = written_at(out)
        return prepare()

    try:
        code = attempt(lambda: run_rank("train", out, exact_memory, device, prepared))
    except Exception as error:
        leave_it_to_the_alarm()
        if before is not None and written_at(out) != before:
            return OutOfMemory.exit_code
        if (failure := told()) is not None:
            code, line = failure
            heartbeat.own.tell(line)
            print(line, file=sys.stderr, flush=True)
            return code
        code = report(rank_failure(error, rank))
    finally:
        heartbeat.own.watch(0.0)
    tell(rank, code, heartbeat.own.read().line)
    return code


def _exit_code(code: int, out: Path) -> int:
    """The exit code for torchrun or srun."""
    if code != OutOfMemory.exit_code:
        return 0 if code == FINISHED else code
    record = read_record(out)
    return ResourceError.exit_code if record is not None and record.is_final else Preempted.exit_code


def _report_killed(number: int) -> int:
    """Print the error of a planner that a signal killed; returns the exit code."""
    error = ResourceError(
        "planning was killed",
        where="in a process of rank 0's",
        why=f"by {signal_name(number)}",
        fix="free memory on that machine, and run the same command again",
    )
    print(error.line(), file=sys.stderr, flush=True)
    return error.exit_code
