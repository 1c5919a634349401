"""The public interface for Python: what the commands do. Only ``train`` and ``train_module`` print, their progress;
and a first plan for this machine measures it, and says so in one line on standard error (not with
``SHARDWISE_MEASURE=0``).

``train`` and ``verify`` start one process per device of this machine and return when these have ended. The output of
the processes is in their logs, and the reason of a failure is in the error. Names listed in ``shardwise.__all__`` are
public; everything else may change between versions.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.core.errors import CheckpointError as CheckpointError
from shardwise.core.errors import DataError as DataError
from shardwise.core.errors import NumericsError as NumericsError
from shardwise.core.errors import Preempted as Preempted
from shardwise.core.errors import RankError as RankError
from shardwise.core.errors import RecipeError as RecipeError
from shardwise.core.errors import ResourceError as ResourceError
from shardwise.core.errors import ShardwiseError as ShardwiseError
from shardwise.core.paths import path_of
from shardwise.core.plan import Plan as Plan
from shardwise.core.plugins import require_plugin
from shardwise.core.run_files import Which
from shardwise.core.user_objects import giving, here
from shardwise.exporter.export_run import export_run
from shardwise.exporter.module_weights import load_into as load_into
from shardwise.hardware.cluster import Cluster as Cluster
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs import training, verifying
from shardwise.jobs.live_bar import live_bar
from shardwise.jobs.objects import Given, recipe_from, with_callbacks
from shardwise.jobs.planning import make_plan
from shardwise.jobs.request import measured_cluster
from shardwise.jobs.session import Session as Session
from shardwise.jobs.session import open_session
from shardwise.jobs.trained_run import TrainedRun as TrainedRun
from shardwise.jobs.trained_run import trained_run
from shardwise.launch.launcher import preloaded_run, run_ranks
from shardwise.recipe.installed import recipe_file
from shardwise.recipe.load import load_recipe
from shardwise.recipe.sections import Recipe as Recipe
from shardwise.report.record import RunRecord as RunRecord
from shardwise.technique import SETTINGS
from shardwise.trainer.hooks import Callback as Callback
from shardwise.verifier.verdict import Verdict as Verdict

_OPTIONS = ("steps", "batch_size", "optimizer", "schedule", "cluster", "callbacks", "compute_metrics")


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: a YAML file, or the name of an installed recipe, such as quickstart.
        overrides: ``section.key=value``, applied in order.

    Raises:
        RecipeError: the recipe has a fault; the error names the file, the line and the key.
    """
    return load_recipe(recipe_file(str(path)), list(overrides), SETTINGS)


def plan(
    recipe: Recipe | None = None,
    cluster: Cluster | str | Mapping[str, Any] | None = None,
    *,
    module: nn.Module | None = None,
    loss: Callable[..., Any] | None = None,
    dataset: Any = None,
    **options: Any,
) -> Plan:
    """Choose the strategy settings that the recipe does not pin, and predict memory and time.

        shardwise.plan(recipe)
        shardwise.plan(module=net, loss=loss, dataset=data, steps=1000, batch_size=64, cluster="8xH100-80GB")

    A plan that does not fit is returned too: ``plan.fits`` is False then.

    Args:
        cluster: plan for this cluster instead of the recipe's; with a module also as in ``train_module``.
        module, loss, dataset, options: instead of a recipe, as in ``train_module``. The module may be on the meta
            device, and its values are not read.

    Raises:
        RecipeError: the pinned strategy breaks a rule, or an object or a key is wrong.
    """
    other = cluster if isinstance(cluster, Cluster) else None
    if recipe is not None:
        if other is not cluster or module is not None or options:
            fix = "give the module, or a recipe with the overrides of shardwise.load"
            raise RecipeError("a recipe needs no arguments of fit", where="plan", fix=fix)
        return make_plan(recipe, other or measured_cluster(recipe), compare=True)
    named = "auto" if other is not None or cluster is None else cluster
    own = _with_objects(module, loss, dataset, None, {**options, "cluster": named}, "plan")
    with here(own.objects):
        return make_plan(own.recipe, other or measured_cluster(own.recipe), compare=True)


