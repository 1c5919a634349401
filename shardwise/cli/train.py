"""``shardwise train``: plan, then train exactly that plan, then report.

A command that was started alone runs one process per device of this machine. A command that torchrun or srun
started is one of many ranks (``under_launcher.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import Overrides, RecipeArgument, next_lines, path_option, run_workers
from shardwise.cli.spinner import working
from shardwise.core.errors import RecipeError
from shardwise.jobs.request import measured_cluster, read_request, refuse_plan_only, require_one_node
from shardwise.launch.placement import launched_by, require_processes


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        path_option("folder of the run; resumes when it holds a checkpoint", "DIR"),
    ] = None,
    exact_memory: Annotated[
        bool, typer.Option("--exact-memory", help="measure memory over the whole run (slower on the CPU)")
    ] = False,
) -> None:
    """Plan, then train exactly that plan."""
    if out is None:
        raise RecipeError(
            "--out is missing", where="command line", fix="give the folder of the run: --out DIR"
        )
    wanted, cluster = read_request(recipe, overrides or [])
    refuse_plan_only(cluster)
    if (placement := launched_by()) is None:
        from shardwise.jobs.training import train_in_folder
        from shardwise.launch.launcher import preloaded_run

        require_one_node(cluster)
        cluster = measured_cluster(wanted)  # before the workers start, which would slow it down
        with preloaded_run(cluster.world_size), working() as progress:
            say = progress.stopping(typer.echo)
            if train_in_folder(
                wanted, cluster, out, run_workers, exact_memory=exact_memory, say=say, progress=progress
            ):
                from shardwise.jobs.next_commands import next_commands  # loads torch

                for line in next_lines(next_commands(out)):
                    say(line)
        return
    require_processes(cluster.world_size, placement.world_size)
    from shardwise.cli.under_launcher import train_as_rank  # loads torch

    device = cluster.device.traits.torch_type
    raise typer.Exit(train_as_rank(recipe, overrides or [], out, exact_memory, placement.rank, device))
