"""``shardwise train``: plan, then train exactly that plan, then report.

Started alone it plans, starts one process per device of this machine, and writes the report when they are
done. Started by torchrun or srun it is one of many: local rank 0 of the first node plans in a process of its
own (so that planning leaves no trace in what is measured) and the others wait for the plan.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import Overrides, RecipeArgument, read, refuse_unfit

if TYPE_CHECKING:
    from shardwise.core.cluster import Cluster
    from shardwise.core.recipe import Recipe


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="folder of the run; resumes when it holds a checkpoint")
    ] = None,
    exact_memory: Annotated[
        bool, typer.Option("--exact-memory", help="measure memory over the whole run (slower on the CPU)")
    ] = False,
) -> None:
    """Plan, then train exactly that plan."""
    from shardwise.core.errors import RecipeError
    from shardwise.core.scaling import sentences

    if out is None:
        raise RecipeError(
            "--out is missing", where="command line", fix="give the folder of the run: --out DIR"
        )
    wanted, cluster = read(recipe, overrides)
    from shardwise.train.placement import launched_by

    if (placement := launched_by()) is not None:
        from shardwise.cli.joined import train_as_rank

        device = "cpu" if cluster.device.kind == "cpu" else "cuda"
        raise typer.Exit(train_as_rank(recipe, overrides or [], out, exact_memory, placement.rank, device))
    from shardwise.cli.shortage import advising, plan_remembering
    from shardwise.train.data import check_data
    from shardwise.train.folder import PAGE, claim, prepare
    from shardwise.train.start import check_start, finished

    with claim(out):
        found = check_data(wanted)
        check_start(wanted, out)
        if done := finished(wanted, out):
            typer.echo(done)
            if not (out / PAGE).exists():
                _report(wanted, cluster, out)
            return
        plan, reasons = plan_remembering(wanted, cluster, out)
        refuse_unfit(plan)
        prepare(out, wanted, plan)
        _announce(plan.line, out)
        for sentence in [*found, *reasons, *sentences(wanted)]:
            typer.echo(sentence)
        from shardwise.train.launch import launch

        flags = ["--exact-memory"] if exact_memory else []
        advise = advising(wanted, cluster, out)
        code = launch(plan.world_size, ["train", str(out), *flags], out / "logs", _terminal(), advise)
        if code == 0:
            _report(wanted, cluster, out)
    raise typer.Exit(code)


def _report(recipe: Recipe, cluster: Cluster, out: Path) -> None:
    """What is made of a run that has trained to its end."""
    from shardwise.cli.shortage import catch_up
    from shardwise.report.run import write_report
    from shardwise.serve.report import record_sample

    catch_up(recipe, cluster, out)
    record_sample(out)
    typer.echo(f"report: {write_report(out)}")


def _terminal() -> dict[str, str]:
    """Rank 0 writes through the launcher's pipe: tell it what is at the other end."""
    if not sys.stdout.isatty():
        return {}
    return {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}


def _announce(line: str, out: Path) -> None:
    typer.echo(f"{line}  →  {out}")
