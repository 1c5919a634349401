"""Plans in files: a plan that was made before is read, in a second, without loading torch.

A file is named by a hash of all that its plan depends on: the recipe without its data's place, the cluster, the
allocator's settings, the code of this package, the versions of torch and transformers, the processor, the config of a
Hugging Face model's folder. Whatever a factory makes, and a model of the Hub, is planned anew: code and files may
change under the same name.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.core.cache_folder import code_digest, default_root, key_of, store
from shardwise.core.errors import DataError, ResourceError
from shardwise.core.plan import Plan, read_plan
from shardwise.hardware.allocator_options import options_in
from shardwise.hardware.cluster import Cluster
from shardwise.recipe.sections import Recipe
from shardwise.technique import AXES, SETTINGS

PLANS_FOLDER = "plans"
_READ_BY_NO_PLAN: Mapping[str, Any] = {
    "seed": True,
    "data": {"source", "date"},
    "cluster": {"price_per_device_hour"},
    "callbacks": True,
    "trackers": True,
}
logger = logging.getLogger(__name__)


def cached_plan(recipe: Recipe, cluster: Cluster, compare: bool, make: Callable[[], Plan]) -> Plan:
    """The plan in the cache, else the one that ``make`` returns, which is then stored."""
    path = _path(recipe, cluster, compare)
    if path is None:
        return make()
    try:
        return read_plan(path, SETTINGS, AXES)
    except DataError as error:
        logger.debug("no stored plan: %s", error)
    plan = make()
    store(path, plan.to_json().encode())
    return plan


def _path(recipe: Recipe, cluster: Cluster, compare: bool) -> Path | None:
    """The file of a plan; None where there is no place for caches, or where code or files may change."""
    made_by_factories = (recipe.model.factory, recipe.objective, recipe.optimizer.factory)
    config = _config_of(recipe.model.hf)
    if config is None or any(made_by_factories):
        return None
    key = key_of(
        [
            config,
            recipe.model_dump_json(exclude=_READ_BY_NO_PLAN),
            cluster,
            cluster.device.measured,  # which a cluster does not print, nor the sources
            cluster.device.source,
            compare,
            options_in(cluster.device.kind),
            code_digest(),
            importlib.metadata.version("torch"),
            platform.machine(),
            _processor(),
        ]
    )
    try:
        return default_root() / PLANS_FOLDER / f"{key}.json"
    except ResourceError:
        return None


def _config_of(model: str | None) -> str | None:
    """The config of a Hugging Face folder, and the version of transformers; None for a model that is elsewhere.

    A folder with code of its own counts as elsewhere.
    """
    if model is None:
        return ""
    folder = Path(model)
    try:
        if any(folder.glob("*.py")):
            return None
        files = (folder / name for name in ("config.json", "adapter_config.json"))
        texts = [path.read_text(encoding="utf-8") for path in files if path.is_file()]
        return "\n".join([importlib.metadata.version("transformers"), *texts]) if texts else None
    except (OSError, importlib.metadata.PackageNotFoundError):
        return None


def _processor() -> str:
    """The processor's features, which decide how its library computes; "" where they are not listed."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""
