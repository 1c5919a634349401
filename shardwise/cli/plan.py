"""``shardwise plan``: choose or check a strategy and print what it costs. Needs no accelerator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, cast

import typer

from shardwise.cli.common import AsJson, Overrides, path_option
from shardwise.cli.export import Dtype
from shardwise.cli.plan_versus import PlanCommand, recipes
from shardwise.cli.spinner import Working, planning
from shardwise.core.answer import Answer, DeviceTry
from shardwise.core.errors import RecipeError
from shardwise.core.fit_advice import FitAdvice
from shardwise.core.plan import Plan
from shardwise.core.plugins import plugin, require_plugin
from shardwise.hardware.cluster import Cluster
from shardwise.jobs.request import measured_cluster, read_request
from shardwise.recipe.installed import recipe_file
from shardwise.recipe.sections import Recipe


class Objective(StrEnum):
    """What ``--for`` makes small: values of plan.objective, or the number of devices."""

    seconds = "seconds"
    memory = "memory"
    devices = "devices"


ForOption = Annotated[
    Objective | None,
    typer.Option(
        "--for",
        help="make small: seconds of a step, or memory of a device (plan.objective), or the number of devices",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(help="preset, folder or Hub id of the model, instead of the file's", metavar="MODEL"),
]
WorldOption = Annotated[
    str | None,
    typer.Option(help="devices, instead of the file's: 8, or 8xH100-80GB", metavar="N|CLUSTER"),
]
WithinOption = Annotated[
    float | None,
    typer.Option(help="with --for devices: hours that the recipe's steps may take", metavar="HOURS", min=0),
]


RecipeOrFile = Annotated[
    Path,
    typer.Argument(
        help="the recipe, a YAML file, or another trainer's file (see from); with --serve also the folder of a"
        " run or of a model",
        parser=recipe_file,
        metavar="RECIPE",
    ),
]
ExplainOption = Annotated[
    bool, typer.Option("--explain", help="show which remedies fit, from more sharding to LoRA, and why")
]
FullOption = Annotated[
    bool, typer.Option("--full", help="also show alternatives, traffic, reasons and sources")
]
SnapshotOption = Annotated[
    Path | None,
    path_option("write the planned step for PyTorch's memory viewer (memory_viz)"),
]
LimitsOption = Annotated[
    bool,
    typer.Option(
        "--limits",
        help="show the largest micro-batch, sequence and depth and the fewest devices that fit at this strategy",
    ),
]
VersusOption = Annotated[
    list[str] | None,
    typer.Option(
        "--vs",
        help="compare with the recipe and these overrides, or with another recipe; may be repeated",
        metavar="KEY=VALUE...|RECIPE",
    ),
]

ServeOption = Annotated[
    bool, typer.Option("--serve", help="count the memory of serving the model, not of training it")
]

COMMAND = PlanCommand


@dataclass(frozen=True)
class _Options:
    """Options of the plan and of its output.

    Attributes:
        name: of the recipe.
        fewest: devices, `within` hours where these are given.
    """

    name: str
    fewest: bool
    within: float | None
    as_json: bool
    top: int | None
    explain: bool
    limits: bool
    full: bool
    html: Path | None
    snapshot: Path | None


def command(
    recipe: RecipeOrFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
    top: Annotated[int | None, typer.Option(help="show N candidates", min=1)] = None,
    explain: ExplainOption = False,
    limits: LimitsOption = False,
    full: FullOption = False,
    html: Annotated[Path | None, path_option("write the plan as one HTML page")] = None,
    snapshot: SnapshotOption = None,
    objective: ForOption = None,
    within: WithinOption = None,
    serve: ServeOption = False,
    context: Annotated[
        int | None, typer.Option(help="with --serve: tokens of a request; default: the model's limit", min=2)
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(help="with --serve: tokens of its prompt; default: all but one", min=1)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="with --serve: requests in one batch; default: 8", min=1)
    ] = None,
    precision: Annotated[
        Dtype | None, typer.Option(help="with --serve: compute dtype: fp32, bf16 or fp16; default: fp32")
    ] = None,
    model: ModelOption = None,
    world: WorldOption = None,
    versus: VersusOption = None,
) -> None:
    """Choose the strategy, or check the pinned one: hours and cost, memory at the peak, time, the best alternatives.

    A plan that does not fit is explained without --explain. --full adds alternatives, reasons and sources. --vs takes
    all overrides that follow it. With --serve, the memory of answering requests is counted: weights as they are stored,
    key-value cache, activations. A configuration of DeepSpeed, Accelerate, Trainer, TRL, LLaMA-Factory, Axolotl, LitGPT
    or torchtitan is planned as the recipe that shardwise from makes of it.
    """
    fewest = objective is Objective.devices
    alone = {"--top": top, "--explain": explain, "--limits": limits, "--full": full, "--html": html}
    alone |= {"--snapshot": snapshot}
    training = {"--for": objective, "--within": within, "--model": model, "--world": world}
    serving = {"--context": context, "--prompt": prompt, "--batch": batch, "--precision": precision}
    if serve:
        _refuse({**alone, **training, "--vs": versus or None}, "not with --serve", "leave --serve out")
        sizes = ((precision or Dtype.fp32).value, context, prompt, batch or 8)
        _serving().show(recipe, overrides or [], sizes, as_json)
        return
    _refuse(serving, "only with --serve", "shardwise plan MODEL --serve")
    read = partial(_read_recipe, recipe, _objective_of(objective, within), model, world)
    if versus:
        _refuse(
            {**alone, "--for devices": fewest},
            "not with --vs",
            "plan each recipe alone",
        )
        _show_versus(list(recipes(recipe, overrides or (), versus, read)), as_json)
        return
    options = _Options(recipe.stem, fewest, within, as_json, top, explain, limits, full, html, snapshot)
    _show_plan(read(recipe, overrides or ()), options)


def _refuse(options: Mapping[str, object], why: str, fix: str) -> None:
    """Refuse options of another output, which would be ignored."""
    if given := [option for option, value in options.items() if value is not None and value is not False]:
        raise RecipeError(f"{', '.join(given)} {why}", where="command line", fix=fix)


def _objective_of(objective: Objective | None, within: float | None) -> list[str]:
    """The override of --for; none for the fewest devices, which are searched around the planner."""
    if objective is Objective.devices:
        return []
    if within is not None:
        fix = "--for devices --within HOURS"
        raise RecipeError("--within needs --for devices", where="command line", fix=fix)
    return [] if objective is None else [f"plan.objective={objective.value}"]


def _serving() -> ModuleType:
    return require_plugin("serve.commands.plan", "--serve")


def _read_recipe(
    named: Path,
    objectives: Sequence[str],
    model: str | None,
    world: str | None,
    path: Path,
    overrides: Sequence[str],
) -> Recipe:
    """A recipe, or the one that another trainer's file becomes.

    Args:
        named: the first recipe of the command line, which --model and --world are for, as for other trainers' files.
    """
    changes = [*objectives, *overrides]
    if importers := _importers_of(path):
        imported, sentence = importers.read_for_plan(path, changes, model, world)
        typer.echo(sentence, err=True)
        return cast("Recipe", imported)
    if path == named and (model is not None or world is not None):
        fix = "shardwise plan RECIPE model.preset=... cluster.preset=..."
        why = "this is a recipe, or no file of a known trainer"
        raise RecipeError(
            "--model and --world are for other trainers' files", where=str(path), why=why, fix=fix
        )
    return read_request(path, changes)[0]


def _importers_of(recipe: Path) -> ModuleType | None:
    """The plugin that reads other trainers' files, where the file is one."""
    importers = plugin("importers.checked")
    return importers if importers is not None and importers.is_foreign(recipe) else None


