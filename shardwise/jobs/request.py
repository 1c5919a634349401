"""Reading a recipe, and what a caller passes to the other jobs. Imports neither torch nor numpy: errors come fast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from shardwise.core.errors import RecipeError
from shardwise.core.plugins import plugin
from shardwise.core.strategy import FolderForm
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.recipe.load import read_recipe
from shardwise.recipe.paths import require_modules, with_whole_paths
from shardwise.recipe.sections import Recipe
from shardwise.recipe.yaml_source import YamlDocument
from shardwise.technique import SETTINGS, refuse_broken, refuse_unsupported


class RunWorkers(Protocol):
    """Runs worker processes to their end. Raises OutOfMemory when they may start again, else what the caller chose.

    Args:
        processes: how many to start, ranks 0 to ``processes`` - 1.
        arguments: of ``shardwise.worker``.
        logs: the folder for one log per rank.
        saves: whether they save checkpoints, from which the same command goes on.
    """

    def __call__(
        self, processes: int, arguments: Sequence[str], logs: Path, *, saves: bool = True
    ) -> None: ...


def read_request(
    recipe_file: Path, overrides: Sequence[str], *, modules: bool = True
) -> tuple[Recipe, Cluster]:
    """Read and check a recipe without loading torch. Raises RecipeError with the file and the line at fault.

    Args:
        modules: whether the user's modules and the scaling law that it names must be there.
    """
    recipe, source = read_recipe(recipe_file, overrides, SETTINGS)
    if modules:
        require_modules(with_whole_paths(source, SETTINGS))
        _require_law(recipe, source)
    cluster = cluster_of(recipe.cluster)

    def where(key: str) -> str:
        return source.where(("strategy", key))

    refuse_broken(recipe, cluster.world_size, where)
    refuse_unsupported(recipe.strategy, cluster.device, where)
    return recipe, cluster


def _require_law(recipe: Recipe, source: YamlDocument) -> None:
    """Raise RecipeError for a scaling law that cannot be read: else a plan that took minutes would end with it."""
    files = plugin("scaling.files")
    try:
        if files is not None:
            files.read_law(recipe.law)
    except RecipeError as error:
        raise RecipeError(error.what, where=source.where(("law",)), why=error.why, fix=error.fix) from error


def refuse_plan_only(cluster: Cluster) -> None:
    """Raise RecipeError where Shardwise cannot train on the cluster's devices."""
    device = cluster.device
    if device.traits.plan_only:
        raise RecipeError(
            f"{device.name} is plan only",
            where="cluster",
            why=f"torch.distributed has no backend for {device.traits.torch_type}",
            fix="train on a CUDA or ROCm device, or with cluster.device=cpu",
        )


def require_one_node(cluster: Cluster) -> None:
    """Raise RecipeError where one command would start the ranks of several machines on this one.

    Processes on CPUs need no device of their own: there a recipe of several nodes may be rehearsed on one.
    """
    if cluster.nodes > 1 and not cluster.device.traits.is_host:
        raise RecipeError(
            f"the cluster has {cluster.nodes:,} nodes, and this command runs on one",
            where="cluster.nodes",
            why="torchrun or srun starts the ranks of several",
            fix="write a job with `shardwise launch`, or set cluster.nodes=1",
        )


def require_folders(recipe: Recipe) -> None:
    """Raise RecipeError where a folder that the strategy names is not on this machine. A plan needs no folder."""
    for setting in SETTINGS:
        value = recipe.strategy.get(setting.key)
        for form in setting.forms:
            if not isinstance(form, FolderForm) or (folder := form.folder(value)) is None:
                continue
            if not Path(folder).is_dir():
                why = "it is not a folder" if Path(folder).exists() else "there is no such folder"
                where = f"strategy.{setting.key}: {value}"
                fix = "make it, or name another one"
                raise RecipeError("state cannot be offloaded", where=where, why=why, fix=fix)


def measured_cluster(recipe: Recipe) -> Cluster:
    """The recipe's cluster. Where it is this machine, its speeds are measured first, unless they are known."""
    cluster = cluster_of(recipe.cluster)
    first = plugin("calibration.first")
    if first is not None and first.measured_first(recipe.cluster, cluster):
        return cluster_of(recipe.cluster)
    return cluster
