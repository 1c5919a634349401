"""One corner of a composition: a shallow dry run, reduced to figures that can be stored and scaled.

A corner is a function of the recipe's model, data and optimizer, of the strategy, of the kind and number of devices and
of the code. It does not depend on the memory of a device, the batch size, or the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.core.cost import CountedCall
from shardwise.core.strategy import Strategy
from shardwise.dryrun.moments import LEDGER_ROWS, Bytes
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.hardware.cluster import Cluster
from shardwise.model.blueprint import Blueprint
from shardwise.recipe.sections import Recipe
from shardwise.technique import MICRO_BATCH_SIZE, layout_of


@dataclass(frozen=True)
class CornerPoint:
    """Where a corner is.

    Attributes:
        strategy: with a micro-batch size of 1.
        depth: number of blocks.
        size: sequences of a micro-batch.
        passes: micro-batches that are run.
    """

    strategy: Strategy
    depth: int
    size: int
    passes: int


@dataclass(frozen=True)
class Corner:
    """What rank 0 holds and does at one point.

    Attributes:
        names, passes, bytes: as in dryrun/moments.py.
        calls: micro-batch (-1 outside of them) and call, in order.
        host: rows of the peak in separate host memory.
        parameters: elements of the whole model, unsharded.
        even: whether every parameter shards evenly.
        compute_dtype: as named in device profiles.
        repeat_every, min_depth, notes: hints of the techniques.
    """

    names: tuple[str, ...]
    passes: npt.NDArray[np.int64]
    bytes: Bytes
    calls: tuple[tuple[int, CountedCall], ...]
    host: Bytes
    parameters: int
    disk_bytes: int
    communicators: int
    even: bool
    compute_dtype: str
    repeat_every: int
    min_depth: int
    notes: tuple[str, ...]


Counting = Callable[[CornerPoint], Corner]
"""Returns the corner at a point."""


def corner_counter(recipe: Recipe, blueprint: Blueprint, cluster: Cluster) -> Counting:
    """The function that dry-runs a point."""

    def count(point: CornerPoint) -> Corner:
        layout = layout_of(point.strategy, cluster.world_size)
        batch = point.size * point.passes * layout.data_degree
        strategy = point.strategy.with_values(**{MICRO_BATCH_SIZE.key: point.size})
        asked = recipe.model_copy(update={"batch_size": batch})
        run = dry_run(
            asked, blueprint, strategy, cluster, depth=point.depth, history=False, with_moments=True
        )
        return _corner(run)

    return count


def _corner(run: DryRun) -> Corner:
    found = run.moments
    assert found is not None
    return Corner(
        names=found.names,
        passes=found.passes,
        bytes=found.bytes,
        calls=tuple((-1 if number is None else number, call) for number, call in found.calls),
        host=np.array([getattr(run.host, row) for row in LEDGER_ROWS], dtype=np.int64),
        parameters=run.parameters,
        disk_bytes=run.disk_bytes,
        communicators=run.communicators,
        even=run.even,
        compute_dtype=run.compute_dtype,
        repeat_every=run.hints.repeat_every,
        min_depth=run.hints.min_depth,
        notes=tuple(run.hints.notes),
    )


def between(one: CountedCall, two: CountedCall, steps: int, apart: int) -> CountedCall:
    """The call ``steps`` beyond ``one``, where ``two``, which is alike, is ``apart`` beyond it."""
    if one == two or steps == 0:
        return one

    def number(a: int, b: int) -> int:
        return a + steps * (b - a) // apart

    values: dict[str, Any] = {}
    for name, a in vars(one).items():
        b = getattr(two, name)
        if isinstance(a, tuple):
            values[name] = tuple(number(x, y) for x, y in zip(a, b, strict=True))
        else:
            values[name] = number(a, b) if isinstance(a, int) and not isinstance(a, bool) else a
    return replace(one, **values)