def _show_versus(named: Sequence[tuple[str, Callable[[], Recipe]]], as_json: bool) -> None:
    """Plan each recipe, and print a table of the differences. The exit code is the first plan's.

    A further recipe that is refused does not end the comparison, unless all of them are: its line says why,
    and the exit code is 2 where the first plan's is 0.
    """
    from shardwise.core.versus import Compared, Refused, versus_values
    from shardwise.jobs.planning import make_plan, refuse_unfit
    from shardwise.planner.answer import answer_of

    compared: list[Compared] = []
    refused: list[Refused] = []

    @contextmanager
    def noting(name: str) -> Iterator[None]:
        try:
            yield
        except RecipeError as error:
            if name == named[0][0] or len(refused) == len(named) - 2:
                raise
            refused.append(Refused(name, error.line()))

    asked: list[tuple[str, Recipe]] = []
    for name, read in named:
        with noting(name):
            asked.append((name, read()))
    for name, recipe in asked:
        with noting(name):
            cluster = measured_cluster(recipe)
            with planning() as progress:
                # Neighbours are in the object of --json, and in no table of differences.
                plan = make_plan(recipe, cluster, compare=as_json and not compared, progress=progress)
            compared.append(Compared(name, plan, answer_of(recipe, cluster, plan)))
    first = compared[0]
    if as_json:
        others = versus_values(compared) + [{"name": one.name, "refused": one.why} for one in refused]
        values = first.plan.as_dict() | first.answer.as_dict() | {"versus": others}
        print(json.dumps(values, indent=1))
    else:
        from rich.console import Console

        from shardwise.report.versus import versus_table

        Console().print(versus_table(compared))
    for one in refused:
        typer.echo(f"\n{one.name}\n{one.why}", err=True)
    refuse_unfit(first.plan)
    if refused:
        raise typer.Exit(RecipeError.exit_code)


