"""Training a recipe in a folder: check, plan, run the workers, report."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from shardwise.checkpoint.ignored_settings import require_same_settings
from shardwise.checkpoint.resume_checks import check_start, finished, recipe_of_run
from shardwise.checkpoint.run_folder import claim, lacks_page, with_date, write_job
from shardwise.core.atomic_file import write_whole
from shardwise.core.attempts import Attempts
from shardwise.core.errors import OutOfMemory, RecipeError
from shardwise.core.extras import install
from shardwise.core.identity import Start, append
from shardwise.core.plan import Plan
from shardwise.core.plugins import plugin
from shardwise.core.progress import Progress, Say, silent
from shardwise.data import check_data
from shardwise.data.epochs import epoch_sentences, with_steps
from shardwise.hardware.cluster import Cluster
from shardwise.jobs.planning import plan_after_oom, plan_remembering, planned_snapshot, refuse_unfit
from shardwise.jobs.request import RunWorkers, refuse_plan_only, require_folders, require_one_node
from shardwise.recipe.lr_scaling import scaling_sentences
from shardwise.recipe.sections import Recipe


def train_in_folder(
    recipe: Recipe,
    cluster: Cluster,
    folder: Path,
    run_workers: RunWorkers,
    *,
    plan: Plan | None = None,
    exact_memory: bool = False,
    say: Say = lambda sentence: None,
    progress: Progress = silent,
) -> bool:
    """Train a recipe in ``folder`` and write the report; resumes when the folder holds a checkpoint.

    A finished run is left as it is. Returns whether there was anything to train.

    Args:
        run_workers: runs the worker processes.
        plan: the plan to train; None makes one.
        exact_memory: measure memory over the whole run.
        say: gets each sentence for the user.
        progress: gets a line for each stage before and after the training.

    Raises:
        ShardwiseError: the data, the plan or the folder was refused, or what ``run_workers`` raises.
    """
    refuse_plan_only(cluster)
    require_one_node(cluster)
    with claim(folder):
        planned = prepare_training(recipe, cluster, folder, plan, say, progress)
        if planned is not None:
            flags = ["--exact-memory"] if exact_memory else []
            _run_until_trained(recipe, cluster, folder, run_workers, planned, flags, say)
        if planned is not None or lacks_page(folder):
            page = finish(folder, progress)
            for sentence in last_words(folder, page):
                say(sentence)
        return planned is not None


def _run_until_trained(
    recipe: Recipe,
    cluster: Cluster,
    folder: Path,
    run_workers: RunWorkers,
    plan: Plan,
    flags: Sequence[str],
    say: Say,
) -> None:
    """Run the workers; after an OOM, plan with half the micro-batch and run them again."""
    attempts = Attempts(folder)
    while True:
        attempts.began()
        try:
            run_workers(plan.world_size, ["train", *flags, "--", str(folder)], folder / "logs")
            attempts.ended("")
            return
        except BaseException as error:
            attempts.ended(str(error) or type(error).__name__)
            if not isinstance(error, OutOfMemory):
                raise
            plan, sentence = plan_after_oom(recipe, cluster, folder, plan)
        write_job(folder, recipe_of_run(folder), plan)  # with the steps and the date that the run began with
        say(sentence)


def prepare_training(
    recipe: Recipe,
    cluster: Cluster,
    folder: Path,
    plan: Plan | None,
    say: Say,
    progress: Progress = silent,
) -> Plan | None:
    """Check everything, plan, and write the recipe and the plan into the folder.

    Returns:
        The plan to train, or None when all steps of the folder's run are done.

    Raises:
        DataError, CheckpointError, RecipeError: the data or the folder cannot be used with this recipe.
        ResourceError: the plan does not fit, or the folder cannot be written.
    """
    require_trackers(recipe)
    progress("reading the data")
    recipe = with_date(recipe, folder)
    sentences = check_data(recipe)
    asked = recipe
    recipe = with_steps(recipe)
    check_start(recipe, folder)
    if done := finished(recipe, folder):
        require_same_settings(recipe_of_run(folder), recipe, folder)
        say(done)
        return None
    require_folders(recipe)
    progress("planning")
    planned, reasons = plan_remembering(
        recipe, cluster, folder, plan, lambda line: progress(f"planning: {line}")
    )
    refuse_unfit(planned)
    _require_several_micro_batches(recipe, planned)
    write_job(folder, recipe, planned)
    append(folder, Start.now(folder))
    if recipe.profile.steps:
        _write_planned_memory(recipe, cluster, planned, folder)
    sentences += epoch_sentences(asked, recipe)
    first = f"{planned.line}  →  {folder}"
    for sentence in [first, *sentences, *reasons, *scaling_sentences(recipe), *planned.departures]:
        say(sentence)
    return planned


def _require_several_micro_batches(recipe: Recipe, plan: Plan) -> None:
    """Raise RecipeError where a step has no two batch sizes, whose gradients the noise scale compares."""
    if recipe.evaluation.noise_scale and plan.micro_batches < 2:
        raise RecipeError(
            "the noise scale cannot be measured",
            where="evaluation.noise_scale",
            why=f"a step of {plan.line} has one micro-batch, and gradients of two batch sizes are compared",
            fix="set strategy.micro_batch_size so that a rank accumulates over at least 2 micro-batches",
        )


def _write_planned_memory(recipe: Recipe, cluster: Cluster, plan: Plan, folder: Path) -> None:
    """The planned step for PyTorch's memory viewer, next to the measured ones."""
    if recipe.profile.memory:
        path = folder / "profile" / "planned.memory.pickle"
        path.parent.mkdir(exist_ok=True)
        write_whole(path, planned_snapshot(recipe, cluster, plan))


def require_trackers(recipe: Recipe) -> None:
    """Raise RecipeError if the library of a tracker is not installed."""
    for name in recipe.trackers:
        if importlib.util.find_spec(name) is None:
            why = f"the package {name} is not installed"
            fix = f"{install(name)}, or leave it out: trackers=[]"
            raise RecipeError("cannot track this run", where=f"trackers: {name}", why=why, fix=fix)


def last_words(folder: Path, page: Path) -> list[str]:
    """Predicted against measured memory and step time of a finished run, and its page."""
    from shardwise.report.record import read_run
    from shardwise.report.step_times import peak_sentences, step_sentences

    run = read_run(folder)
    return [*peak_sentences(run.outcome), *step_sentences(run.plan, run.outcome), f"report: {page}"]


def finish(folder: Path, progress: Progress = silent) -> Path:
    """Add a sample to the report of a trained run and draw its page; returns the page's path."""
    progress("sampling from the trained model")
    from shardwise.report.run import write_report

    if (samples := plugin("serve.samples")) is not None:
        samples.record_sample(folder)
    progress("drawing the page")
    return write_report(folder)
