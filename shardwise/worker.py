"""One rank of a job: ``python -m shardwise.worker VERB FOLDER [--exact-memory]``, or a user's function on a rank.

The launcher, torchrun or srun starts one worker per device of the plan. A worker reads the resolved recipe and the plan
from the run folder and trains exactly that plan. It never plans.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise import __version__
from shardwise.checkpoint.run_folder import holder, job_unless_refused, read_job
from shardwise.core import heartbeat
from shardwise.core.errors import RankError, RecipeError, ShardwiseError
from shardwise.core.plan import Plan
from shardwise.core.quiet_torchao import quiet_torchao
from shardwise.core.user_objects import GIVEN, resolve
from shardwise.hardware.profiles import kind_named
from shardwise.launch.failure import has_log, rank_failure
from shardwise.launch.preload import WAIT, become
from shardwise.launch.process import World, join
from shardwise.launch.waiting import DUMP_SIGNAL
from shardwise.trainer.faults.oom_record import resource_error
from shardwise.trainer.loop import Job, Trainer
from shardwise.verifier.plain_runs import run_plain
from shardwise.verifier.verify import exactly, rounds_more, run_reference, run_verification

Prepare = Callable[[], int]


class PlanFailed(Exception):
    """Rank 0 could not plan, or had nothing to plan. It has printed the reason; ``exit_code`` is its exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def run_rank(
    verb: str, folder: Path, exact_memory: bool, device: str | None = None, prepare: Prepare | None = None
) -> None:
    """Run one rank of ``verb``: train, verify, the plain processes of verify (reference), or a function (call).

    Args:
        device: "cpu" or "cuda"; needed with ``prepare``.
        prepare: called on every rank after the rendezvous, with rank 0's claim of the folder. Rank 0's writes recipe
            and plan into the folder; its exit code counts. None when the folder has them already.

    Raises:
        PlanFailed: ``prepare`` returned another code than 0; raised on all ranks.
        RecipeError: the nodes have different versions or do not share the folder; raised on all ranks.
    """
    if verb == "reference":
        _run_references(folder)
        return
    if verb == "call":
        resolve(f"{GIVEN}:call", "spawn")()
        return
    if prepare is None:
        device = kind_named(read_job(folder)[1].device).torch_type
    with join(device) as world:
        code = 0 if prepare is None else _prepared_on_rank_0(prepare, folder, world)
        if code == 0:
            _run_verb(verb, folder, world, exact_memory)
    if code != 0:
        raise PlanFailed(code)


def _run_references(folder: Path) -> None:
    """Train what ``verify`` compares with."""
    recipe, plan = read_job(folder)
    strategy = plan.strategy
    with join(kind_named(plan.device).torch_type) as world:
        if rounds_more(recipe, strategy):
            run_plain(recipe, strategy, folder, world.device)
            recipe, strategy, _ = exactly(recipe, strategy)
        run_reference(recipe, strategy, folder)


def _run_verb(verb: str, folder: Path, world: World, exact_memory: bool) -> None:
    recipe, plan = read_job(folder)
    _require(world, plan)
    if verb == "train":
        with job_unless_refused(folder, world.rank == 0):
            trainer = Trainer(Job(recipe, plan, folder, world.device, exact_memory))
        trainer.train()
    else:
        run_verification(recipe, plan.strategy, folder, world.device)


def _prepared_on_rank_0(prepare: Prepare, folder: Path, world: World) -> int:
    """The exit code of rank 0's ``prepare``, on all ranks."""
    _require_alike(folder, world)
    codes = [prepare()]
    dist.broadcast_object_list(codes)
    return codes[0]


def _require_alike(folder: Path, world: World) -> None:
    """Raise RecipeError unless all ranks have rank 0's versions and see the folder that it has claimed. Collective.

    A node may have a folder of its own at the same path, even with the job of an earlier run.
    """
    versions = (
        f"shardwise {__version__}, torch {torch.__version__.partition('+')[0]}"  # without the build: +cu128
    )
    seen = [(socket.gethostname(), holder(folder), versions)] * world.world_size
    dist.all_gather_object(seen, seen[0])
    first, claimed, expected = seen[0]
    if differs := next(((host, found) for host, _, found in seen if found != expected), None):
        why = f"{expected} on {first}, {differs[1]} on {differs[0]}"
        raise RecipeError("the nodes have different versions", why=why, fix="install the same on all")
    if other := next((host for host, claim, _ in seen if claim != claimed), None):
        raise RecipeError(
            "the nodes do not share the run's folder",
            where=str(folder),
            why=f"{other} does not see what {first} wrote there",
            fix="give an --out on a disk that all nodes share",
        )


def _require(world: World, plan: Plan) -> None:
    if world.world_size != plan.world_size:
        raise RankError(
            f"{world.world_size} processes were started",
            where="the job's launcher",
            why=f"the plan is for {plan.world_size}",
            fix="start as many processes as nodes x devices_per_node",
        )


def attempt(action: Callable[[], None]) -> int:
    """Run ``action``. Returns 0, or the exit code of its error after reporting it. Raises unknown errors."""
    try:
        action()
    except PlanFailed as failed:
        return failed.exit_code
    except ShardwiseError as error:
        return report(error)
    except Exception as error:
        if (known := resource_error(error)) is None:
            raise
        return report(known)
    return 0


def report(error: ShardwiseError) -> int:
    """Report the error that ends this rank, in the exception's handler: to the launcher, and to standard error.

    Returns the exit code. The log has every trace; without one, an error that nothing else has caused has none.
    """
    heartbeat.own.tell(error.line())
    handled = sys.exception()
    says_all = isinstance(handled, ShardwiseError) and handled.__cause__ is None
    with contextlib.suppress(OSError):  # the log's disk may be full
        if has_log() or not says_all:
            traceback.print_exc()
        print(error.line(), file=sys.stderr, flush=True)
    return error.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's exit code."""
    heartbeat.attach()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    parser = argparse.ArgumentParser(prog="python -m shardwise.worker")
    parser.add_argument("verb", choices=("train", "verify", "reference", "call"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--exact-memory", action="store_true")
    given = parser.parse_args(arguments)
    try:
        with quiet_torchao():
            code = attempt(lambda: run_rank(given.verb, given.folder, given.exact_memory))
    except Exception as error:
        code = report(rank_failure(error, int(os.environ.get("RANK", "0"))))
    heartbeat.own.end()
    return code


if __name__ == "__main__":
    arguments: Sequence[str] | None = sys.argv[1:]
    if sys.argv[1:2] == [WAIT]:
        arguments = become(int(sys.argv[2]))
    code = 0 if arguments is None else main(arguments)
    # Skips the interpreter's shutdown. After a failure it would wait for the peers' collectives; after a success
    # torch's threads sometimes abort the process while its globals are destroyed.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