def _show_plan(asked: Recipe, options: _Options) -> None:
    from shardwise.jobs.planning import make_plan, refuse_unfit

    cluster = measured_cluster(asked)
    tried: tuple[DeviceTry, ...] = ()
    told: list[Plan] = []
    with planning() as working:
        if options.fewest:
            search = require_plugin("fewest_devices.search", "--for devices")
            asked, cluster, tried = search.fewest_devices(asked, cluster, options.within, working)
        tell = _told_to(told, working) if not options.as_json else _say_nothing
        plan = make_plan(asked, cluster, compare=True, progress=working, answered=tell)
    advice = None
    if options.explain or not plan.fits:
        from shardwise.planner.fit_advice import advise  # loads torch

        with planning() as progress:
            progress("what would fit")
            advice = advise(asked, cluster, plan)
    from shardwise.planner.answer import answer_of

    answer = replace(answer_of(asked, cluster, plan), devices=tried)
    if options.limits:
        from shardwise.planner.limits import limits_of

        with planning() as progress:
            answer = replace(answer, limits=limits_of(asked, cluster, plan, progress))
    laws = plugin("scaling.report.standing")
    stands = laws.standing_of(asked, plan) if laws is not None else None
    if options.as_json:
        added = answer.as_dict()
        added |= {"ladder": advice.as_dict()} if advice else {}
        added |= {"standing": laws.standing_values(stands)} if laws is not None and stands else {}
        print(json.dumps(plan.as_dict() | added, indent=1))
    else:
        from rich.console import Console

        from shardwise.report.fit_advice import advice_table
        from shardwise.report.tables import PlanPart, plan_table

        standing = stands.sentences() if stands else ()
        part: PlanPart = "rest" if told else "whole"
        Console().print(plan_table(plan, options.top, standing, answer, brief=not options.full, part=part))
        if advice is not None:
            Console().print(advice_table(advice))
    _write_files(asked, cluster, plan, (answer, advice), options)
    refuse_unfit(plan, advice)


def _say_nothing(plan: Plan) -> None:
    """For output that is one object."""


def _told_to(told: list[Plan], working: Working) -> Callable[[Plan], None]:
    """Prints the answer's first lines while the planner goes on with the alternatives, and adds the plan to a list."""

    def tell(plan: Plan) -> None:
        from rich.console import Console

        from shardwise.report.tables import plan_table

        working.stop()
        Console().print(plan_table(plan, part="head"))
        told.append(plan)

    return tell


def _write_files(
    asked: Recipe, cluster: Cluster, plan: Plan, told: tuple[Answer, FitAdvice | None], options: _Options
) -> None:
    """The page and the snapshot that are asked for."""
    if options.html is not None:
        from shardwise.recipe.load import dump_recipe
        from shardwise.report.run import write_plan_page

        write_plan_page(plan, dump_recipe(asked), options.html, *told, options.name)
    if options.snapshot is not None:
        from shardwise.core.atomic_file import write_whole
        from shardwise.jobs.planning import planned_snapshot

        write_whole(options.snapshot, planned_snapshot(asked, cluster, plan))
