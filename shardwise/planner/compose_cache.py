"""Corners of compositions in files, so that a second plan of a similar recipe makes no dry run.

A file is named by a hash of all that its corner depends on: the point, the recipe's model, data and optimizer, the kind
and number of devices, the versions of torch and of the code of this package, the processor. It holds arrays and JSON,
never pickles. A file that cannot be read, or that is another corner's, counts as missing and is written anew. Files are
renamed into place, so processes may share the folder. Models from a factory or from Hugging Face are not stored: their
code and files may change under the same name.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.core.cache_folder import code_digest, default_root, key_of, store
from shardwise.core.cost import Collective, CountedCall, Kernel, Transfer
from shardwise.core.errors import ResourceError
from shardwise.dryrun.moments import LEDGER_ROWS
from shardwise.hardware.cluster import Cluster
from shardwise.planner.compose_corner import Corner, CornerPoint, Counting
from shardwise.recipe.sections import Recipe
from shardwise.runtime.torch_private_onednn import onednn_compiles

CORNERS_FOLDER = "corners"

_CALL_TYPES: Mapping[str, type[Kernel] | type[Collective] | type[Transfer]] = {
    kind.__name__: kind for kind in (Kernel, Collective, Transfer)
}
_PLAIN_FIELDS = (
    "parameters",
    "disk_bytes",
    "communicators",
    "even",
    "compute_dtype",
    "repeat_every",
    "min_depth",
)
_IRRELEVANT = {
    *("steps", "batch_size", "seed", "watchdog", "schedule", "plan"),
    *("cluster", "strategy", "checkpoint", "evaluation"),
}
logger = logging.getLogger(__name__)


def with_disk_cache(count: Counting, recipe: Recipe, cluster: Cluster) -> Counting:
    """``count`` with a memory on disk, where the recipe's model allows it."""
    if recipe.model.factory is not None or recipe.model.hf is not None:
        return count
    given = json.dumps([_counting_versions(), _asked(recipe, cluster)], sort_keys=True)

    def corner(point: CornerPoint) -> Corner:
        values = {key: str(value) for key, value in point.strategy.values.items()}
        wanted = f"{given}{values}{point.depth} {point.size} {point.passes}"
        key = key_of([wanted])
        try:
            path = default_root() / CORNERS_FOLDER / f"{key}.npz"
        except ResourceError:
            return count(point)
        found = _read_corner(path, key)
        if found is None:
            found = count(point)
            _write_corner(path, key, found)
        return found

    return corner


def _asked(recipe: Recipe, cluster: Cluster) -> list[object]:
    shown = recipe.model_dump(mode="json", exclude=_IRRELEVANT)
    return [shown, cluster.device.name, cluster.device.kind, cluster.nodes, cluster.devices_per_node]


@functools.cache
def _counting_versions() -> list[str]:
    """Of torch, of this package's code and of the processor, whose library compiles kernels."""
    compiled = {str(dtype): amx for dtype, amx in onednn_compiles().items()}
    return [torch.__version__, code_digest(), platform.machine(), str(compiled)]


def _read_corner(path: Path, key: str) -> Corner | None:
    """The corner in a file; None if the file is missing, damaged, or another's."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            passes, rows, host, order = (arrays[name] for name in ("passes", "bytes", "host", "order"))
        if header["key"] != key or rows.shape != (len(header["names"]), len(LEDGER_ROWS)):
            return None
        known: list[CountedCall] = [_call_from(values) for values in header["calls"]]
        return Corner(
            names=tuple(header["names"]),
            passes=passes.astype(np.int64),
            bytes=rows.astype(np.int64),
            calls=tuple((int(number), known[which]) for number, which in order),
            host=host.astype(np.int64),
            notes=tuple(header["notes"]),
            **header["plain"],
        )
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a damaged file makes of the reader
        logger.debug("%s is not a stored dry run: %s", path, error)
        return None


def _call_from(values: list[Any]) -> CountedCall:
    kind, fields = values
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return _CALL_TYPES[kind](**given)


def _write_corner(path: Path, key: str, corner: Corner) -> None:
    """Store a corner."""
    which: dict[CountedCall, int] = {}
    order = [(number, which.setdefault(call, len(which))) for number, call in corner.calls]
    header = {
        "key": key,
        "names": corner.names,
        "calls": [(type(call).__name__, vars(call)) for call in which],
        "notes": corner.notes,
        "plain": {name: getattr(corner, name) for name in _PLAIN_FIELDS},
    }
    content = io.BytesIO()
    np.savez_compressed(
        content,
        header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
        passes=corner.passes,
        bytes=corner.bytes,
        host=corner.host,
        order=np.array(order, dtype=np.int64).reshape(-1, 2),
    )
    store(path, content.getvalue())
