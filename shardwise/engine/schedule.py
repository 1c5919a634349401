"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no scheduler state.

Warmup is linear and counts steps from 1, so that the first update is not wasted on a rate of zero. Cosine
and linear decay end exactly at ``floor`` times the peak on the last step (Loshchilov & Hutter 2017).
"""

from __future__ import annotations

import math

from shardwise.core.sections import ScheduleSpec


def warmup_steps(schedule: ScheduleSpec, steps: int) -> int:
    """Warmup in steps: an integer means steps, a fraction below 1 means a share of the run."""
    if schedule.warmup < 1:
        return math.ceil(schedule.warmup * steps)
    return int(schedule.warmup)


def multiplier(schedule: ScheduleSpec, step: int, steps: int) -> float:
    """The factor on the peak learning rate for the update number ``step`` (0-based) of ``steps``."""
    warmup = warmup_steps(schedule, steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    done = (step + 1 - warmup) / max(1, steps - warmup)
    shape = (
        0.5 * (1 + math.cos(math.pi * min(1.0, done))) if schedule.name == "cosine" else max(0.0, 1 - done)
    )
    return schedule.floor + (1 - schedule.floor) * shape
