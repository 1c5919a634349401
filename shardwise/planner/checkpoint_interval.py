"""How often to save: the checkpoint interval that loses least time at the cluster's failure rate.

A failure costs the steps since the last checkpoint, and every checkpoint costs time, so there is an optimal interval
(Young 1974, doi:10.1145/361147.361115). Daly 2006 (doi:10.1016/j.future.2004.11.016) gives it to higher order for
failures that come at random with a constant rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardwise.core.units import format_bytes, format_percent, format_seconds
from shardwise.hardware.cluster import Cluster
from shardwise.planner.predict import Prediction
from shardwise.recipe.sections import Recipe


def best_interval(stall: float, between_failures: float) -> float:
    """Seconds of training between two saves that lose least time (Daly 2006, equation 37).

    Args:
        stall: seconds that training waits for a save.
        between_failures: mean seconds between two failures of the whole job.
    """
    # There the series below does not hold. Daly: save once per mean time between failures.
    if stall >= 2 * between_failures:
        return between_failures
    ratio = stall / (2 * between_failures)
    # Young 1974 is the first root; the factor in parentheses corrects for failures while work is repeated.
    return math.sqrt(2 * stall * between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def effective_share(interval: float, stall: float, restart: float, between_failures: float) -> float:
    """Share of the time that goes into steps which count (Daly 2006, equation 20, inverted).

    Args:
        interval: seconds of training between two saves.
        restart: seconds from a failure to the first step after it.
    """
    segment = (interval + stall) / between_failures
    # 1 / (exp(restart) * expm1(segment)), which would overflow where nearly every segment fails.
    kept = math.exp(-segment - restart / between_failures) / -math.expm1(-segment)
    return interval / between_failures * kept


def advice(recipe: Recipe, chosen: Prediction, cluster: Cluster) -> Iterator[str]:
    """The interval in steps, and what the recipe's own loses; nothing for a run that is shorter than the interval."""
    device = cluster.device
    spec = recipe.checkpoint
    saved = chosen.run.saved_bytes
    stall = saved / (device.host_bandwidth if spec.background else device.disk_bandwidth)
    failures = 3600 * recipe.cluster.hours_between_failures / cluster.world_size
    seconds = chosen.step.seconds
    every = max(1, round(best_interval(stall, failures) / seconds))
    if every >= recipe.steps:
        return
    restart = saved / device.disk_bandwidth

    def lost(steps: int) -> float:
        return 1 - effective_share(steps * seconds, stall, restart, failures)

    own = spec.every or recipe.steps
    yield (
        f"checkpoint.every: {every} loses least time, {format_percent(lost(every), 1)}, with a failure of one of"
        f" {cluster.world_size:,} devices every {format_seconds(failures)}: a save of {format_bytes(saved)} per rank"
        f" stalls training for {format_seconds(stall)}"
        + (f"; every {own} loses {format_percent(lost(own), 1)}" if own != every else "")
    )
