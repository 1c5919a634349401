"""One rank of a job: ``python -m shardwise.train.worker VERB FOLDER [--exact-memory]``.

The launcher (or torchrun, or srun) starts as many of these as the plan has devices. A worker reads the resolved
recipe and the plan from the run folder and trains exactly that plan; it never plans.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from shardwise.core.errors import RankError, ShardwiseError
from shardwise.core.plan import Plan
from shardwise.train.folder import read_job
from shardwise.train.loop import Job, Trainer
from shardwise.train.process import World, join
from shardwise.train.shortage import resource_error
from shardwise.train.verify import run_reference, run_strategy

Prepare = Callable[[], int]


class PlanFailed(Exception):
    """Rank 0 could not plan, or had nothing to plan; it has said why. ``exit_code`` is what it said it with."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def run_rank(
    verb: str, folder: Path, exact_memory: bool, device: str | None = None, prepare: Prepare | None = None
) -> None:
    """Do this rank's part of ``verb``: train, verify or reference.

    ``prepare`` writes recipe and plan into the folder and returns an exit code; it is called on rank 0 once
    all ranks have met on their ``device``s (cpu or cuda). With any code but 0 nobody goes on, and all raise PlanFailed.
    Without it recipe and plan are in the folder already.
    """
    if verb == "reference":
        recipe, plan = read_job(folder)
        run_reference(recipe, plan.strategy, folder)
        return
    if prepare is None:
        device = "cpu" if read_job(folder)[1].device == "cpu" else "cuda"
    with join(device) as world:
        code = 0 if prepare is None else _prepared_on_rank_0(prepare, world)
        if code == 0:
            _run(verb, folder, world, exact_memory)
    if code != 0:
        raise PlanFailed(code)


def _run(verb: str, folder: Path, world: World, exact_memory: bool) -> None:
    recipe, plan = read_job(folder)
    _require(world, plan)
    if verb == "train":
        Trainer(Job(recipe, plan, folder, world.device, exact_memory)).train()
    else:
        run_strategy(recipe, plan.strategy, folder, world.device)


def _prepared_on_rank_0(prepare: Prepare, world: World) -> int:
    """The exit code, on all ranks."""
    codes = [prepare() if world.rank == 0 else 0]
    dist.broadcast_object_list(codes)
    return codes[0]


def _require(world: World, plan: Plan) -> None:
    if world.world_size != plan.world_size:
        raise RankError(
            f"{world.world_size} processes were started",
            where="the job's launcher",
            why=f"the plan is for {plan.world_size}",
            fix="start as many processes as nodes x devices_per_node",
        )


def attempt(action: Callable[[], None], reword: Callable[[int, str], str] | None = None) -> int:
    """Run; the exit code is 0, or that of the error whose one line goes to stderr, which ``reword`` may change."""
    try:
        action()
    except PlanFailed as failed:
        return failed.exit_code
    except ShardwiseError as error:
        return _failed(error, reword)
    except Exception as error:
        if (short := resource_error(error)) is None:
            raise
        return _failed(short, reword)
    return 0


def _failed(error: ShardwiseError, reword: Callable[[int, str], str] | None) -> int:
    traceback.print_exc()
    code, line = error.exit_code, error.line()
    print(line if reword is None else reword(code, line), file=sys.stderr, flush=True)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.train.worker")
    parser.add_argument("verb", choices=("train", "verify", "reference"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--exact-memory", action="store_true")
    given = parser.parse_args(arguments)
    return attempt(lambda: run_rank(given.verb, given.folder, given.exact_memory))


if __name__ == "__main__":
    code = main()
    # Without the interpreter's tear-down: after a failure the other ranks are in a collective with this one, and
    # after a success torch's threads now and then abort the process when its globals are destroyed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
