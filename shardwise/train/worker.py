"""One rank of a job: ``python -m shardwise.train.worker VERB FOLDER [--exact-memory]``.

The launcher (or torchrun, or srun) starts as many of these as the plan has devices. A worker reads the resolved
recipe and the plan from the run folder and trains exactly that plan; it never plans.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from shardwise.core.errors import RankError, ResourceError, ShardwiseError
from shardwise.core.plan import Plan
from shardwise.train.folder import read_job
from shardwise.train.launch import World, join
from shardwise.train.loop import Job, Trainer
from shardwise.train.verify import run_reference, run_strategy


def run_rank(verb: str, folder: Path, exact_memory: bool) -> None:
    """Do this rank's part of ``verb``: train, verify or reference."""
    recipe, plan = read_job(folder)
    if verb == "reference":
        run_reference(recipe, plan.strategy, folder)
        return
    with join(plan.device) as world:
        _require(world, plan)
        if verb == "train":
            Trainer(Job(recipe, plan, folder, world.device, exact_memory)).train()
        else:
            run_strategy(recipe, plan.strategy, folder, world.device)


def _require(world: World, plan: Plan) -> None:
    if world.world_size != plan.world_size:
        raise RankError(
            f"{world.world_size} processes were started",
            where="the job's launcher",
            why=f"the plan is for {plan.world_size}",
            fix="start as many processes as nodes x devices_per_node",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's exit code: 0, or that of the error whose one line went to stderr."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.train.worker")
    parser.add_argument("verb", choices=("train", "verify", "reference"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--exact-memory", action="store_true")
    given = parser.parse_args(arguments)
    try:
        run_rank(given.verb, given.folder, given.exact_memory)
    except ShardwiseError as error:
        traceback.print_exc()
        print(error.line(), file=sys.stderr, flush=True)
        return error.exit_code
    except torch.OutOfMemoryError as error:
        traceback.print_exc()
        refused = ResourceError(
            "out of memory", where="the device", why=str(error).split(".")[0], fix="plan with less, or shard more"
        )
        print(refused.line(), file=sys.stderr, flush=True)
        return refused.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