def train(
    recipe: Recipe,
    plan: Plan,
    out: str | Path,
    *,
    exact_memory: bool = False,
    callbacks: Sequence[object] = (),
    progress: bool | None = None,
) -> TrainedRun:
    """Train exactly ``plan`` on this machine; resumes when ``out`` holds a checkpoint.

    After an OOM the run goes on with half the micro-batch, now or when it is resumed. A finished run is left as it is.

    Args:
        out: the folder of the run.
        exact_memory: measure memory over the whole run (slower on the CPU).
        callbacks: objects or classes like ``Callback``, after those of the recipe.
        progress: True shows a bar, False nothing. None shows a bar in a notebook, and in a script a line on standard
            error every ten seconds.

    Raises:
        DataError: the data cannot be read.
        ResourceError: the plan does not fit, the folder cannot be written, or an OOM happened with a micro-batch of 1.
        CheckpointError: the folder holds a checkpoint of another run.
        RankError: the run failed or was stopped, with the reason; ``out``/logs has more.
    """
    return _trained(with_callbacks(Given(recipe, {}), callbacks), plan, path_of(out), exact_memory, progress)


def train_module(
    module: nn.Module,
    loss: Callable[..., Any],
    dataset: Any,
    *,
    out: str | Path,
    steps: int,
    batch_size: int,
    optimizer: Any = None,
    schedule: Any = None,
    cluster: str | Mapping[str, Any] = "auto",
    callbacks: Sequence[object] = (),
    compute_metrics: Callable[..., Any] | None = None,
    progress: bool | None = None,
    **sections: Any,
) -> TrainedRun:
    """Plan and train a module of your own; resumes when ``out`` holds a checkpoint.

    The processes of the run get the objects by cloudpickle, so those of a script or of a notebook work too. Training
    starts from the module's values. ``module`` is unchanged: ``record.load_into(module)`` reads the trained values.

    Args:
        module: any ``nn.Module``. Its method ``units()``, if there is one, returns the blocks to wrap one by one.
        loss: ``loss(module, batch)`` returns (sum over the valid targets, number of valid targets).
        dataset: map-style dataset of dicts of tensors, or a function that makes one.
        out: the folder of the run.
        batch_size: samples per step over all devices.
        optimizer: a name of ``optimizer.name``; any ``torch.optim.Optimizer`` class or a ``functools.partial`` of one;
            or a function of (name, parameter) pairs that returns one or several; or the recipe's section. None is
            AdamW.
        schedule: a name of ``schedule.name``, or a function of the step (from 0), and perhaps the number of steps, that
            returns the fraction of the peak learning rate; or the recipe's section. None is constant.
        cluster: auto is this machine; else a preset, or the recipe's section.
        callbacks: objects or classes like ``Callback``.
        compute_metrics: ``compute_metrics(predictions, batch)`` returns a dict of numbers. ``predictions`` is what the
            module returned and ``batch`` what the dataset gave, on the CPU, of all held-out samples of all ranks.
        progress: True shows a bar, False nothing. None shows a bar in a notebook, and in a script a line on standard
            error every ten seconds.
        sections: further keys of a recipe, such as ``strategy={"zero_stage": 3}`` or ``trackers=["csv"]``.

    Raises:
        RecipeError: an object or a key is wrong.
        ResourceError, DataError, CheckpointError, RankError: as ``train``.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        given = recipe_from(
            module,
            loss,
            dataset,
            Path(folder),
            steps=steps,
            batch_size=batch_size,
            optimizer=optimizer,
            schedule=schedule,
            cluster=cluster,
            callbacks=callbacks,
            compute_metrics=compute_metrics,
            sections=sections,
        )
        return _trained(given, None, path_of(out), False, progress)


@contextmanager
def session(
    recipe: Recipe | None = None,
    plan: Plan | None = None,
    *,
    module: nn.Module | None = None,
    loss: Callable[..., Any] | None = None,
    dataset: Any = None,
    **options: Any,
) -> Iterator[Session]:
    """A run for a training loop of your own: the recipe's, or that of objects as in ``train_module``.

        with shardwise.session(recipe) as run:
            for batch in run.batches():
                loss = run.forward_backward(batch)
                run.step()

    It runs in this process: alone, as a rank that torchrun or srun started, or in the process group that exists.

    Args:
        plan: None plans the recipe, on rank 0.
        module, loss, dataset, options: instead of a recipe, as in ``train_module``; all ranks give the same.

    Raises:
        RecipeError: the recipe, an object or the number of processes is wrong.
        ResourceError: the plan does not fit.
    """
    if recipe is not None:
        with open_session(recipe, plan) as opened:
            yield opened
        return
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        own = _with_objects(module, loss, dataset, Path(folder), options, "session")
        with here(own.objects), open_session(own.recipe, plan) as opened:
            yield opened


def _with_objects(
    module: nn.Module | None,
    loss: Callable[..., Any] | None,
    dataset: Any,
    folder: Path | None,
    options: Mapping[str, Any],
    where: str,
) -> Given:
    """The recipe of a module with its loss and dataset, and of the other arguments of ``train_module``."""
    if module is None or loss is None:
        raise RecipeError("there is no model", where=where, fix="give a recipe, or module and loss")
    known = {name: value for name, value in options.items() if name in _OPTIONS}
    sections = {name: value for name, value in options.items() if name not in _OPTIONS}
    return recipe_from(module, loss, dataset, folder, **known, sections=sections)


def spawn(function: Callable[[], object], ranks: int, *, logs: str | Path | None = None) -> None:
    """Call a function on several ranks of this machine, each in a process of its own, as from a cell of a notebook.

        def train():
            with shardwise.session(recipe, plan) as run: ...

        shardwise.spawn(train, ranks=2)

    The function travels by cloudpickle, with what it refers to. Its results stay in its processes.

    Args:
        ranks: number of processes; as many as the plan of its session has.
        logs: folder for the output of each rank; that of rank 0 is also shown. None is a temporary one, which is kept
            where a rank fails.

    Raises:
        RecipeError: the function cannot be sent.
        RankError: a rank failed, with the reason.
    """
    folder = path_of(logs) if logs is not None else Path(tempfile.mkdtemp(prefix="shardwise-"))
    with giving({"call": function}) as environment:
        _run_workers(ranks, ["call", str(folder)], folder, saves=False, environment=environment, aloud=True)
    if logs is None:
        shutil.rmtree(folder, ignore_errors=True)


def _trained(
    given: Given, plan: Plan | None, out: Path, exact_memory: bool, progress: bool | None
) -> TrainedRun:
    with giving(given.objects) as environment, live_bar(out, given.recipe.steps, progress):
        workers = partial(_run_workers, environment=environment)
        cluster = cluster_of(given.recipe.cluster) if plan else measured_cluster(given.recipe)
        with preloaded_run(cluster.world_size):
            training.train_in_folder(
                given.recipe, cluster, out, workers, plan=plan, exact_memory=exact_memory
            )
    return trained_run(out)


def export(
    run: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    base: bool = False,
    checkpoint: Which = "latest",
) -> Path:
    """Write a checkpoint of a run as a folder that transformers loads; returns that folder.

    Of a module of your own it has model.safetensors alone, under the names of its ``state_dict``.

    Args:
        run: the folder of the run.
        dtype: fp32, bf16 or fp16; None takes the precision that the run computed in, or of a module of your own the
            dtypes of the checkpoint.
        base: write the frozen base of the run's adapters, dequantized, without them.
        checkpoint: latest, or best with ``checkpoint.best``.
    """
    return export_run(path_of(run), path_of(out), dtype, base, checkpoint)[0].folder


def merge(
    base: str | Path, adapter: str | Path, out: str | Path, *, dtype: str | None = None, undo: bool = False
) -> Path:
    """Add an adapter into the weights of its base model and write the result; returns its folder.

    Args:
        base: the folder or hub id of a model.
        adapter: the folder of an adapter in PEFT's format.
        dtype: fp32, bf16 or fp16; None keeps the dtype of the base.
        undo: take the adapter out of a merged model instead.
    """
    merging = require_plugin("merge.merging", "shardwise.merge")
    if undo:
        folder: Path = merging.unmerge(str(base), path_of(adapter), path_of(out), dtype).folder
    else:
        folder = merging.merge_adapter(str(base), path_of(adapter), path_of(out), dtype)[0].folder
    return folder


def verify(recipe: Recipe, plan: Plan, *, steps: int = 20) -> Verdict:
    """Train ``plan`` and one plain process on the same data and compare them step by step.

    Args:
        steps: optimizer steps to compare.

    Raises:
        DataError: the data cannot be read.
        ResourceError: the plan does not fit.
        RankError: a process failed, with the reason; its logs are kept.
    """
    return verifying.verify_plan(recipe, cluster_of(recipe.cluster), _run_workers, plan=plan, steps=steps)[1]


def _run_workers(
    processes: int,
    arguments: Sequence[str],
    logs: Path,
    *,
    saves: bool = True,
    environment: Mapping[str, str] | None = None,
    aloud: bool = False,
) -> None:
    code, line = run_ranks(processes, arguments, logs, environment, aloud=aloud, saves=saves)
    if code == Preempted.exit_code:
        why = "it was asked to stop, and has saved: the same call goes on from there"
        raise RankError("the run stopped", where=str(logs), why=why)
    if code != 0:
        raise RankError("the run failed", where=str(logs), why=line.removeprefix("error: "))
