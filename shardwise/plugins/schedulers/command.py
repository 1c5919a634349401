"""``shardwise launch``: the file with which a scheduler runs ``shardwise train`` on all nodes, and its submission."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import Overrides, RecipeArgument, path_option
from shardwise.core.errors import RecipeError, ResourceError
from shardwise.core.paths import path_of
from shardwise.jobs.request import read_request, refuse_plan_only
from shardwise.plugins.schedulers import kubernetes, ray, skypilot, slurm
from shardwise.plugins.schedulers.job import ClusterJob
from shardwise.recipe.sections import Recipe

SCHEDULERS = {"slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot, "ray": ray}
ENDINGS = {"slurm": "sbatch", "kubernetes": "k8s.yaml", "skypilot": "sky.yaml", "ray": "ray.py"}


class Scheduler(StrEnum):
    """The schedulers."""

    slurm = "slurm"
    kubernetes = "kubernetes"
    skypilot = "skypilot"
    ray = "ray"


def command(
    scheduler: Annotated[
        Scheduler, typer.Argument(help="the scheduler", metavar="slurm|kubernetes|skypilot|ray")
    ],
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[
        str | None, typer.Option(help="folder of the run, which all nodes share", metavar="DIR")
    ] = None,
    file: Annotated[Path | None, path_option("the file to write")] = None,
    submit: Annotated[
        bool, typer.Option("--submit", help="let the scheduler check and start the file")
    ] = False,
    time: Annotated[str | None, typer.Option(help="time limit of Slurm", metavar="HH:MM:SS")] = None,
    image: Annotated[str | None, typer.Option(help="container image", metavar="IMAGE")] = None,
    partition: Annotated[str | None, typer.Option(help="partition of Slurm", metavar="NAME")] = None,
    account: Annotated[str | None, typer.Option(help="account of Slurm", metavar="NAME")] = None,
    shared: Annotated[
        str, typer.Option(help="where the shared folder is mounted", metavar="DIR")
    ] = "/shared",
    volume: Annotated[
        str,
        typer.Option(
            help="the volume that is mounted there: a claim of Kubernetes, a bucket of SkyPilot",
            metavar="NAME",
        ),
    ] = "shared",
) -> None:
    """Write a job file for slurm, kubernetes, skypilot or ray: nodes, ranks, rendezvous, restarts after 75.

    Nodes and devices are those of the recipe's cluster.
    """
    wanted, cluster = read_request(recipe, overrides or [])
    refuse_plan_only(cluster)
    job = ClusterJob(
        name=(name := _job_name(recipe.stem)),
        recipe=str(recipe.absolute()),
        folder=str(Path.cwd()),
        recipe_text=recipe.read_text(encoding="utf-8"),
        overrides=tuple(overrides or ()),
        out=_shared_out(out, f"{shared}/runs/{name}"),
        nodes=cluster.nodes,
        devices=cluster.devices_per_node,
        device=None if cluster.device.traits.is_host else cluster.device.name,
        time=_checked_time(time),
        image=image,
        partition=partition,
        account=account,
        volume=volume,
        shared=shared,
    )
    path = file or Path(f"{name}.{ENDINGS[scheduler.value]}")
    if path.resolve() == recipe.resolve():
        raise RecipeError("that is the recipe", where=f"--file {path}", fix="give another name")
    from shardwise.core.atomic_file import write_whole

    module = SCHEDULERS[scheduler.value]
    write_whole(path, module.job_file(job).encode("utf-8"))
    typer.echo(f"{path}: {_extent(wanted, job)}, in {job.out}")
    _submit_or_name(module.SUBMIT, path, submit)


def _extent(recipe: Recipe, job: ClusterJob) -> str:
    """How long the run is, and on how many ranks."""
    length = f"{recipe.epochs:g} epochs" if recipe.epochs else f"{recipe.steps} steps"
    nodes = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
    ranks = "1 rank" if job.devices == 1 else f"{job.devices} ranks"
    return f"{length} on {nodes} of {ranks}"


def _submit_or_name(commands: Sequence[Sequence[str]], path: Path, submit: bool) -> None:
    """Run the scheduler's commands on the file, or name them."""
    for words in ([*command, str(path)] for command in commands):
        if not submit:
            typer.echo("next: " + " ".join(words))
        elif (answer := _run_scheduler(words)) and tuple(words[:-1]) == tuple(commands[-1]):
            typer.echo(answer)


def _job_name(stem: str) -> str:
    """A name that Kubernetes, Slurm and clouds accept."""
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].rstrip("-") or "run"


def _checked_time(text: str | None) -> str | None:
    """Raises RecipeError for a text that Slurm would not read as hours, minutes and seconds."""
    if text is not None and not re.fullmatch(r"(\d+-)?\d{1,2}:\d\d:\d\d", text):
        raise RecipeError(f"{text!r} is no time", where="--time", fix="write HH:MM:SS or D-HH:MM:SS")
    return text


def _shared_out(out: str | None, default: str) -> str:
    out = out and str(path_of(out))
    if out is not None and not out.startswith("/"):
        why = "nodes start in different folders"
        fix = f"give the whole path, such as {default}"
        raise RecipeError(f"{out!r} is a relative path", where="--out", why=why, fix=fix)
    return out or default


def _run_scheduler(words: list[str]) -> str:
    """What the scheduler's command printed. Raises ResourceError."""
    if shutil.which(words[0]) is None:
        fix = f"run it where {words[0]} is installed, or without --submit"
        raise ResourceError(f"there is no {words[0]} here", where="--submit", fix=fix)
    done = subprocess.run(words, check=False, text=True, capture_output=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        why = said[-1] if said else f"exit code {done.returncode}"
        raise ResourceError(
            "the job is refused", where=" ".join(words), why=why, fix="edit the recipe or the file"
        )
    return done.stdout.strip()
